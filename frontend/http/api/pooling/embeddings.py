"""POST /v1/embeddings: vectors of texts, as OpenAI's API has them, with vLLM's fields."""

from typing import Any

import msgspec

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.checked import check_model
from quire.frontend.http.api.bodies.schemas import ShortText
from quire.frontend.http.api.pooling.fields import (
    Input,
    PoolFields,
    PoolingUsage,
    ids_of,
    named_prompt,
    need,
    prompts_of,
    refuse,
)
from quire.frontend.http.api.pooling.run import PoolRun, params_of, send, usage_of
from quire.frontend.http.api.pooling.vectors import VectorFormat
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response


class EmbeddingRequest(PoolFields, kw_only=True):
    input: Input
    encoding_format: ShortText | None = None
    embed_dtype: ShortText | None = None
    endianness: ShortText | None = None
    prompt_name: ShortText | None = None
    messages: Any = None  # refused


class Embedding(msgspec.Struct, frozen=True):
    """embedding: floats, or base64 of their bytes."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: str = "list"


_decoder = BodyDecoder(EmbeddingRequest)


async def embeddings(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    model = check_model(body.model, services.model_names)
    info = need(services, "embed")
    refuse(body, messages="vectors of conversations are not served yet; render them to texts and give input")
    form = VectorFormat(body.encoding_format, body.embed_dtype, body.endianness, request.is_patient)
    params = params_of(task="embed", dimensions=body.dimensions, use_activation=body.uses_activation)
    prompts, run = prompts_of(body.input), PoolRun(services, request, body, "embd")
    results = await run.pool(await ids_of(services, prompts, body, named_prompt(info, body.prompt_name)), params)
    usage = usage_of(results.num_prompt_tokens)
    if form.is_binary:
        about = {"id": run.name, "created": run.created, "model": model, "usage": msgspec.structs.asdict(usage)}
        return form.send_binary(response, results.data, about)

    def make() -> bytes:
        data = [Embedding(i, form.json(vector)) for i, vector in enumerate(results.data)]
        return json_bytes(EmbeddingResponse(run.name, run.created, model, data, usage))

    await send(response, make, len(results.data) * len(results.data[0]))
