"""Late interaction: texts as queries and documents of a model of token vectors (ColBERT), and the scores of such vectors.

    MaxSim(q, d) = sum over the query's tokens of the greatest <q_i, d_j> over the document's tokens

A marker behind the first special token says which of the two a text is. A query is filled with [MASK] to its length, which its
other tokens do not see unless the checkpoint says so; documents lose the vectors of a skip list (arXiv:2004.12832, section 3).
"""

from collections.abc import Sequence

import numpy as np

from quire.frontend.client.cut_rows import cut_row
from quire.frontend.client.stream import TooLong
from quire.frontend.text.tokenizer import SplitIds, Tokenizer
from quire.ipc.pooling import LateInteraction, PoolingInfo

ELEMENTS_AT_ONCE = 1 << 22  # of products of a query's tokens with documents' tokens


class LateIds(SplitIds):
    """A query's or a document's ids. kept: the places of tokens that give vectors; None: all."""

    kept: np.ndarray | None = None
    query: bytes = b""  # of a document that the engine compares with a query: that one's vectors, float32

    def compared_with(self, query: bytes) -> "LateIds":
        """A copy that has the vectors of a query: its result is one number."""
        found = LateIds(self, self.second)
        found.query = query
        return found


def late_rows(
    tokenizer: Tokenizer, texts: Sequence[str], late: LateInteraction, is_query: bool, longest: int, cuts: bool = True
) -> list[LateIds]:
    """The prompts of texts. longest: tokens that the context has. cuts: to it, too; a query is cut in any case, and so is a
    document of a model that says how long one may be. Raises TooLong."""
    before, marker = tokenizer.around[0], late.query_marker if is_query else late.document_marker
    own = late.query_length if is_query else late.document_length
    most = min(own or longest, longest)
    if tokenizer.keeps_characters:  # no more is tokenized than is kept, or than it takes to know that it is too much
        texts = [text[: (most + 1) * tokenizer.max_token_chars] for text in texts]
    found = []
    for row in tokenizer.encode_batch(texts):
        if not own and len(row) + 1 > most and not cuts:
            raise TooLong(f"the prompt has {len(row) + 1} tokens; at most {most} are possible")
        ids = cut_row(tokenizer, row, most - 1, None, True)
        ids = [*ids[:before], marker, *ids[before:]]
        found.append(_query(ids, late, most) if is_query else _document(ids, late))
    return found


def _query(ids: list[int], late: LateInteraction, length: int) -> LateIds:
    """length: to which it is filled."""
    missing = length - len(ids) if late.expands else 0
    if missing < 1:
        return LateIds(ids)
    return LateIds([*ids, *[late.mask_id] * missing], 0 if late.attends_to_expansion else len(ids))


def _document(ids: list[int], late: LateInteraction) -> LateIds:
    found = LateIds(ids)
    if late.skipped:
        found.kept = np.flatnonzero(~np.isin(ids, late.skipped))
    return found


def queries_of(prompts: Sequence[Sequence[int] | np.ndarray]) -> tuple[list[bytes], list[int]]:
    """The different queries with which prompts are compared, and the place of each prompt's; both empty if there are none."""
    own = [prompt.query for prompt in prompts if isinstance(prompt, LateIds) and prompt.query]
    if len(own) < len(prompts):
        return [], []
    places = {query: i for i, query in enumerate(dict.fromkeys(own))}
    return list(places), [places[query] for query in own]


def used_rows(ids: Sequence[int] | np.ndarray, result: np.ndarray, info: PoolingInfo | None) -> np.ndarray:
    """The rows of a prompt's tokens that are used: of a document without those of the skip list; of a model of rewards for
    steps those of the token that ends a step."""
    if result.ndim != 2 or info is None:
        return result
    if info.step_tag_id >= 0 and len(result) == len(ids):
        return result[np.asarray(ids) == info.step_tag_id]
    return result[ids.kept] if isinstance(ids, LateIds) and ids.kept is not None else result


def maxsim(query: np.ndarray, documents: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [N]: the scores of N documents [d, D] for a query [q, D]. A document without tokens has 0.

    Documents are scored some at a time, side by side in one product, so no padding is multiplied.
    """
    scores = np.zeros(len(documents), np.float32)
    begin = 0
    while begin < len(documents):
        end, tokens = begin, 0
        while end < len(documents) and (end == begin or (tokens + len(documents[end])) * len(query) <= ELEMENTS_AT_ONCE):
            tokens += len(documents[end])
            end += 1
        own = [i for i in range(begin, end) if len(documents[i])]
        if own:
            products = query @ np.concatenate([documents[i] for i in own]).T  # [q, tokens]
            starts = np.cumsum([0, *(len(documents[i]) for i in own[:-1])])
            scores[own] = np.maximum.reduceat(products, starts, axis=1).sum(0)
        begin = end
    return scores
