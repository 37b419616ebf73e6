"""POST /rerank, /v1/rerank and /v2/rerank: documents in the order of their scores for a query, as Jina's and Cohere's APIs and
vLLM have it; and as text-embeddings-inference has it, if the body has `texts` in the place of `documents`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np

from quire.frontend.client.scoring import cut_texts, paired
from quire.frontend.client.turns import if_many
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.schemas import Int64
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.pooling.fields import MAX_DOCUMENTS, PoolFields, kept, need, prompts_of, refuse_raw
from quire.frontend.http.api.pooling.run import PoolRun, params_of
from quire.frontend.http.api.pooling.vectors import NUMBERS_OF_WEIGHT
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response


class RerankRequest(PoolFields, kw_only=True):
    """texts, raw_scores, return_text, truncate: text-embeddings-inference's fields."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    top_n: Int64 | None = None
    return_documents: bool | None = None
    max_tokens_per_query: Int64 | None = None
    max_tokens_per_doc: Int64 | None = None
    instruction: str | None = None
    weights_for_different_modes: list[float] | None = None
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None


class RerankDocument(msgspec.Struct, frozen=True):
    text: str


class RankedDocument(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


class RerankUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(msgspec.Struct, frozen=True):
    id: str
    model: str
    usage: RerankUsage
    results: list[RankedDocument]


class RankedText(msgspec.Struct, frozen=True):
    """An entry of the answer to a body with `texts`."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


_decoder = BodyDecoder(RerankRequest)
CHARACTERS_OF_NUMBER = 64  # of a document, which take as long to write as a number


async def rerank(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    model = await check_model(services, request, body.model)
    need(services, "classify", "embed", "token_embed")
    refuse_raw(body)
    given = body.documents if body.texts is None else body.texts
    (query,), documents = prompts_of(body.query, "query", 1), await if_many(len(given or ()), _documents, body)
    if body.top_n is not None and body.top_n < 0:
        raise invalid(f"top_n must be at least 0 (0: all), got {body.top_n}", "top_n")
    query, cut = await _cut(services, query, documents, body)
    keep = kept(body) or (-1 if body.truncate else None)
    use = False if body.raw_scores else body.uses_activation
    params = params_of(task=None, use_activation=use, dimensions=body.dimensions)
    run, weights = PoolRun(services, request, body, "rerank"), body.weights_for_different_modes
    pairs = await if_many(len(cut), paired, [query], cut)
    scores = await run.score(pairs, params, keep=keep, instruction=body.instruction, weights=weights)
    values = scores.scores.tolist()
    order = np.argsort(-scores.scores, kind="stable")[: body.top_n or None].tolist()
    if body.texts is not None:
        has_text = body.return_text is True
    else:
        has_text = body.return_documents is not False

    def items() -> Iterator[Any]:
        if body.texts is not None:
            return (RankedText(i, values[i], documents[i] if has_text else msgspec.UNSET) for i in order)
        return (RankedDocument(i, values[i], RerankDocument(documents[i]) if has_text else msgspec.UNSET) for i in order)

    count = scores.results.num_prompt_tokens
    whole = partial(RerankResponse, run.name, model, RerankUsage(count, count))
    longest = max(map(len, documents)) // CHARACTERS_OF_NUMBER if has_text else 0
    await run.send(response, items, len(order), NUMBERS_OF_WEIGHT + longest, whole if body.texts is None else lambda data: data)


def _documents(body: RerankRequest) -> list[Any]:
    """The documents' texts. Raises ApiError 400."""
    if body.texts is not None:
        return prompts_of(body.texts, "texts", MAX_DOCUMENTS)
    if body.documents is None:
        raise invalid("documents: this field is required", "documents")
    texts = [each if isinstance(each, str) else each.get("text") for each in body.documents]
    if not all(isinstance(text, str) for text in texts):
        raise invalid("documents must be texts, or objects with a text; images are not ranked", "documents")
    return prompts_of(texts, "documents", MAX_DOCUMENTS)


async def _cut(services: Services, query: Any, documents: list[Any], body: RerankRequest) -> tuple[str, list[str]]:
    """The query and the documents, cut to max_tokens_per_query and max_tokens_per_doc."""
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        value = getattr(body, name)
        if value is not None and value < 0:
            raise invalid(f"{name} must be at least 0 (0: no limit), got {value}", name)
    if body.max_tokens_per_query:
        (query,) = await cut_texts(services.client, [query], body.max_tokens_per_query)
    if body.max_tokens_per_doc:
        documents = await cut_texts(services.client, documents, body.max_tokens_per_doc)
    return query, documents
