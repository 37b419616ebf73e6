"""POST /v1/responses: OpenAI's Responses API, run as chats.

request.py checks a request's fields, turn.py makes a chat of it (items.py, messages.py, translate.py), running.py runs the chat
and makes items of the output (output.py), records.py keeps the response. background.py runs responses in the background.
"""

import msgspec

from quire.frontend.client.stream import InvalidRequest
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.json_pieces import LARGE_ANSWER, send_json
from quire.frontend.http.api.chat_run import submit_chat
from quire.frontend.http.api.generate import running
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.responses.background import begin
from quire.frontend.http.api.responses.request import ResponsesRequest
from quire.frontend.http.api.responses.running import RunningTurn
from quire.frontend.http.api.responses.translate import error_of
from quire.frontend.http.api.responses.turn import Turn, prepare_turn
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response

_decoder = BodyDecoder(ResponsesRequest)


class InputTokens(msgspec.Struct, frozen=True):
    object: str
    input_tokens: int


async def count_input_tokens(services: Services, request: Request, response: Response) -> None:
    """POST /v1/responses/input_tokens: the length of the prompt that this body makes."""
    num_bytes = len(request.body)
    body = await read_body(_decoder, request, services.unknown_fields)
    turn = await prepare_turn(services, request, body, num_bytes)
    response.send(200, json_bytes(InputTokens("response.input_tokens", len(turn.chat.token_ids))))


async def create_response(services: Services, request: Request, response: Response) -> None:
    num_bytes = len(request.body)
    body = await read_body(_decoder, request, services.unknown_fields)
    turn = await prepare_turn(services, request, body, num_bytes)
    try:
        await _answer(services, turn, response, num_bytes)
    except InvalidRequest as error:  # found only by the engine, e.g. about a grammar
        raise error_of(error, turn.tools) or error from None


async def _answer(services: Services, turn: Turn, response: Response, num_bytes: int) -> None:
    body = turn.body
    if body.background:
        return response.send(200, await begin(services, turn))
    answer, runs = turn.response, list[PromptRun]()
    async with running(answer.id, runs, services.metrics, services.request_log):
        runs.append(submit_chat(services, turn.chat_body, turn.chat, answer.id))
        services.request_log.started(answer.id, runs, bool(body.stream))
        if body.stream:
            return await RunningTurn(services, turn, runs[0], response).send_events()
        await RunningTurn(services, turn, runs[0]).whole()
    if body.wants_logprobs or runs[0].num_tokens[0] > LARGE_ANSWER or num_bytes > LARGE_ANSWER:
        return await send_json(response, answer, services.max_response_bytes)
    response.send(200, json_bytes(answer))
