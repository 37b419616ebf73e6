"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's Messages API over the machinery of chats.

request.py makes a ChatRequest of the body, which is prepared, run and parsed as a chat is; answer.py tells what comes back as
content blocks, in one piece or through stream.py. Errors: errors.py. More tokens than the context has room for are no error:
where such an answer meets the end of the context, it says so.
"""

from typing import NamedTuple

from quire.frontend.client.beam_search import BeamStream
from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.body import BodyDecoder
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, send_json
from quire.frontend.http.api.bodies.params import LONG_BODY, SamplingRequest, check_model, encoded, prompt_text
from quire.frontend.http.api.bodies.reading import read_body
from quire.frontend.http.api.bodies.schemas import ChatRequest
from quire.frontend.http.api.errors import too_long
from quire.frontend.http.api.generate import collect, running
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.messages.answer import Answer
from quire.frontend.http.api.messages.conversation import without_later_system
from quire.frontend.http.api.messages.request import chat_request
from quire.frontend.http.api.messages.schemas import CountTokensRequest, CountTokensResponse, MessagesRequest
from quire.frontend.http.api.messages.stream import MessageStream
from quire.frontend.http.api.output_plan import OutputPlan
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.api.submit import submit
from quire.frontend.http.api.tools.chat_tools import chat_plan, take_tools
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.limits import output_room

_messages_decoder = BodyDecoder(MessagesRequest)
_count_decoder = BodyDecoder(CountTokensRequest)


class _Prompt(NamedTuple):
    """A body as a chat. plan: of its output; None where that is plain text."""

    model: str
    chat: ChatRequest
    ids: list[int]
    plan: OutputPlan | None


async def count_tokens(services: Services, request: Request, response: Response) -> None:
    num_bytes = len(request.body)
    body = await read_body(_count_decoder, request, services.unknown_fields)
    prompt = await _prompt(services, body, num_bytes)
    response.send(200, json_bytes(CountTokensResponse(len(prompt.ids))))


async def create_message(services: Services, request: Request, response: Response) -> None:
    num_bytes = len(request.body)
    body = await read_body(_messages_decoder, request, services.unknown_fields)
    prompt = await _prompt(services, body, num_bytes)
    limits, metrics, plan, ids = services.limits, services.metrics, prompt.plan, prompt.ids
    room = output_room(len(ids), limits.max_model_len)
    if room < 1:
        raise too_long(f"prompt is too long: {len(ids)} tokens > {limits.max_model_len - 1} maximum", "messages")
    sampling = SamplingRequest(
        prompt.chat,
        services.client.tokenizer,
        limits.max_model_len,
        max_tokens=max(1, min(body.max_tokens, room)),
        default_max_tokens=None,
        logprobs=None,
    )
    params = sampling.params(len(ids), "messages")
    params = params if plan is None else plan.params(params)
    name, runs = new_id("msg", request.headers).replace("-", "_", 1), list[PromptRun]()
    async with running(name, runs, metrics, services.request_log):
        runs.append(submit(services.client, prompt.chat, ids, params, name, 0))
        if plan is not None and not isinstance(stream := runs[0].stream, BeamStream):
            plan.show_markers(stream)
        services.request_log.started(name, runs, bool(body.stream))
        answer = Answer(name, prompt.model, body, plan, runs[0], cut_by_context=body.max_tokens > room)
        if body.stream:
            return await MessageStream(response, metrics, answer).run(runs[0])
        ((delta,),) = await collect(runs, metrics, services.max_response_bytes)
        message = await answer.whole(delta)
    if delta.num_tokens > LARGE_ANSWER:
        return await send_json(response, message, services.max_response_bytes)
    response.send(200, json_bytes(message))


async def _prompt_text(chat: ChatRequest, tokenizer: Tokenizer, num_bytes: int) -> str:
    """Raises ApiError 400."""
    try:
        return await prompt_text(chat, tokenizer, False, num_bytes)
    except ApiError:
        if (messages := without_later_system(chat.messages)) is None:
            raise
        chat.messages = messages
    return await prompt_text(chat, tokenizer, False, num_bytes)


async def _prompt(services: Services, body: CountTokensRequest, num_bytes: int) -> _Prompt:
    """Raises ApiError 400 and 404."""
    model = check_model(body.model, services.model_names)
    chat = chat_request(body) if num_bytes <= LONG_BODY else await in_thread(chat_request, body)
    services.defaults.fill(chat)
    tools = take_tools(chat)
    tokenizer = services.client.tokenizer
    text = await _prompt_text(chat, tokenizer, num_bytes)
    ids = await encoded(services.client, text, False, None)
    thinks = services.parsers.reasoning_parser(tokenizer.template_source(None, bool(chat.tools))) is not None
    if thinks and body.thinking is not None and body.thinking.type == "disabled":
        chat.thinking_token_budget = 0  # for templates that know no such switch
    return _Prompt(model, chat, ids, chat_plan(services.parsers, chat, tools, tokenizer, text))
