"""POST /v2/embed: vectors as Cohere's API has them, of several types at once."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.json_pieces import JsonPieces, in_list
from quire.frontend.http.api.bodies.schemas import Int64, ShortText
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.pooling.fields import PromptFields, ids_of, need, prompts_of, refuse
from quire.frontend.http.api.pooling.run import PoolRun, params_of
from quire.frontend.http.api.pooling.vectors import AT_ONCE
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response
from quire.ipc.pooling import PoolingInfo, check_pooling

TYPES = ("float", "int8", "uint8", "binary", "ubinary")
_INPUT_TYPES = {  # names under which a checkpoint may have a prompt for it
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class CohereEmbedRequest(PromptFields, kw_only=True):
    texts: list[str] | None = None
    input_type: ShortText | None = None
    embedding_types: list[ShortText] | None = None
    output_dimension: Int64 | None = None
    max_tokens: Int64 | None = None
    truncate: ShortText | None = None
    images: Any = None  # refused
    inputs: Any = None  # refused


class ApiVersion(msgspec.Struct, frozen=True):
    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True):
    input_tokens: int


class CohereMeta(msgspec.Struct, frozen=True):
    billed_units: BilledUnits
    api_version: ApiVersion = ApiVersion()


class CohereEmbedResponse(msgspec.Struct, frozen=True):
    """embeddings: by type, a row for each text."""

    id: str
    embeddings: dict[str, list[list[float]]]
    texts: Annotated[list[str], msgspec.Meta(description="as they were given")]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"


_decoder = BodyDecoder(CohereEmbedRequest)


async def embed(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    await check_model(services, request, body.model)
    info = need(services, "embed")
    refuse(body, images="vectors of images are not served", inputs="give texts; vectors of images are not served")
    types = body.embedding_types or ["float"]
    for name in types:
        if name not in TYPES:
            raise invalid(f"embedding_types may hold {', '.join(TYPES)}, got {name[:40]}", "embedding_types")
    if body.texts is None:
        raise invalid("texts: this field is required", "texts")
    texts = prompts_of(body.texts, "texts")
    _truncation(body)
    names = {"dimensions": "output_dimension"}
    params = params_of(names, task="embed", use_activation=True, dimensions=body.output_dimension)
    try:
        check_pooling(params, info, services.limits.tasks)
    except ValueError as error:
        raise invalid(str(error).replace("dimensions", "output_dimension", 1), "output_dimension") from None
    run = PoolRun(services, request, body, "embd")
    results = await run.pool(await ids_of(services, texts, body, _prompt(info, body.input_type)), params)
    if len(results.data[0]) % 8 and {"binary", "ubinary"} & set(types):
        raise invalid(f"embedding_types: {len(results.data[0])} elements do not fill whole bytes of bits", "embedding_types")

    meta, data = CohereMeta(BilledUnits(results.num_prompt_tokens)), results.data
    by_type: dict[str, Any] = {name: JsonPieces(partial(_rows, data, name)) for name in dict.fromkeys(types)}
    await run.send_large(response, CohereEmbedResponse(run.name, by_type, body.texts or [], meta))


def _rows(data: Sequence[np.ndarray], kind: str) -> Iterator[bytes]:
    step = max(AT_ONCE // len(data[0]), 1)
    return in_list(_as(np.stack(data[at : at + step]), kind).tolist() for at in range(0, len(data), step))


def _truncation(body: CohereEmbedRequest) -> None:
    """Cohere's truncate and max_tokens as the fields that `ids_of` reads."""
    truncate = (body.truncate or "END").upper()
    if truncate not in ("NONE", "START", "END"):
        raise invalid(f"truncate must be NONE, START or END, got {truncate[:40]}", "truncate")
    if body.max_tokens is not None and body.max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {body.max_tokens}", "max_tokens")
    if body.truncate_prompt_tokens is None and truncate != "NONE":
        body.truncate_prompt_tokens = body.max_tokens or -1
        body.truncation_side = "left" if truncate == "START" else "right"


def _prompt(info: PoolingInfo, input_type: str | None) -> str:
    """The model's prompt for this type of input; empty if it has none. Raises ApiError 400."""
    if input_type is None:
        return info.prompts.get(info.default_prompt_name or "", "")
    if input_type not in _INPUT_TYPES:
        raise invalid(f"input_type must be one of {', '.join(_INPUT_TYPES)}, got {input_type[:40]}", "input_type")
    return next((info.prompts[name] for name in _INPUT_TYPES[input_type] if name in info.prompts), "")


def _as(vectors: np.ndarray, kind: str) -> np.ndarray:
    """Normalized vectors [N, D] as this type: int8 and uint8 have the range -1 to 1 in 256 steps; of bits, 8 are one number."""
    if kind == "float":
        return vectors
    if kind in ("int8", "uint8"):
        levels = np.clip(np.floor((vectors + 1.0) * 127.5 + 0.5), 0, 255)
        return (levels - 128).astype(np.int8) if kind == "int8" else levels.astype(np.uint8)
    bits = np.packbits(vectors > 0, axis=-1)
    return bits if kind == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
