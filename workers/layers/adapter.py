"""A layer's view of adapters (LoRA): what fills its adapter slot, and the `Switch` that says when it is used."""

from typing import NamedTuple, Protocol

import torch

from quire.kernels.experts.experts_reference import Act, Weights
from quire.workers.layers.stacked_experts import Names
from quire.workers.shard import Shard


class Adapter(Protocol):
    """It fills a layer's adapter slot, and adds its own product to the layer's output, in place or not."""

    def apply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: ...


class ExpertsAdapter(Protocol):
    """It fills the adapter slot of a layer's experts, and computes them, as `ops.experts` does, with its own products."""

    def experts(
        self,
        x: torch.Tensor,
        w: Weights,
        ids: torch.Tensor,
        weights: torch.Tensor,
        act: Act,
        shared: torch.Tensor | None,
        num_routed: int,
    ) -> torch.Tensor: ...


class ExpertsPlace(NamedTuple):
    """A layer's experts: those of this rank, the sizes, the checkpoint's names. lacks: what they would have to have for an
    adapter; "": nothing."""

    own: Shard
    hidden: int
    inner: Shard
    names: Names
    lacks: str


class Switch(Protocol):
    """It says whether adapters are used by the step that is being computed."""

    is_active: bool
