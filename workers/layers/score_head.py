"""ScoreHead: the product of a classifier of texts, hidden states -> scores of labels, in float32. Every rank has all of it.

Its weights are the checkpoint's `score`, or rows of the head over the vocabulary: rerankers by two tokens' logits ("no" and
"yes") need these alone. In a tied model they are rows of the embedding.
"""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
from torch import nn

from quire.workers.layers.embedding import Embedding
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module, WeightOwner, new_parameter
from quire.workers.loading.weight_loader import FLOATS, WeightLoader, copied
from quire.workers.shard import whole


class HeadOfLabels(Protocol):
    """The fields of config.PoolingSpec about the head."""

    @property
    def num_labels(self) -> int: ...

    @property
    def has_bias(self) -> bool: ...

    @property
    def label_tokens(self) -> tuple[int, ...]: ...

    @property
    def is_difference(self) -> bool: ...


class ScoreHead(WeightOwner):
    """x [N, H] -> float32 [N, labels]. shape: (tokens, H) of the head over the vocabulary. tied_to: the embedding, if it is."""

    def __init__(self, spec: HeadOfLabels, shape: tuple[int, int], place: Placement, tied_to: Module | None) -> None:
        super().__init__()
        self._spec, self._shape = spec, shape
        rows = len(spec.label_tokens) or spec.num_labels
        self.weight = new_parameter((rows, shape[1]), torch.float32, place.device)
        self.bias: nn.Parameter | None = None
        if spec.has_bias:
            self.bias = new_parameter((spec.num_labels,), torch.float32, place.device)
        self.is_tied = tied_to is not None and bool(spec.label_tokens)
        self.__dict__["_embedding"] = tied_to  # not a child of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.float(), self.weight, self.bias)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        rows, hidden = whole(self._spec.num_labels), whole(self._shape[1])
        if not self._spec.label_tokens:
            yield f"{name}.weight", copied(self.weight, (rows, hidden))
        elif not self.is_tied:
            yield "lm_head.weight", WeightLoader(self._shape, (), FLOATS, partial(self._take_rows, self.weight))
        if self.bias is not None:
            yield f"{name}.bias", copied(self.bias, (rows,))

    def _take_rows(self, target: torch.Tensor, piece: torch.Tensor, row: int) -> None:
        """Copy the tokens' rows that are in the piece, which is rows [row, row + n) of the head."""
        for at, token in enumerate(self._spec.label_tokens):
            if row <= token < row + len(piece):
                target[at].copy_(piece[token - row])

    def finish(self) -> None:
        if self.is_tied:
            embedding: Embedding = self.__dict__["_embedding"]
            tokens = torch.tensor(self._spec.label_tokens, device=embedding.weight.device)
            self.weight.copy_(embedding.weight.index_select(0, tokens))
        if self._spec.is_difference:
            self.weight = nn.Parameter(self.weight[1:] - self.weight[:1], requires_grad=False)
