"""The calls for vectors and scores of Python callers: prompts and texts in, vLLM's output classes out.

`LLM`, `AsyncClient` and `AsyncLLM` share these; HTTP routes use pooling.py and scoring.py directly.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.frontend.client.pooling import PoolClient, pool, tokenized
from quire.frontend.client.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.frontend.client.pooling_parts import split_tasks
from quire.frontend.client.prompt import Prompt, split_prompt
from quire.frontend.client.scoring import paired, score_pairs
from quire.frontend.client.stream import InvalidRequest
from quire.ipc.pooling import PoolingParams, PoolingTask, as_params, check_pooling


async def encode(
    client: PoolClient, prompts: Sequence[Prompt], params: PoolingParams | None, task: PoolingTask | None = None, **how: Any
) -> list[PoolingRequestOutput]:
    """Each prompt's result. task: what the call means; the params may say the same. how: as for `pool`."""
    given = as_params(params) if params is not None else PoolingParams()
    if task is not None and given.task not in (None, task):
        raise InvalidRequest(f"pooling_params.task is {given.task}, and this method's is {task}")
    given = given.clone()
    given.task = task or given.task
    ids, salt = await _ids_of(client, prompts, given.truncate_prompt_tokens)
    results = await pool(client, ids, given, cache_salt=salt, **how)
    made = zip(_by_task(client, given, results.data, ids), ids, results.num_cached, strict=True)
    return [
        PoolingRequestOutput(str(i), PoolingOutput(data), np.asarray(row).tolist(), n) for i, (data, row, n) in enumerate(made)
    ]


def _by_task(client: PoolClient, params: PoolingParams, data: list[Any], ids: Sequence[Any]) -> list[Any]:
    """The results; of several tasks a dict of those of each."""
    limits = client.welcome.limits
    if params.tasks is None or len(params.tasks) == 1 or limits.pooling is None:
        return data
    row, info = check_pooling(params, limits.pooling, limits.tasks), limits.pooling
    return [split_tasks(result, row, info, len(prompt)) for result, prompt in zip(data, ids, strict=True)]


async def _ids_of(client: PoolClient, prompts: Sequence[Prompt], keep: int | None) -> tuple[list[Any], str]:
    split = [split_prompt(prompt) for prompt in prompts]
    if any(parts.media is not None for parts in split):
        raise InvalidRequest("pooling models take text only, no images")
    salts = {parts.cache_salt for parts in split}
    if len(salts) > 1:
        raise InvalidRequest("cache_salt must be the same in all prompts of a call")
    if not split:
        raise InvalidRequest("there must be at least one prompt")
    texts = [parts.text or "" for parts in split if parts.ids is None]
    encoded = iter(await tokenized(client, texts, keep=keep) if texts else ())
    most = client.welcome.limits.max_model_len if keep == -1 else keep
    ids = [next(encoded) if parts.ids is None else list(parts.ids)[:most] for parts in split]
    return ids, salts.pop()


async def embed(
    client: PoolClient, prompts: Sequence[Prompt], params: PoolingParams | None = None, **how: Any
) -> list[EmbeddingRequestOutput]:
    outputs = await encode(client, prompts, params, "embed", **how)
    return [
        EmbeddingRequestOutput(o.request_id, EmbeddingOutput(o.outputs.data.tolist()), o.prompt_token_ids, o.num_cached_tokens)
        for o in outputs
    ]


async def classify(
    client: PoolClient, prompts: Sequence[Prompt], params: PoolingParams | None = None, **how: Any
) -> list[ClassificationRequestOutput]:
    outputs = await encode(client, prompts, params, "classify", **how)
    return [
        ClassificationRequestOutput(
            o.request_id, ClassificationOutput(o.outputs.data.tolist()), o.prompt_token_ids, o.num_cached_tokens
        )
        for o in outputs
    ]


async def score(
    client: PoolClient,
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    params: PoolingParams | None = None,
    instruction: str | None = None,
) -> list[ScoringRequestOutput]:
    """A score of each pair: one text with n, or n with n."""
    pairs = paired(_texts(data_1, "data_1"), _texts(data_2, "data_2"))
    keep = params.truncate_prompt_tokens if params is not None else None
    scores = await score_pairs(client, pairs, params, keep=keep, instruction=instruction)
    return [
        ScoringRequestOutput(
            str(i), ScoringOutput(float(value)), np.asarray(scores.ids[i]).tolist() if scores.ids else [], scores.num_cached(i)
        )
        for i, value in enumerate(scores.scores)
    ]


async def rerank(
    client: PoolClient,
    query: str,
    documents: Sequence[str],
    top_n: int | None = None,
    params: PoolingParams | None = None,
    instruction: str | None = None,
) -> list[RerankResult]:
    """The documents with their scores for the query, the best first. top_n: as many of them; None: all."""
    if top_n is not None and top_n < 1:
        raise InvalidRequest(f"top_n must be at least 1, got {top_n}")
    outputs = await score(client, query, documents, params, instruction)
    ranked = [RerankResult(i, o.outputs.score, documents[i]) for i, o in enumerate(outputs)]
    ranked.sort(key=lambda result: -result.relevance_score)
    return ranked[:top_n]


def _texts(given: str | Sequence[str], name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{name} must be a text or a list of texts")
    return texts
