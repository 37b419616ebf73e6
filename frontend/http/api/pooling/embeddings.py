"""POST /v1/embeddings: vectors of texts, as OpenAI's API has them, with vLLM's fields."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.schemas import ShortText
from quire.frontend.http.api.models import check_model, check_task
from quire.frontend.http.api.pooling.conversation import ConversationFields, ids_of_body
from quire.frontend.http.api.pooling.fields import PoolingUsage, named_prompt, need, refuse
from quire.frontend.http.api.pooling.run import PoolRun, params_of, usage_of
from quire.frontend.http.api.pooling.vectors import VectorFormat
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response


class EmbeddingRequest(ConversationFields, kw_only=True):
    encoding_format: ShortText | None = None
    embed_dtype: ShortText | None = None
    endianness: ShortText | None = None
    prompt_name: ShortText | None = None
    task: Any = None  # a name, of a model that has adapters for tasks
    late_chunking: Any = None  # refused


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
_REFUSED = {
    "late_chunking": "vectors of texts that share their context are not served; give each text by itself",
}


async def embeddings(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    model = await check_model(services, request, body.model)
    info = need(services, "embed")
    refuse(body, **_REFUSED)
    await check_task(services, request, body.task)
    form = VectorFormat(body.encoding_format, body.embed_dtype, body.endianness, request.is_patient)
    params = params_of(task="embed", dimensions=body.dimensions, use_activation=body.uses_activation)
    run = PoolRun(services, request, body, "embd")
    ids = await ids_of_body(services, request, body, named_prompt(info, body.prompt_name))
    results = await run.pool(ids, params)
    usage = usage_of(results.num_prompt_tokens)
    if form.is_binary:
        about = {"id": run.name, "created": run.created, "model": model, "usage": msgspec.structs.asdict(usage)}
        return await form.send_binary(response, results.data, about)

    def items() -> Iterator[Embedding]:
        return (Embedding(i, form.json(vector)) for i, vector in enumerate(results.data))

    whole = partial(EmbeddingResponse, run.name, run.created, model, usage=usage)
    await run.send(response, items, len(results.data), len(results.data[0]), whole)
