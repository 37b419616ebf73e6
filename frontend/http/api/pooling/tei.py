"""The routes of Hugging Face's text-embeddings-inference: /, /embed, /embed_all, /embed_sparse, /predict, /similarity, /info.

Clients made for such a server work with the address of this one. (Its /rerank is told apart by its body: rerank.py.)
"""

from typing import Any

import msgspec
import numpy as np

from quire.frontend.client.scoring import pair_prompts
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.schemas import Int64, ShortText
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.pooling.fields import (
    Input,
    PromptFields,
    ids_of,
    kept,
    named_prompt,
    need,
    prompt_for_tokens,
    prompts_of,
    refuse,
)
from quire.frontend.http.api.pooling.run import PoolRun, params_of
from quire.frontend.http.api.pooling.vectors import NUMBERS_OF_WEIGHT, numbers, sparse_json
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response
from quire.ipc.version import VERSION


class TeiFields(PromptFields, kw_only=True):
    truncate: bool | None = None
    truncation_direction: ShortText | None = None


class TeiEmbedRequest(TeiFields, kw_only=True):
    inputs: Input
    normalize: bool | None = None
    prompt_name: ShortText | None = None
    dimensions: Int64 | None = None


class PredictRequest(TeiFields, kw_only=True):
    """inputs: a text, a pair [a, b], or a list of [a] and [a, b]."""

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None


class SparseValue(msgspec.Struct, frozen=True):
    """index: a token's id."""

    index: int
    value: float


class Prediction(msgspec.Struct, frozen=True):
    score: float
    label: str


class SimilarityInputs(msgspec.Struct, kw_only=True):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, kw_only=True):
    truncate: bool | None = None
    truncation_direction: ShortText | None = None
    prompt_name: ShortText | None = None


class SimilarityRequest(PromptFields, kw_only=True):
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


_embed_decoder = BodyDecoder(TeiEmbedRequest)
_predict_decoder = BodyDecoder(PredictRequest)
_similarity_decoder = BodyDecoder(SimilarityRequest)


async def embed(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_embed_decoder, request, services.unknown_fields)
    info = need(services, "embed")
    params = params_of(task="embed", dimensions=body.dimensions, use_activation=body.normalize is not False)
    prompts, run = prompts_of(body.inputs, "inputs"), PoolRun(services, request, body, "embed")
    _cut(body, body.truncate, body.truncation_direction)
    results = await run.pool(await ids_of(services, prompts, body, named_prompt(info, body.prompt_name)), params)
    data = results.data
    await run.send(response, lambda: map(numbers, data), len(data), len(data[0]))


async def root(services: Services, request: Request, response: Response) -> None:
    """Vectors, or of a classifier the probabilities of labels: Hugging Face's clients ask the address itself."""
    pooling = services.limits.pooling
    is_classifier = pooling is not None and "embed" not in pooling.tasks and "classify" in pooling.tasks
    await (predict if is_classifier else embed)(services, request, response)


async def embed_sparse(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_embed_decoder, request, services.unknown_fields)
    info = need(services, "embed_sparse")
    refuse(body, normalize="sparse vectors are not normalized", dimensions="sparse vectors are not cut")
    params, run = params_of(task="embed_sparse"), PoolRun(services, request, body, "embed-sparse")
    prompts = prompts_of(body.inputs, "inputs")
    _cut(body, body.truncate, body.truncation_direction)
    results = await run.pool(await ids_of(services, prompts, body, named_prompt(info, body.prompt_name)), params)
    data = results.data
    await run.send(response, lambda: map(sparse_json, data), len(data), NUMBERS_OF_WEIGHT * max(map(len, data)))


async def embed_all(services: Services, request: Request, response: Response) -> None:
    """The vector of each token, as the layers leave it."""
    body = await read_body(_embed_decoder, request, services.unknown_fields)
    info = need(services, "token_embed")
    refuse(body, normalize="vectors of tokens are not normalized on this route", dimensions="they are not cut on this route")
    params, run = params_of(task="token_embed", use_activation=False), PoolRun(services, request, body, "embed-all")
    prompts = prompts_of(body.inputs, "inputs")
    _cut(body, body.truncate, body.truncation_direction)
    before, is_query = prompt_for_tokens(info, body.prompt_name)
    results = await run.pool(await ids_of(services, prompts, body, before, is_query), params)
    data = results.data
    await run.send(response, lambda: map(numbers, data), len(data), max(rows.size for rows in data))


async def predict(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_predict_decoder, request, services.unknown_fields)
    info = need(services, "classify")
    is_batch = isinstance(body.inputs, list) and any(isinstance(each, list) for each in body.inputs)
    sequences = [_sequence(each) for each in (body.inputs if is_batch else [body.inputs])]
    prompts_of([text for sequence in sequences for text in sequence], "inputs", 2 * 2048)
    _cut(body, body.truncate, body.truncation_direction)
    params, run = params_of(task="classify", use_activation=not body.raw_scores), PoolRun(services, request, body, "predict")
    singles = [sequence[0] for sequence in sequences if len(sequence) == 1]
    pairs = [(sequence[0], sequence[1]) for sequence in sequences if len(sequence) == 2]
    of_singles = iter(await ids_of(services, singles, body) if singles else ())
    of_pairs = iter(await pair_prompts(services.client, pairs, keep=kept(body)) if pairs else ())
    ids = [next(of_pairs if len(sequence) == 2 else of_singles) for sequence in sequences]
    results = await run.pool(ids, params)

    def predictions(row: np.ndarray) -> list[Prediction]:
        found = [Prediction(score, label) for score, label in zip(row.tolist(), info.labels, strict=True)]
        return sorted(found, key=lambda prediction: -prediction.score)

    if not is_batch:
        return response.send(200, json_bytes(predictions(results.data[0])))
    await run.send(response, lambda: map(predictions, results.data), len(results.data), NUMBERS_OF_WEIGHT * len(info.labels))


def _sequence(given: Any) -> list[str]:
    """One input: a text, or a pair of texts."""
    texts = [given] if isinstance(given, str) else list(given)
    if len(texts) not in (1, 2) or not all(isinstance(text, str) for text in texts):
        raise invalid("inputs must be a text, a pair of texts, or a list of lists of one or two texts", "inputs")
    return texts


async def similarity(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_similarity_decoder, request, services.unknown_fields)
    info = need(services, "embed")
    given = body.parameters or SimilarityParameters()
    prompts = prompts_of([body.inputs.source_sentence, *body.inputs.sentences], "inputs", 2048 + 1)
    if len(prompts) < 2:
        raise invalid("inputs.sentences must hold at least one text", "inputs.sentences")
    _cut(body, given.truncate, given.truncation_direction)
    params, run = params_of(task="embed", use_activation=True), PoolRun(services, request, body, "similarity")
    results = await run.pool(await ids_of(services, prompts, body, named_prompt(info, given.prompt_name)), params)
    source, *others = results.data
    response.send(200, json_bytes((np.stack(others) @ source).tolist()))


async def info(services: Services, request: Request, response: Response) -> None:
    limits, name = services.limits, services.model_names[0]
    pooling = limits.pooling
    kind: dict[str, Any] = {"generation": {}}
    if pooling is not None and pooling.labels:
        labels = {str(i): label for i, label in enumerate(pooling.labels)}
        of_labels = {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}
        kind = {"reranker" if len(labels) == 1 else "classifier": of_labels}
    elif pooling is not None:
        names = {"LAST": "last_token"}
        kind = {"embedding": {"pooling": names.get(pooling.pooling_type, pooling.pooling_type.lower())}}
    about = {
        "model_id": name,
        "model_sha": None,
        "model_dtype": services.client.welcome.numerics.dtype,
        "model_type": kind,
        "max_concurrent_requests": limits.max_num_seqs,
        "max_input_length": limits.max_model_len,
        "max_client_batch_size": 2048,
        "auto_truncate": False,
        "version": VERSION,
    }
    response.send(200, json_bytes(about))


def _cut(body: PromptFields, truncate: bool | None, direction: str | None) -> None:
    """These fields as those that `ids_of` reads. Raises ApiError 400."""
    side = (direction or "right").lower()
    if side not in ("left", "right"):
        raise invalid(f"truncation_direction must be Left or Right, got {side[:40]}", "truncation_direction")
    if truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens, body.truncation_side = -1, side
