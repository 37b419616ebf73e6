"""RewardHead: the two products of a reward model, hidden states -> rewards, in float32. Every rank has all of it.

score(x) = W2 relu(W1 x + b1) + b2        Qwen2ForRewardModel, Qwen2ForProcessRewardModel
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from quire.workers.layers.linear import Placement
from quire.workers.layers.module import WeightOwner, new_parameter
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.shard import whole


class RewardHead(WeightOwner):
    """x [N, H] -> float32 [N, labels]."""

    def __init__(self, hidden_size: int, num_labels: int, place: Placement) -> None:
        super().__init__()
        self._sizes = (hidden_size, hidden_size), (num_labels, hidden_size)
        first, last = self._sizes
        self.weight_0, self.bias_0 = (new_parameter(size, torch.float32, place.device) for size in (first, first[:1]))
        self.weight_2, self.bias_2 = (new_parameter(size, torch.float32, place.device) for size in (last, last[:1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(functional.linear(x.float(), self.weight_0, self.bias_0))
        return functional.linear(inner, self.weight_2, self.bias_2)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        for number, sizes in zip((0, 2), self._sizes, strict=True):
            shape = tuple(map(whole, sizes))
            yield f"{name}.{number}.weight", copied(getattr(self, f"weight_{number}"), shape)
            yield f"{name}.{number}.bias", copied(getattr(self, f"bias_{number}"), shape[:1])
