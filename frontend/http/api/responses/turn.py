"""Turn: one request of /v1/responses, translated and prepared. create.py makes it, running.py runs it."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.request_media import RequestMedia
from quire.frontend.http.api.bodies.schemas import MAX_ITEMS, ChatRequest, Json
from quire.frontend.http.api.chat_run import PreparedChat, check_chat, prepare_chat
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.logs.request_log import given_id
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.responses.answer import ResponseObject, begun
from quire.frontend.http.api.responses.items import check_calls, completed_items, referenced_ids
from quire.frontend.http.api.responses.records import conversation, referred_items
from quire.frontend.http.api.responses.request import ENCRYPTED, ResponsesRequest, check_request
from quire.frontend.http.api.responses.tools import ChatTools, chat_tools
from quire.frontend.http.api.responses.translate import chat_request, in_our_words
from quire.frontend.http.api.responses.truncation import leave_out_oldest
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.terms import terms_of
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request
from quire.frontend.media.errors import MediaError
from quire.frontend.media.parts import forget_places, with_cut
from quire.frontend.text.chat_template import ChatTemplateError

_LONG_BODY, _MANY_ITEMS = 16 << 10, 64  # bytes and items: so much is translated in 2 ms


@dataclass(frozen=True)
class Turn:
    """items: the conversation before the output. chat_body, chat: the chat that runs. tools: those of the chat."""

    owner: str
    body: ResponsesRequest
    items: Sequence[Json]
    chat_body: ChatRequest
    chat: PreparedChat
    response: ResponseObject
    tools: ChatTools

    @property
    def seals(self) -> bool:
        return ENCRYPTED in (self.body.include or ())


async def prepare_turn(services: Services, request: Request, body: ResponsesRequest, num_bytes: int) -> Turn:
    """num_bytes: length of the request's body. Raises ApiError."""
    model = await check_model(services, request, body.model)
    check_request(body, services.limits.max_logprobs)
    id = _new_response_id(request.headers, body.request_id)
    items, more_bytes = await conversation(services.storage, request.owner, body.previous_response_id)
    num_bytes += more_bytes
    references = [] if isinstance(body.input, str) else referenced_ids(body.input or ())
    known = {item["id"]: item for item in items} if references else {}
    known |= await referred_items(services.storage, request.owner, [i for i in references if i not in known])
    small = (
        num_bytes <= _LONG_BODY and len(items) + (0 if isinstance(body.input, str) else len(body.input or ())) <= _MANY_ITEMS
    )
    work = (services, body, id, items, known)
    items, tools, chat_body = _translate(*work) if small else await in_thread(_translate, *work)
    services.defaults.fill(chat_body)
    media, cut = RequestMedia(services, request), dict(request.cut_out)
    try:
        if body.truncation == "auto":
            await leave_out_oldest(services, chat_body, request.owner, media)
        num_logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
        checked = check_chat(chat_body, services.client.tokenizer, num_logprobs)
        checked.terms = terms_of(services, request, body.timeout, body.priority)
        chat = await prepare_chat(services, chat_body, checked, media)
    except ApiError as error:
        raise in_our_words(error, tools) from None
    except MediaError as error:
        raise (error.at("input") if error.param.startswith("messages[") else error) from None
    forget_places(items)
    if cut:
        items = await in_thread(with_cut, items, cut)
    response = begun(body, id, model, chat.params) if small else await in_thread(begun, body, id, model, chat.params)
    return Turn(request.owner, body, items, chat_body, chat, response, tools)


def _translate(
    services: Services, body: ResponsesRequest, id: str, items: list[Json], known: Mapping[str, Json]
) -> tuple[list[Json], ChatTools, ChatRequest]:
    items = items + completed_items([] if body.input is None else body.input, known, id)
    if len(items) > MAX_ITEMS:
        raise invalid(f"input: a conversation may hold at most {MAX_ITEMS} items, this one has {len(items)}", "input")
    check_calls(items)
    tools = chat_tools(body.tools)
    return items, tools, chat_request(body, tools, items, _knows_developer(services, bool(tools.tools)))


def _knows_developer(services: Services, with_tools: bool) -> bool:
    """Whether the model's chat template has the role "developer"."""
    try:
        return "developer" in services.client.tokenizer.template_source(with_tools=with_tools)
    except ChatTemplateError:  # the model has none; rendering the conversation raises the error
        return False


def _new_response_id(headers: Mapping[bytes, bytes], of_body: str | None) -> str:
    """A unique id, which contains the request's own id, if it has one."""
    given = given_id(headers).decode() or of_body
    return f"resp_{given}_{secrets.token_hex(8)}" if given else f"resp_{secrets.token_hex(16)}"
