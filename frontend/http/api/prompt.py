"""Prompts of the generating routes: a conversation as text and token ids, a text as token ids, and their truncation.

`chat_prompt` renders with the model's chat template or with the request's own, in other processes, which bound what a template
may cost. Long texts are tokenized in threads.
"""

import logging
import re
from typing import Any

from msgspec.structs import replace

from quire.frontend.client.client import Client
from quire.frontend.client.encoding import encode_end
from quire.frontend.http.api.bodies.request_media import Begun, RequestMedia, finish
from quire.frontend.http.api.bodies.schemas import MAX_ITEMS, ChatRequest, TokenizeRequest
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.custom_tools import shown_tools
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.chat_template import ChatTemplateError
from quire.frontend.text.prompt_marks import places, without_marks
from quire.frontend.text.request_templates import Render, ToRender, render_apart, render_own
from quire.frontend.text.tokenizer import ChatPrompt
from quire.ipc.limits import output_room

log = logging.getLogger("quire.http")

LONG_BODY = 16 << 10  # bytes: so much is translated in 2 ms

_RESERVED_KWARGS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "self")
)


async def chat_prompt(
    client: Client,
    body: ChatRequest | TokenizeRequest,
    trust_template: bool,
    keep: int | None = None,
    owner: str = "",
    *,
    render: Render = render_own,
    media: RequestMedia | None = None,
) -> tuple[ChatPrompt, list[int]]:
    """The conversation as a prompt, and its token ids, or `keep` of them (`truncated`).

    trust_template: whether a request may bring its own template. owner: of its key. render: renders the model's template.
    media: None if messages hold texts alone. Raises ApiError 400, TooLong.
    """
    if body.chat_template is not None and not trust_template:
        raise invalid(
            "chat_template: this server takes none from requests (see --trust-request-chat-template)", "chat_template"
        )
    options, special, tokenizer = _template_options(body), bool(body.add_special_tokens), client.tokenizer
    try:
        render = render if body.chat_template is None else render_apart
        (source, form), variables = tokenizer.template(body.chat_template, bool(options["tools"])), _template_variables(body)
        wanted = ToRender(source, tokenizer.special_tokens, form, variables=variables, **options)
        wanted = _with_marks(client, body, wanted, keep)
        if media is not None and (begun := media.begin(client, wanted, body.mm_processor_kwargs)) is not None:
            return await _with_items(client, begun, render, owner, special, keep)
        rendered = await render(wanted, owner)
    except ChatTemplateError as error:
        raise invalid(f"messages: {error}", "messages") from None
    except OSError as error:
        log.error("a conversation could not be rendered: %s", error)
        text = "The process that renders chat templates was lost; try again."
        raise ApiError(503, text, code="overloaded", retry_after_s=1) from None
    side = body.truncation_side if isinstance(body, ChatRequest) else None
    if not rendered.marks:
        return ChatPrompt(rendered.text, source), await encoded(client, rendered.text, special, keep, side)
    ids, marks = await client.encode_marked(rendered.text, special, rendered.marks)
    return ChatPrompt(rendered.text, source, marks), ids


async def _with_items(
    client: Client, begun: Begun, render: Render, owner: str, special: bool, keep: int | None
) -> tuple[ChatPrompt, list[int]]:
    try:
        rendered = await render(begun.wanted, owner)
        return await finish(client, begun, rendered.text, begun.wanted.source, rendered.marks, special, keep)
    finally:
        begun.items.cancel()


def _with_marks(client: Client, body: ChatRequest | TokenizeRequest, wanted: ToRender, keep: int | None) -> ToRender:
    """With the prompt's places, if it is a whole one for an engine that takes marks."""
    if keep is not None or not client.welcome.limits.takes_marks or not isinstance(body, ChatRequest):
        return wanted
    return replace(wanted, marks=places(body.messages, bool(wanted.tools)))


def _template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The arguments of Tokenizer.render_chat. Raises ApiError 400."""
    messages = body.messages or []
    parts = [m.get(name) for m in messages for name in ("content", "tool_calls")]
    if sum(len(part) for part in parts if isinstance(part, list)) > MAX_ITEMS:
        raise invalid(f"messages may hold at most {MAX_ITEMS} content parts and tool calls", "messages")
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    if continues and opens:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    return {
        "messages": without_marks(messages),
        "tools": shown_tools(body.tools or []) or None,
        "documents": body.documents or None,
        "add_generation_prompt": opens,
        "continue_final_message": continues,
    }


def _template_variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """chat_template_kwargs, with the variables that other fields of the request set."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED_KWARGS or not re.fullmatch(r"[A-Za-z]\w{0,63}", name):
            raise invalid(f"chat_template_kwargs must not hold {name[:64]!r}", "chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


async def encoded(client: Client, text: str, add_special_tokens: bool, keep: int | None, side: str | None = None) -> list[int]:
    """A text's ids, or `keep` of them (see `truncated`). With `keep`, no more text is tokenized than needed."""
    if keep is None:
        return await client.tokenize(text, add_special_tokens=add_special_tokens)
    ids = await encode_end(
        client.tokenizer, text, add_special_tokens, keep, side == "right", client.welcome.limits.max_model_len
    )
    return truncated(ids, keep, side)


def truncated(token_ids: list[int], keep: int | None, side: str | None = None) -> list[int]:
    """The last `keep` ids (vLLM's truncate_prompt_tokens), or the first ones if the "right" `side` is cut off."""
    if keep is None:
        return token_ids
    return token_ids[:keep] if side == "right" else token_ids[-keep:]


def num_kept(body: Any, max_model_len: int, max_tokens: int | None) -> int | None:
    """truncate_prompt_tokens as a number of tokens; -1 is as many as fit beside max_tokens. None: all. Raises ApiError 400."""
    keep: int | None = body.truncate_prompt_tokens
    if keep == -1:
        return max(1, output_room(max_tokens or 1, max_model_len))
    if keep is not None and keep < 1:
        raise invalid(f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {keep}", "truncate_prompt_tokens")
    return keep
