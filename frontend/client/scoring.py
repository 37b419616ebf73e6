"""Scores of pairs of texts: by a classifier of one label, which reads both as one prompt, or by the similarity of their
vectors, or of their tokens' vectors.

`score_pairs` is called by routes, `AsyncClient` and `LLM`. A reranker's template makes the prompt if the model has one;
otherwise the tokenizer joins the two texts as its files say.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.frontend.client.late import LateIds, maxsim
from quire.frontend.client.mode_scores import mode_scores
from quire.frontend.client.pooling import Ids, PoolClient, PooledResults, as_arrays, pool, tokenized
from quire.frontend.client.stream import InvalidRequest, TooLong
from quire.frontend.client.turns import if_many, in_native_thread, in_thread
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.pooling import PoolingInfo, PoolingParams
from quire.ipc.step.late_queries import MAX_QUERY_BYTES

Vectors = Mapping[str, np.ndarray]  # of texts
# of vectors as the model makes them, by sentence-transformers' names; a cosine is the product of normalized ones
_SIMILARITIES: Mapping[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "dot": np.dot,
    "euclidean": lambda a, b: -np.linalg.norm(a - b),
    "manhattan": lambda a, b: -np.abs(a - b).sum(),
}


class Scores(NamedTuple):
    """scores: float32 [pairs]. ids: each pair's prompt, empty where texts were compared by their vectors."""

    scores: np.ndarray
    ids: list[Ids]
    results: PooledResults

    def num_cached(self, pair: int) -> int:
        return self.results.num_cached[pair] if self.ids else 0


def paired(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The pairs of one text with each of several, or of as many texts each. Raises InvalidRequest."""
    if not first or not second:
        raise InvalidRequest("there must be at least one text on each side of a score")
    if len(first) == 1:
        return [(first[0], each) for each in second]
    if len(first) != len(second):
        raise InvalidRequest(f"{len(first)} texts cannot be paired with {len(second)}: one with n, or n with n")
    return list(zip(first, second, strict=True))


def check_scores(info: PoolingInfo | None, tasks: Sequence[str]) -> bool:
    """Whether pairs are scored by a classifier; else by similarity. Raises InvalidRequest if the model can do neither."""
    if info is not None and ("embed" in info.tasks or info.late is not None):
        return False
    if info is None or "classify" not in info.tasks:
        raise InvalidRequest(f"task: this model cannot score pairs of texts; it can {', '.join(tasks)}")
    if len(info.labels) != 1:
        raise InvalidRequest(f"task: this model has {len(info.labels)} labels; pairs are scored by a model with one")
    return True


async def score_pairs(
    client: PoolClient,
    pairs: Sequence[tuple[str, str]],
    params: PoolingParams | None = None,
    *,
    keep: int | None = None,
    instruction: str | None = None,
    weights: Sequence[float] | None = None,
    **how: Any,
) -> Scores:
    """Scores of pairs, in order. keep: cut prompts to so many ids (-1: to what fits). weights: as for `mode_scores`; None: a
    model with vectors of texts compares these. how: as for `pool`. Raises ClientErrors."""
    limits = client.welcome.limits
    use, size = (params.use_activation, params.dimensions) if params is not None else (None, None)
    if weights is not None or not check_scores(limits.pooling, limits.tasks):
        if instruction is not None:
            raise InvalidRequest("instruction: this model compares vectors of texts, without a template that takes one")
        if weights is not None:
            scores, results = await mode_scores(client, pairs, weights, keep, size, how)
            return Scores(scores, [], results)
        of_tokens = limits.pooling is not None and limits.pooling.late is not None
        return await (_by_token_vectors if of_tokens else _by_similarity)(client, pairs, keep, size, how)
    ids = await pair_prompts(client, pairs, keep=keep, instruction=instruction)
    results = await pool(client, ids, PoolingParams(task="classify", use_activation=use, dimensions=size), **how)
    return Scores(await if_many(len(ids), np.concatenate, results.data), ids, results)


async def pair_prompts(
    client: PoolClient, pairs: Sequence[tuple[str, str]], *, keep: int | None = None, instruction: str | None = None
) -> list[Ids]:
    """The prompts of pairs for a classifier. keep: as for `score_pairs`; the longer text of a pair is cut. Raises TooLong."""
    limits, tokenizer = client.welcome.limits, client.tokenizer
    longest = limits.max_model_len if keep in (None, -1) else min(keep or 0, limits.max_model_len)
    chars = (longest + 1) * tokenizer.max_token_chars
    longest_text = await if_many(len(pairs), lambda: max(max(len(first), len(second)) for first, second in pairs))
    if tokenizer.keeps_characters and longest_text > chars:
        if keep is None:
            raise TooLong(f"a text of a pair has more characters than {longest} tokens can hold; {limits.too_long}")
        pairs = [(first[:chars], second[:chars]) for first, second in pairs]  # no more is tokenized than is kept
    ids = await _pair_ids(client, pairs, instruction)
    if (most := max(map(len, ids))) > longest:
        if keep is None:
            raise TooLong(f"the prompt of a pair has {most} tokens; {limits.too_long}")
        ids = await _cut_pairs(client, pairs, ids, instruction, longest)
    return ids


async def _pair_ids(client: PoolClient, pairs: Sequence[tuple[str, str]], instruction: str | None) -> list[Ids]:
    info = client.welcome.limits.pooling
    assert info is not None
    if info.score_template is None and has_score_template(client.tokenizer):
        texts = await in_thread(_rendered, client.tokenizer, pairs, instruction)
        return await tokenized(client, texts, add_special_tokens=False)
    if info.score_template is None:
        if instruction is not None:
            raise InvalidRequest("instruction: this model has no template that takes one")
        return await in_native_thread(lambda: as_arrays(client.tokenizer.encode_pairs(pairs)))
    make = info.score_template.prompt
    texts = await if_many(len(pairs), lambda: [make(query, document, instruction) for query, document in pairs])
    return await tokenized(client, texts, add_special_tokens=False, keep=None)


def has_score_template(tokenizer: Tokenizer) -> bool:
    """Whether the chat template is one of pairs: it reads messages of the roles query and document, as vLLM's do."""
    source = tokenizer.templates.get("default", "")
    return all(f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document"))


def _rendered(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], instruction: str | None) -> list[str]:
    first = [] if instruction is None else [{"role": "system", "content": instruction}]
    try:
        return [
            tokenizer.render_chat(
                [*first, {"role": "query", "content": query}, {"role": "document", "content": document}],
                add_generation_prompt=False,
            )
            for query, document in pairs
        ]
    except ValueError as error:
        raise InvalidRequest(f"the chat template cannot make a prompt of a pair: {error}") from None


async def _cut_pairs(
    client: PoolClient, pairs: Sequence[tuple[str, str]], ids: Sequence[Ids], instruction: str | None, longest: int
) -> list[Ids]:
    """The pairs' ids with the longer text of those that are too long cut at its end."""
    return [
        row if len(row) <= longest else await _cut_pair(client, pair, len(row) - longest, longest, instruction)
        for pair, row in zip(pairs, ids, strict=True)
    ]


async def _cut_pair(client: PoolClient, pair: tuple[str, str], surplus: int, longest: int, instruction: str | None) -> Ids:
    texts = list(pair)
    while True:
        rows = await tokenized(client, texts, add_special_tokens=False)
        at = int(len(rows[1]) >= len(rows[0]))
        if len(rows[at]) <= 1:
            raise TooLong(f"the prompt of a pair has more than {longest} tokens, even without its texts")
        texts[at] = await in_native_thread(client.tokenizer.decode, list(rows[at])[: max(len(rows[at]) - surplus, 1)])
        (row,) = await _pair_ids(client, [(texts[0], texts[1])], instruction)
        if len(row) <= longest:
            return row
        surplus = max(len(row) - longest, 1)


async def _by_similarity(
    client: PoolClient, pairs: Sequence[tuple[str, str]], keep: int | None, size: int | None, how: dict[str, Any]
) -> Scores:
    """Cosines of the vectors, or as the checkpoint's similarity_fn_name says; each text's vector is made once."""
    info = client.welcome.limits.pooling
    texts = await if_many(len(pairs), lambda: list(dict.fromkeys(text for pair in pairs for text in pair)))
    ids = await tokenized(client, texts, keep=keep)
    kind = "cosine" if info is None else info.similarity_fn_name
    use, similarity = (None, _SIMILARITIES[kind]) if kind in _SIMILARITIES else (True, np.dot)
    results = await pool(client, ids, PoolingParams(task="embed", use_activation=use, dimensions=size), **how)

    def products() -> np.ndarray:
        vectors = dict(zip(texts, results.data, strict=True))
        return np.array([similarity(vectors[a], vectors[b]) for a, b in pairs], np.float32)

    return Scores(await in_thread(products), [], results)


async def _by_token_vectors(
    client: PoolClient, pairs: Sequence[tuple[str, str]], keep: int | None, size: int | None, how: dict[str, Any]
) -> Scores:
    """MaxSim of the vectors of tokens. A query is computed once; its vectors go to the engine with each of its documents, of
    which one number comes back. Where a query has more vectors than a request may bring, those of documents come here."""
    queries, documents = await if_many(len(pairs), lambda: [list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True)])
    rows = await tokenized(client, queries, keep=keep, is_query=True), await tokenized(client, documents, keep=keep)
    params = PoolingParams(task="token_embed", dimensions=size)
    found = await pool(client, rows[0], params, **how)
    of_query = dict(zip(queries, found.data, strict=True))
    if max(vectors.nbytes for vectors in found.data) > MAX_QUERY_BYTES:
        rest = await pool(client, rows[1], params, **how)
        of_document = dict(zip(documents, rest.data, strict=True))
        return Scores(await in_native_thread(lambda: _maxsims(pairs, of_query, of_document)), [], _both(found, rest))
    wanted = await if_many(len(pairs), lambda: list(dict.fromkeys(pairs)))
    compared = await in_thread(lambda: _compared(wanted, dict(zip(documents, rows[1], strict=True)), of_query))
    rest = await pool(client, compared, params, **how)

    def by_pair() -> np.ndarray:
        scores = dict(zip(wanted, rest.data, strict=True))
        return np.concatenate([scores[pair] for pair in pairs])

    return Scores(await if_many(len(pairs), by_pair), [], _both(found, rest))


def _compared(pairs: Sequence[tuple[str, str]], ids: Mapping[str, Ids], of_query: Vectors) -> list[Ids]:
    """The ids of the pairs' documents, each with its query's vectors."""
    data = {text: vectors.tobytes() for text, vectors in of_query.items()}
    found = list[Ids]()
    for query, document in pairs:
        row = ids[document]
        assert isinstance(row, LateIds)
        found.append(row.compared_with(data[query]))
    return found


def _both(first: PooledResults, second: PooledResults) -> PooledResults:
    return PooledResults(first.data + second.data, first.num_cached + second.num_cached, first.states + second.states)


def _maxsims(pairs: Sequence[tuple[str, str]], of_query: Vectors, of_document: Vectors) -> np.ndarray:
    """float32 [pairs]: the scores of pairs of texts, by the vectors of their tokens."""
    found = np.zeros(len(pairs), np.float32)
    by_query: dict[str, list[int]] = {}
    for i, (query, _) in enumerate(pairs):
        by_query.setdefault(query, []).append(i)
    for query, at in by_query.items():
        found[at] = maxsim(of_query[query], [of_document[pairs[i][1]] for i in at])
    return found


async def cut_texts(client: PoolClient, texts: Sequence[str], most: int) -> list[str]:
    """The texts, each cut to `most` tokens."""
    rows = await tokenized(client, texts, add_special_tokens=False, keep=-1)

    def cut() -> list[str]:
        found = zip(texts, rows, strict=True)
        return [text if len(row) <= most else client.tokenizer.decode(list(row)[:most]) for text, row in found]

    return await in_native_thread(cut)
