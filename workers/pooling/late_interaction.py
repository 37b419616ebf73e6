"""Late interaction: scores of token vectors, and the vectors of BGE-M3 and of ColBERT's own checkpoints.

    MaxSim(q, d) = sum over the query's tokens of the greatest <q_i, d_j> over the document's tokens

ColBERT: arXiv:2004.12832, section 3; BGE-M3: arXiv:2402.03216, section 3.2. A query is filled with [MASK] to its length
(`expanded`), which its own tokens do not see unless the checkpoint says so; documents lose the vectors of a skip list.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from quire.workers.loading.files import open_file
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.pooling.poolers import Spans, normalized, pooled
from quire.workers.pooling.sentence_transformers import LateInteraction

ELEMENTS_AT_ONCE = 1 << 24  # of products of a query's tokens with documents' tokens


def maxsim(query: torch.Tensor, documents: Sequence[torch.Tensor]) -> torch.Tensor:
    """float32 [N]: the scores of N documents [d, D] for a query [q, D]. A document without tokens has 0.

    Documents are scored some at a time, side by side in one product, so no padding is multiplied.
    """
    query = query.float()
    scores: list[torch.Tensor] = []
    begin = 0
    while begin < len(documents):
        end, tokens = begin, 0
        while end < len(documents) and (end == begin or (tokens + len(documents[end])) * len(query) <= ELEMENTS_AT_ONCE):
            tokens += len(documents[end])
            end += 1
        some = documents[begin:end]
        products = query @ torch.cat([document.float() for document in some]).T  # [q, tokens]
        scores += [
            part.amax(1).sum() if part.shape[1] else products.new_zeros(())
            for part in products.split([len(document) for document in some], 1)
        ]
        begin = end
    return torch.stack(scores) if scores else query.new_zeros(0)


def expanded(ids: Sequence[int], late: LateInteraction, mask_id: int) -> list[int]:
    """A query's tokens, filled with [MASK] to the model's length of queries, or cut there."""
    kept = list(ids[: late.query_length])
    return kept + [mask_id] * (late.query_length - len(kept)) if late.expands else kept


def kept_tokens(ids: Sequence[int], skipped: Collection[int]) -> list[int]:
    """The places of a document's tokens that have a vector."""
    return [place for place, token in enumerate(ids) if token not in skipped]


class ColBERTHead:
    """The product of ColBERT's own checkpoints (HF_ColBERT): token vectors of length 1, float32 [T, D].

    Its weight, without a bias, is the tensor `linear.weight` beside those of the encoder.
    """

    def __init__(self, weight: torch.Tensor):
        self._weight = weight.float()
        self.size = len(weight)

    def __call__(self, hidden: torch.Tensor, spans: Spans) -> list[torch.Tensor]:
        vectors = normalized(functional.linear(hidden.float(), self._weight))
        return [vectors[first:end] for first, end in spans.lists()]


class M3Heads:
    """BGE-M3's three kinds of vectors from the same hidden states: dense, sparse and of tokens."""

    def __init__(self, folder: Path, hidden_size: int, device: torch.device, unused: Collection[int]):
        """unused: ids of tokens without a weight: [CLS], [SEP], padding and the unknown token. Raises WeightsError."""
        self._sparse = _linear(folder / "sparse_linear.pt", hidden_size, device, rows=1)
        self._colbert = _linear(folder / "colbert_linear.pt", hidden_size, device)
        self._unused = frozenset(unused)
        self.size, self.token_size = hidden_size, len(self._colbert[0])

    def dense(self, hidden: torch.Tensor, spans: Spans) -> torch.Tensor:
        """The first token's state, of length 1: float32 [R, H]."""
        return normalized(pooled(hidden, spans, "cls"))

    def sparse(self, hidden: torch.Tensor, spans: Spans, ids: Sequence[Sequence[int]]) -> list[dict[int, float]]:
        """The weight of each token of each row: of several equal ones the greatest, and none that are 0."""
        weights = functional.linear(hidden.float(), *self._sparse).relu_().squeeze(1)
        return [
            greatest_weights(row, weights[first:end].tolist(), self._unused)
            for row, (first, end) in zip(ids, spans.lists(), strict=True)
        ]

    def tokens(self, hidden: torch.Tensor, spans: Spans) -> list[torch.Tensor]:
        """A vector of length 1 of each token but the first: float32 [n - 1, D] of each row."""
        vectors = normalized(functional.linear(hidden.float(), *self._colbert))
        return [vectors[first + 1 : end] for first, end in spans.lists()]


def greatest_weights(ids: Sequence[int], weights: Sequence[float], unused: Collection[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if token not in unused and weight > found.get(token, 0.0):
            found[token] = weight
    return found


def sparse_score(query: dict[int, float], document: dict[int, float]) -> float:
    """The sum, over the tokens of both, of the products of their weights."""
    return sum(weight * document[token] for token, weight in query.items() if token in document)


def _linear(path: Path, hidden_size: int, device: torch.device, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [rows, H] and bias [rows] of a file of torch.save with a linear layer, float32. Raises WeightsError."""
    if not path.exists():
        raise WeightsError(f"{path} is not there: BGE-M3's heads are in files of their own")
    with open_file(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
        rows = rows or shapes.get("weight", (0,))[0]
        if shapes != {"weight": (rows, hidden_size), "bias": (rows,)} or not rows:
            raise WeightsError(f"{path} holds {shapes}, expected are a weight [n, {hidden_size}] and a bias [n]")
        return tuple(file.get_tensor(name).to(device, torch.float32, copy=True) for name in ("weight", "bias"))  # type: ignore[return-value]
