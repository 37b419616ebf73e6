"""RequestDefaults: what the operator says where a request says nothing. From flags of `quire serve`, never from the wire.

Made once; a route passes each decoded body through `fill`, and chats ask for the role of their answer.
"""

from typing import Any

import msgspec

from quire.frontend.http.api.bodies.schemas import ChatRequest, SamplingFields, StreamOptions, TokenizeRequest


class RequestDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """include_usage: in every event of a stream and at its end, whatever the request says."""

    response_role: str = "assistant"
    chat_template_kwargs: dict[str, Any] = {}
    return_tokens_as_token_ids: bool = False
    include_usage: bool = False

    def fill(self, body: SamplingFields | TokenizeRequest) -> None:
        """Put into the body what it leaves to us."""
        if self.chat_template_kwargs and isinstance(body, ChatRequest | TokenizeRequest):
            body.chat_template_kwargs = {**self.chat_template_kwargs, **(body.chat_template_kwargs or {})}
        if not isinstance(body, SamplingFields):
            return
        if self.return_tokens_as_token_ids and body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = True
        if body.stream:
            body.stream_options = self.stream_options(body.stream_options)

    def stream_options(self, asked: StreamOptions | None) -> StreamOptions | None:
        """A stream's, where the request asks for these."""
        return StreamOptions(include_usage=True, continuous_usage_stats=True) if self.include_usage else asked

    def role(self, body: ChatRequest) -> str:
        """Of the answer: ours, or that of the message that it goes on with. Roles are the template's to know."""
        last = body.messages[-1].get("role")
        return last if body.continue_final_message and isinstance(last, str) else self.response_role
