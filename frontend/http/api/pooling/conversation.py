"""Bodies with prompts that are texts, token ids, or a conversation: the model's chat template makes that a prompt."""

from typing import Any

from quire.frontend.client.pooling import Ids
from quire.frontend.http.api.bodies.schemas import Messages, TemplateVariables, TokenizeRequest
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.pooling.fields import Input, PoolFields, ids_of, kept, prompts_of
from quire.frontend.http.api.prompt import chat_prompt
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request


class ConversationFields(PoolFields, kw_only=True):
    """Either input or messages. Unlike a chat, a conversation does not open the model's answer unless it says so."""

    input: Input | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None


async def ids_of_body(
    services: Services, request: Request, body: ConversationFields, before: str = "", is_query: bool = False
) -> list[Ids]:
    """The ids of its prompts; before, is_query: as for `ids_of`. Raises ApiError 400, TooLong."""
    if (body.input is None) == (body.messages is None):
        what = "input: this field is required" if body.input is None else "input and messages exclude each other"
        raise invalid(what, "input")
    if body.messages is None:
        return await ids_of(services, prompts_of(body.input), body, before, is_query)
    if not body.messages:
        raise invalid("messages must hold at least one message", "messages")
    chat = TokenizeRequest(
        messages=body.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    keep, trusts = kept(body), services.trust_request_chat_template
    _, ids = await chat_prompt(services.client, chat, trusts, owner=request.owner, render=services.render_own)
    most: Any = services.limits.max_model_len if keep == -1 else keep
    return [ids if most is None else ids[-most:] if body.truncation_side == "left" else ids[:most]]
