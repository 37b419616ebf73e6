"""POST /api/chat and POST /api/generate: Ollama's two generating routes, run as chats, or a raw prompt as a completion.

request.py translates the body, chat_run.py and prompt_run.py prepare and submit it, answer.py makes the answer. A num_predict
beyond the context's room is no error, as in Ollama: the answer ends there.
"""

import time
from typing import TypeVar

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.checked import check_request
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, send_json
from quire.frontend.http.api.bodies.params import make_params
from quire.frontend.http.api.bodies.request_media import RequestMedia
from quire.frontend.http.api.chat_output import ChatOutput
from quire.frontend.http.api.chat_run import check_chat, prepare_chat, submit_chat
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.generate import Pump, collect, running
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.ollama.answer import Answer
from quire.frontend.http.api.ollama.request import chat_of, completion_of, model_of
from quire.frontend.http.api.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from quire.frontend.http.api.prompt import encoded
from quire.frontend.http.api.prompt_run import PromptRun, submit
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.api.terms import terms_of
from quire.frontend.http.protocol.exchange import Request, Response

NDJSON = b"application/x-ndjson"

_chat_decoder = BodyDecoder(OllamaChatRequest)
_generate_decoder = BodyDecoder(OllamaGenerateRequest)

T = TypeVar("T", OllamaChatRequest, OllamaGenerateRequest)


async def chat(services: Services, request: Request, response: Response) -> None:
    began = time.time()
    body = await read_body(_chat_decoder, request, services.unknown_fields)
    model = await model_of(services, request, body.model)
    if not body.messages:
        return _send_empty(response, Answer(model, True, began, None), body)
    await _run_chat(services, request, response, body, model, began)


async def generate(services: Services, request: Request, response: Response) -> None:
    began = time.time()
    body = await read_body(_generate_decoder, request, services.unknown_fields)
    model = await model_of(services, request, body.model)
    if not body.prompt:
        return _send_empty(response, Answer(model, False, began, None), body)
    if body.raw or not services.client.tokenizer.templates:
        return await _run_raw(services, request, response, body, Answer(model, False, began, None))
    await _run_chat(services, request, response, body, model, began)


def _send_empty(response: Response, answer: Answer, body: OllamaChatRequest | OllamaGenerateRequest) -> None:
    response.send(200, json_bytes(answer.empty("unload" if body.keep_alive in (0, "0", "0s") else "load")))


async def _run_chat(services: Services, request: Request, response: Response, body: T, model: str, began: float) -> None:
    chat = chat_of(body)
    services.defaults.fill(chat)
    checked = check_chat(chat, services.client.tokenizer, None)
    checked.cuts_max_tokens, checked.terms = True, terms_of(services, request, None)
    thinks = body.think is not False
    prepared = await prepare_chat(services, chat, checked, RequestMedia(services, request), thinks=thinks, may_not_reason=True)
    name, runs = new_id("ollama", request.headers), list[PromptRun]()
    async with running(name, runs, services.metrics, services.request_log):
        runs.append(submit_chat(services, chat, prepared, name))
        output = None if prepared.plan is None else ChatOutput(prepared.plan, thinks)
        answer = Answer(model, isinstance(body, OllamaChatRequest), began, output, thinks)
        await _send(services, response, name, runs, answer, bool(chat.stream))


async def _run_raw(
    services: Services, request: Request, response: Response, body: OllamaGenerateRequest, answer: Answer
) -> None:
    """The prompt as it is, without the chat template."""
    client, raw = services.client, completion_of(body)
    services.defaults.fill(raw)
    checked = check_request(raw, client.tokenizer, max_tokens=raw.max_tokens, prompt_field="prompt")
    checked.cuts_max_tokens, checked.terms = True, terms_of(services, request, None)
    ids = await encoded(client, body.prompt or "", True, None)
    if not ids:
        raise invalid("prompt must not be empty", "prompt")
    params = make_params(checked, len(ids), client.welcome.limits.max_model_len)
    name, runs = new_id("ollama", request.headers), list[PromptRun]()
    async with running(name, runs, services.metrics, services.request_log):
        runs.append(submit(client, raw, ids, params, checked, name))
        await _send(services, response, name, runs, answer, bool(raw.stream))


async def _send(
    services: Services, response: Response, name: str, runs: list[PromptRun], answer: Answer, streams: bool
) -> None:
    services.request_log.started(name, runs, streams)
    if streams:
        return await Pump(response, runs, services.metrics, answer, content_type=NDJSON).run()
    ((delta,),) = await collect(runs, services.metrics, services.max_response_bytes)
    whole = await answer.whole(runs[0], delta)
    if delta.num_tokens > LARGE_ANSWER:
        return await send_json(response, whole, services.max_response_bytes)
    response.send(200, json_bytes(whole))
