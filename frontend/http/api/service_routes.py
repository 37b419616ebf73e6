"""The routes that generate nothing: models, health, version, metrics, tokenize, detokenize, preflights."""

from urllib.parse import unquote

from quire.frontend.http.api.body import BodyDecoder
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.metrics import CONTENT_TYPE
from quire.frontend.http.api.params import check_model, prompt_text
from quire.frontend.http.api.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.cors import preflight_headers
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response

_tokenize_decoder = BodyDecoder(TokenizeRequest)
_detokenize_decoder = BodyDecoder(DetokenizeRequest)


async def list_models(services: Services, request: Request, response: Response) -> None:
    names = services.model_names
    response.send(200, json_bytes(ModelList(data=[_card(services, name) for name in names])))


async def one_model(services: Services, request: Request, response: Response) -> None:
    """/v1/models/{id}: ids may hold slashes, written out or escaped."""
    name = unquote(request.path.removeprefix(b"/v1/models/").decode("latin-1"))
    response.send(200, json_bytes(_card(services, check_model(name, services.model_names))))


def _card(services: Services, name: str) -> ModelCard:
    welcome = services.client.welcome
    return ModelCard(
        id=name, created=welcome.created, root=welcome.served_model_names[0], max_model_len=welcome.limits.max_model_len
    )


async def health(services: Services, request: Request, response: Response) -> None:
    """200 while the core's loop beats and no step is stuck."""
    problem = services.client.health()
    if problem is not None:
        raise ApiError(503, problem, code="unhealthy", retry_after_s=2)
    response.send(200)


async def preflight(services: Services, request: Request, response: Response) -> None:
    """A browser's OPTIONS before a page's request, to any path."""
    response.send(200, headers=preflight_headers(request.headers))


async def version(services: Services, request: Request, response: Response) -> None:
    response.send(200, json_bytes(VersionResponse(services.client.welcome.version)))


async def metrics(services: Services, request: Request, response: Response) -> None:
    model = services.model_names[0]
    response.send(200, services.metrics.render(model, services.client.beat), CONTENT_TYPE)


async def tokenize(services: Services, request: Request, response: Response) -> None:
    body = _tokenize_decoder.decode(request.take_body(), services.unknown_fields)
    check_model(body.model, services.model_names)
    tokenizer = services.client.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("either prompt or messages is needed, not both", "prompt")
    chat = body.prompt is None
    trust = services.trust_request_chat_template
    text = await prompt_text(body, tokenizer, trust) if body.prompt is None else body.prompt
    special = body.add_special_tokens if body.add_special_tokens is not None else not chat
    ids = await services.client.encode(text, add_special_tokens=special)
    strings = [tokenizer.token_str(i) for i in ids] if body.return_token_strs else None
    answer = TokenizeResponse(len(ids), services.limits.max_model_len, ids, strings)
    response.send(200, json_bytes(answer))


async def detokenize(services: Services, request: Request, response: Response) -> None:
    body = _detokenize_decoder.decode(request.take_body(), services.unknown_fields)
    check_model(body.model, services.model_names)
    vocab_size = services.limits.vocab_size
    if any(i >= vocab_size for i in body.tokens):
        raise invalid(f"tokens holds an id outside the vocabulary of {vocab_size}", "tokens")
    text = services.client.tokenizer.decode(body.tokens, skip_special_tokens=False)
    response.send(200, json_bytes(DetokenizeResponse(text)))
