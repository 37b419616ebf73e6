"""Scores of pairs by all that BGE-M3 makes of a text: dense, sparse and token vectors, each with a weight.

    dense    <q, d>
    sparse   sum over the tokens of both of the product of their weights
    colbert  mean over the query's tokens of the greatest <q_i, d_j> over the document's tokens
    score    (w_0 dense + w_1 sparse + w_2 colbert) / (w_0 + w_1 + w_2)

arXiv:2402.03216, section 3.2; FlagEmbedding's `compute_score`, which calls the weights `weights_for_different_modes`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quire.frontend.client.late import ELEMENTS_AT_ONCE
from quire.frontend.client.pooling import Ids, PoolClient, PooledResults, PooledState, pool, tokenized
from quire.frontend.client.pooling_parts import split_tasks
from quire.frontend.client.stream import InvalidRequest
from quire.frontend.client.turns import if_many, in_native_thread
from quire.ipc.pooling import PoolingInfo, PoolingParams, PoolingTask, check_pooling

MODES: list[PoolingTask] = ["embed", "token_embed", "embed_sparse"]
PAIRS_AT_ONCE = 128
TOKENS_AT_ONCE = 1 << 16  # of the pairs that are in memory together: 256 MiB of vectors of 1,024 elements

Pairs = Sequence[tuple[str, str]]
Vectors = Mapping[PoolingTask, np.ndarray]  # of a text


def check_weights(weights: Sequence[float], info: PoolingInfo | None) -> None:
    """Raises InvalidRequest."""
    if info is None or not set(MODES) <= set(info.tasks):
        raise InvalidRequest(
            "weights_for_different_modes: this model has no sparse vectors and vectors of tokens, as BGE-M3 has"
        )
    if len(weights) != 3 or not all(0 <= weight < math.inf for weight in weights) or not 0 < sum(weights) < math.inf:
        raise InvalidRequest("weights_for_different_modes: give three numbers from 0 on, for dense, sparse and token vectors")


async def mode_scores(
    client: PoolClient, pairs: Pairs, weights: Sequence[float], keep: int | None, size: int | None, how: dict[str, Any]
) -> tuple[np.ndarray, PooledResults]:
    """float32 [pairs]. A query that the next pairs have, too, is computed once. size: elements to which dense and token vectors
    are cut; None: all; they are normalized. Raises ClientErrors."""
    check_weights(weights, client.welcome.limits.pooling)
    texts = await if_many(len(pairs), lambda: list(dict.fromkeys(text for pair in pairs for text in pair)))
    rows = await tokenized(client, texts, keep=keep)
    ids = await if_many(len(texts), lambda: dict(zip(texts, rows, strict=True)))
    params = PoolingParams(tasks=MODES, dimensions=size, use_activation=True)
    scores, states, known = list[float](), list[PooledState](), dict[str, Vectors]()
    for part in _parts(pairs, ids):
        known = {query: known[query] for query, _ in part if query in known}  # all others are dropped
        wanted = {text: ids[text] for pair in part for text in pair if text not in known}
        known |= await _vectors(client, wanted, params, states, how)
        for query, document in part:
            scores.append(await _score(known[query], known[document], weights))
    return np.array(scores, np.float32), PooledResults([], [], states)


def _parts(pairs: Pairs, ids: Mapping[str, Ids]) -> Iterator[Pairs]:
    """The pairs, in order, some at a time: their texts have at most TOKENS_AT_ONCE tokens, or it is one pair."""
    part, texts, tokens = list[tuple[str, str]](), set[str](), 0
    for pair in pairs:
        more = sum(len(ids[text]) for text in {*pair} - texts)
        if part and (len(part) == PAIRS_AT_ONCE or tokens + more > TOKENS_AT_ONCE):
            yield part
            part, texts, tokens, more = [], set(), 0, sum(len(ids[text]) for text in {*pair})
        part.append(pair)
        texts.update(pair)
        tokens += more
    yield part


async def _vectors(
    client: PoolClient, ids: Mapping[str, Ids], params: PoolingParams, states: list[PooledState], how: dict[str, Any]
) -> dict[str, Vectors]:
    """The vectors of texts. states: gets their requests, which keep no results."""
    limits = client.welcome.limits
    try:
        row = check_pooling(params, info := limits.pooling, limits.tasks)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if not ids:
        return {}
    assert info is not None
    results = await pool(client, list(ids.values()), params, **how)
    states += results.states
    for state in results.states:
        state.drop_results()
    both = zip(ids.items(), results.data, strict=True)
    return {text: split_tasks(data, row, info, len(own)) for (text, own), data in both}


async def _score(query: Vectors, document: Vectors, weights: Sequence[float]) -> float:
    """In blocks of the query's tokens: no thread is held for long, and few products are in memory."""
    rows = max(ELEMENTS_AT_ONCE // max(len(document["token_embed"]), 1), 1)
    starts = range(0, max(len(query["token_embed"]), 1), rows)
    found = [await in_native_thread(_products, query, document, weights, start, start + rows) for start in starts]
    return sum(found) / sum(weights)


def _products(query: Vectors, document: Vectors, weights: Sequence[float], start: int, end: int) -> float:
    """The weighted products by the query's tokens [start, end); at the start dense and sparse products, too."""
    found, tokens = 0.0, query["token_embed"][start:end] @ document["token_embed"].T
    if tokens.size:
        found = weights[2] * float(tokens.max(1).sum()) / len(query["token_embed"])
    if start == 0:
        of_query, of_document = query["embed_sparse"], document["embed_sparse"]
        _, i, j = np.intersect1d(of_query[:, 0], of_document[:, 0], return_indices=True)
        found += weights[0] * float(query["embed"] @ document["embed"]) + weights[1] * float(of_query[i, 1] @ of_document[j, 1])
    return found
