"""Scores of pairs by all that BGE-M3 makes of a text: dense, sparse and token vectors, each with a weight.

    dense    <q, d>
    sparse   sum over the tokens of both of the product of their weights
    colbert  mean over the query's tokens of the greatest <q_i, d_j> over the document's tokens
    score    (w_0 dense + w_1 sparse + w_2 colbert) / (w_0 + w_1 + w_2)

arXiv:2402.03216, section 3.2; FlagEmbedding's `compute_score`, which calls the weights `weights_for_different_modes`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.frontend.client.pooling import PoolClient, PooledResults, pool, tokenized
from quire.frontend.client.pooling_parts import split_tasks
from quire.frontend.client.stream import InvalidRequest
from quire.frontend.client.turns import in_thread
from quire.ipc.pooling import PoolingInfo, PoolingParams, check_pooling

MODES = PoolingParams(tasks=["embed", "token_embed", "embed_sparse"])
PAIRS_AT_ONCE = 128  # their tokens' vectors are in memory together


def check_weights(weights: Sequence[float], info: PoolingInfo | None) -> None:
    """Raises InvalidRequest."""
    if info is None or not set(MODES.tasks or ()) <= set(info.tasks):
        raise InvalidRequest(
            "weights_for_different_modes: this model has no sparse vectors and vectors of tokens, as BGE-M3 has"
        )
    if len(weights) != 3 or not all(0 <= weight < math.inf for weight in weights) or not 0 < sum(weights) < math.inf:
        raise InvalidRequest("weights_for_different_modes: give three numbers from 0 on, for dense, sparse and token vectors")


async def mode_scores(
    client: PoolClient, pairs: Sequence[tuple[str, str]], weights: Sequence[float], keep: int | None, how: dict[str, Any]
) -> tuple[np.ndarray, PooledResults]:
    """float32 [pairs]. A query that the next pairs have, too, is computed once. Raises ClientErrors."""
    limits = client.welcome.limits
    check_weights(weights, limits.pooling)
    assert limits.pooling is not None
    row, info = check_pooling(MODES, limits.pooling, limits.tasks), limits.pooling
    scores, whole, known = np.zeros(len(pairs), np.float32), PooledResults([], [], []), dict[str, Any]()
    for at in range(0, len(pairs), PAIRS_AT_ONCE):
        part = pairs[at : at + PAIRS_AT_ONCE]
        known = {query: known[query] for query, _ in part if query in known}
        texts = [text for text in dict.fromkeys(text for pair in part for text in pair) if text not in known]
        ids = await tokenized(client, texts, keep=keep)
        results = await pool(client, ids, MODES, **how)
        both = zip(results.data, ids, strict=True)
        known |= dict(zip(texts, (split_tasks(data, row, info, len(own)) for data, own in both), strict=True))
        scores[at : at + len(part)] = await in_thread(_scores, part, known, weights)
        whole.states += results.states
        for state in results.states:
            state.drop_results()
    return scores, whole


def _scores(pairs: Sequence[tuple[str, str]], known: dict[str, Any], weights: Sequence[float]) -> list[float]:
    return [_score(known[query], known[document], weights) for query, document in pairs]


def _score(query: dict[Any, np.ndarray], document: dict[Any, np.ndarray], weights: Sequence[float]) -> float:
    dense = float(query["embed"] @ document["embed"])
    of_query = dict(query["embed_sparse"].tolist())
    sparse = sum(of_query.get(token, 0.0) * weight for token, weight in document["embed_sparse"].tolist())
    tokens = query["token_embed"] @ document["token_embed"].T
    colbert = float(tokens.max(1).mean()) if tokens.size else 0.0
    return (weights[0] * dense + weights[1] * sparse + weights[2] * colbert) / sum(weights)
