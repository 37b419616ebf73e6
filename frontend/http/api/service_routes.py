"""The routes that generate nothing: models, health, version, metrics, tokenize, detokenize, preflights."""

from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from quire.frontend.http.api.metrics import CONTENT_TYPE
from quire.frontend.http.api.params import chat_text, check_model
from quire.frontend.http.api.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
    decode,
)
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.cors import preflight_headers
from quire.frontend.http.protocol.errors import ApiError, invalid
from quire.frontend.http.protocol.exchange import Request, Response

if TYPE_CHECKING:
    from quire.frontend.http.api.app import App

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def list_models(app: "App", request: Request, response: Response) -> None:
    names = app.client.welcome.served_model_names
    response.send(200, json_bytes(ModelList(data=[_card(app, name) for name in names])))


async def one_model(app: "App", request: Request, response: Response) -> None:
    """/v1/models/{id}: ids may hold slashes, written out or escaped."""
    name = unquote(request.path.removeprefix(b"/v1/models/").decode("latin-1"))
    response.send(200, json_bytes(_card(app, check_model(name, app.client.welcome.served_model_names))))


def _card(app: "App", name: str) -> ModelCard:
    welcome = app.client.welcome
    return ModelCard(
        id=name, created=welcome.created, root=welcome.served_model_names[0], max_model_len=welcome.limits.max_model_len
    )


async def health(app: "App", request: Request, response: Response) -> None:
    """200 while the core's loop beats and no step is stuck."""
    problem = app.client.health()
    if problem is not None:
        raise ApiError(503, problem, code="unhealthy", retry_after_s=2)
    response.send(200)


async def preflight(app: "App", request: Request, response: Response) -> None:
    """A browser's OPTIONS before a page's request, to any path."""
    response.send(200, headers=preflight_headers(request.headers))


async def version(app: "App", request: Request, response: Response) -> None:
    response.send(200, json_bytes(VersionResponse(app.client.welcome.version)))


async def metrics(app: "App", request: Request, response: Response) -> None:
    model = app.client.welcome.served_model_names[0]
    response.send(200, app.metrics.render(model, app.client.beat), CONTENT_TYPE)


async def tokenize(app: "App", request: Request, response: Response) -> None:
    body = decode(_tokenize_decoder, request.take_body(), app.unknown_fields)
    check_model(body.model, app.client.welcome.served_model_names)
    tokenizer = app.client.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("either prompt or messages is needed, not both", "prompt")
    if body.chat_template is not None:
        raise ApiError(400, "chat_template: this value is not supported by this server.", param="chat_template",
                       code="unsupported_value")  # fmt: skip
    chat = body.prompt is None
    text = chat_text(body, tokenizer) if body.prompt is None else body.prompt
    special = body.add_special_tokens if body.add_special_tokens is not None else not chat
    ids = await app.client.encode(text, add_special_tokens=special)
    strings = [tokenizer.token_str(i) for i in ids] if body.return_token_strs else None
    answer = TokenizeResponse(len(ids), app.client.welcome.limits.max_model_len, ids, strings)
    response.send(200, json_bytes(answer))


async def detokenize(app: "App", request: Request, response: Response) -> None:
    body = decode(_detokenize_decoder, request.take_body(), app.unknown_fields)
    check_model(body.model, app.client.welcome.served_model_names)
    vocab_size = app.client.welcome.limits.vocab_size
    if any(i >= vocab_size for i in body.tokens):
        raise invalid(f"tokens holds an id outside the vocabulary of {vocab_size}", "tokens")
    text = app.client.tokenizer.decode(body.tokens, skip_special_tokens=False)
    response.send(200, json_bytes(DetokenizeResponse(text)))
