"""POST /api/embed and POST /api/embeddings: vectors of texts, as Ollama has them."""

import time
from typing import Any

import msgspec

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.schemas import Int64, ShortText
from quire.frontend.http.api.ollama.request import model_of
from quire.frontend.http.api.pooling.fields import PromptFields, ids_of, named_prompt, need, prompts_of
from quire.frontend.http.api.pooling.run import PoolRun, params_of
from quire.frontend.http.api.pooling.vectors import numbers
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response


class OllamaEmbedRequest(PromptFields, kw_only=True):
    """truncate: true, the default, cuts texts to the context. keep_alive, options: ignored."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Int64 | None = None
    keep_alive: Any = None
    options: Any = None


class OllamaEmbedResponse(msgspec.Struct, frozen=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsRequest(PromptFields, kw_only=True):
    """The older route's: one text."""

    prompt: str
    keep_alive: Any = None
    options: Any = None
    model: ShortText | None = None


class OllamaEmbeddingsResponse(msgspec.Struct, frozen=True):
    embedding: list[float]


_decoder = BodyDecoder(OllamaEmbedRequest)
_older_decoder = BodyDecoder(OllamaEmbeddingsRequest)


async def embed(services: Services, request: Request, response: Response) -> None:
    began = time.perf_counter_ns()
    body = await read_body(_decoder, request, services.unknown_fields)
    model, info = await model_of(services, request, body.model), need(services, "embed")
    if body.input in ("", []):  # Ollama loads the model then
        return response.send(200, json_bytes(OllamaEmbedResponse(model, [], 0, 0, 0)))
    if body.truncate is not False and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    params = params_of(task="embed", dimensions=body.dimensions, use_activation=True)
    prompts, run = prompts_of(body.input), PoolRun(services, request, body, "ollama")
    results = await run.pool(await ids_of(services, prompts, body, named_prompt(info, None)), params)

    def whole(vectors: Any) -> OllamaEmbedResponse:
        duration = time.perf_counter_ns() - began
        return OllamaEmbedResponse(model, vectors, duration, 0, results.num_prompt_tokens)

    await run.send(response, lambda: map(numbers, results.data), len(results.data), len(results.data[0]), whole)


async def embeddings(services: Services, request: Request, response: Response) -> None:
    """Not normalized, as Ollama's."""
    body = await read_body(_older_decoder, request, services.unknown_fields)
    await model_of(services, request, body.model)
    info = need(services, "embed")
    if not body.prompt:
        return response.send(200, json_bytes(OllamaEmbeddingsResponse([])))
    if body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    params, run = params_of(task="embed", use_activation=False), PoolRun(services, request, body, "ollama")
    results = await run.pool(await ids_of(services, [body.prompt], body, named_prompt(info, None)), params)
    response.send(200, json_bytes(OllamaEmbeddingsResponse(results.data[0].tolist())))
