"""A layer's view of adapters (LoRA): what fills its adapter slot, and the `Switch` that says when it is used."""

from typing import Any, NamedTuple, Protocol

import torch

from quire.kernels.elementwise.norm_reference import Term
from quire.kernels.experts.experts_reference import Act, Weights
from quire.kernels.lora.tables import Shrink
from quire.workers.layers import ops
from quire.workers.layers.stacked_experts import Names
from quire.workers.shard import Shard


class Adapter:
    """It fills a layer's adapter slot, and adds its own product to the layer's output."""

    def shrink(self, x: torch.Tensor) -> Any:
        """The value that `expand` needs, made of the layer's input before its own product: by default the input itself."""
        return x

    def beside(self, x: torch.Tensor) -> Shrink | None:
        """All that a kernel of the layer's product needs to compute `shrink` of x [T, in] itself; None: call `shrink`."""
        return None

    def term(self, h: Any, num_tokens: int) -> Term | None:
        """All that a norm behind the layer needs to do as `expand`; None: call `expand`."""
        return None

    def expand(self, h: Any, y: torch.Tensor) -> torch.Tensor:
        """y [T, out] with the adapter added in place; y is the layer's product, or one of its float32 partial sums."""
        raise NotImplementedError

    def expand_gated(self, h: Any, y: torch.Tensor) -> torch.Tensor:
        """silu(first half) · second half of what `expand` gives."""
        return ops.silu_mul(self.expand(h, y))

    def apply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Both halves, one behind the other."""
        return self.expand(self.shrink(x), y)


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
