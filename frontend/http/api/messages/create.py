"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's Messages API, run as chats.

request.py makes a ChatRequest of the body, which is prepared, run and parsed like any chat. answer.py makes content blocks of
the output, in one piece or through stream.py. errors.py has the errors. A max_tokens beyond the context's room is no error: an
answer that reaches the end of the context has a stop_reason for that.
"""

from typing import Any

from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, send_json
from quire.frontend.http.api.bodies.request_media import RequestMedia
from quire.frontend.http.api.bodies.schemas import ChatRequest
from quire.frontend.http.api.chat_run import check_chat, plan_chat, prepare_chat, submit_chat
from quire.frontend.http.api.generate import collect, running
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.messages.answer import Answer
from quire.frontend.http.api.messages.conversation import without_later_system
from quire.frontend.http.api.messages.request import chat_request
from quire.frontend.http.api.messages.schemas import CountTokensRequest, CountTokensResponse, MessagesRequest
from quire.frontend.http.api.messages.stream import MessageStream
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.output_plan import take_tools
from quire.frontend.http.api.prompt import LONG_BODY
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.api.terms import terms_of
from quire.frontend.http.protocol.exchange import Request, Response
from quire.ipc.limits import output_room

_messages_decoder = BodyDecoder(MessagesRequest)
_count_decoder = BodyDecoder(CountTokensRequest)


_NO_ROOM = "prompt is too long: {num_prompt_tokens} tokens > {longest_prompt} maximum"


async def count_tokens(services: Services, request: Request, response: Response) -> None:
    num_bytes = len(request.body)
    body = await read_body(_count_decoder, request, services.unknown_fields)
    await check_model(services, request, body.model)
    chat = await _chat(services, body, num_bytes)
    planned = await plan_chat(
        services, chat, take_tools(chat), owner=request.owner, media=RequestMedia(services, request), **_options(body)
    )
    response.send(200, json_bytes(CountTokensResponse(len(planned.token_ids))))


async def create_message(services: Services, request: Request, response: Response) -> None:
    num_bytes = len(request.body)
    body = await read_body(_messages_decoder, request, services.unknown_fields)
    model, metrics = await check_model(services, request, body.model), services.metrics
    chat = await _chat(services, body, num_bytes)
    checked = check_chat(chat, services.client.tokenizer, None)
    checked.cuts_max_tokens, checked.no_room = True, _NO_ROOM
    checked.terms = terms_of(services, request, body.timeout, body.priority)
    prepared = await prepare_chat(services, chat, checked, RequestMedia(services, request), **_options(body))
    name, runs = new_id("msg", request.headers).replace("-", "_", 1), list[PromptRun]()
    async with running(name, runs, metrics, services.request_log):
        runs.append(submit_chat(services, chat, prepared, name))
        services.request_log.started(name, runs, bool(body.stream))
        room = output_room(len(prepared.token_ids), services.limits.max_model_len)
        answer = Answer(name, model, body, prepared.plan, runs[0], cut_by_context=body.max_tokens > room)
        if body.stream:
            return await MessageStream(response, metrics, answer).run(runs[0])
        ((delta,),) = await collect(runs, metrics, services.max_response_bytes)
        message = await answer.whole(delta)
    if delta.num_tokens > LARGE_ANSWER:
        return await send_json(response, message, services.max_response_bytes)
    response.send(200, json_bytes(message))


async def _chat(services: Services, body: CountTokensRequest, num_bytes: int) -> ChatRequest:
    """The body as a chat. Raises ApiError 400."""
    chat = chat_request(body) if num_bytes <= LONG_BODY else await in_thread(chat_request, body)
    services.defaults.fill(chat)
    return chat


def _options(body: CountTokensRequest) -> dict[str, Any]:
    """Keyword arguments for plan_chat."""
    thinks = body.thinking is None or body.thinking.type != "disabled"
    return {"thinks": thinks, "may_not_reason": True, "instead": without_later_system}
