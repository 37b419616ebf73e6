"""/tokenize: text to token ids; /detokenize: ids to text; /tokenizer_info: the tokenizer's configuration.

A text may be as long as a body: answers of more than some thousand tokens are made in a thread.
"""

from collections.abc import Callable
from typing import TypeVar

from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.json_pieces import send_json
from quire.frontend.http.api.bodies.request_media import RequestMedia
from quire.frontend.http.api.bodies.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.prompt import chat_prompt
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.api.tools.tool_use import check_tools_size
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response

_FEW_TOKENS = 2048  # their strings or their text take a millisecond to make

T = TypeVar("T")
_tokenize_decoder = BodyDecoder(TokenizeRequest)
_detokenize_decoder = BodyDecoder(DetokenizeRequest)


async def tokenize(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_tokenize_decoder, request, services.unknown_fields)
    services.defaults.fill(body)
    await check_model(services, request, body.model)
    tokenizer = services.client.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("either prompt or messages is needed, not both", "prompt")
    if body.media_io_kwargs:
        text = "media_io_kwargs: this value is not supported by this server."
        raise ApiError(400, text, param="media_io_kwargs", code="unsupported_value")
    check_tools_size(body.tools or [])
    if body.prompt is None:
        trusts, render = services.trust_request_chat_template, services.render_own
        media = RequestMedia(services, request)
        _, ids = await chat_prompt(services.client, body, trusts, owner=request.owner, render=render, media=media)
    else:
        ids = await services.client.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)

    strings: list[str] | None = None
    if body.return_token_strs:
        strings = await _made(lambda: list(map(tokenizer.token_piece, ids)), len(ids))
    answer = TokenizeResponse(len(ids), services.limits.max_model_len, ids, strings)
    if len(ids) <= _FEW_TOKENS:
        return response.send(200, json_bytes(answer))
    await send_json(response, answer, services.max_response_bytes)


async def detokenize(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_detokenize_decoder, request, services.unknown_fields)
    await check_model(services, request, body.model)
    vocab_size, tokenizer = services.limits.vocab_size, services.client.tokenizer

    def answer() -> bytes:
        if max(body.tokens, default=0) >= vocab_size:
            raise invalid(f"tokens holds an id outside the vocabulary of {vocab_size}", "tokens")
        return json_bytes(DetokenizeResponse(tokenizer.decode(body.tokens, skip_special_tokens=False)))

    response.send(200, await _made(answer, len(body.tokens)))


async def tokenizer_info(services: Services, request: Request, response: Response) -> None:
    """The model's tokenizer_config.json, chat template included."""
    config = services.client.tokenizer.config
    response.send(200, json_bytes({"tokenizer_class": "PreTrainedTokenizerFast", **config}))


async def _made(make: Callable[[], T], num_tokens: int) -> T:
    return make() if num_tokens <= _FEW_TOKENS else await in_thread(make)
