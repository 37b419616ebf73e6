"""Pooling: what a model makes of pooled hidden states, in float32: vectors, cut and normalized, or scores with an activation.

PoolingInfo says which tasks the model has. A classifier's head is the model's (`LanguageModel.compute_scores`).
"""

from collections.abc import Callable

import torch

from quire.ipc.pooling import PoolingInfo, PoolRow
from quire.workers.pooling.labels import LabelActivation, activate_labels


class Pooling:
    """scores: hidden states [N, H] -> float32 [N, labels] before their activation. dense: of vectors of texts."""

    def __init__(
        self,
        info: PoolingInfo,
        scores: Callable[[torch.Tensor], torch.Tensor],
        activation: LabelActivation = "identity",
        dense: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.info = info
        self._scores, self._activation, self._dense = scores, activation, dense

    def apply(self, states: torch.Tensor, kind: PoolRow) -> torch.Tensor:
        """float32 [N, columns] of states [N, H]."""
        if kind.task in ("classify", "token_classify"):
            logits = self._scores(states)
            return activate_labels(logits, self._activation) if kind.use_activation else logits
        vectors = states.float()
        if self._dense is not None and kind.task == "embed":
            vectors = self._dense(vectors)
        if kind.dimensions:
            vectors = vectors[:, : kind.dimensions]
        return torch.nn.functional.normalize(vectors, dim=-1) if kind.use_activation else vectors
