"""OrderedFormat: the base of formats with 16-bit activations that can hold a weight's inputs in another order (desc_act).

The columns of such a weight stay in the checkpoint's order. The norm before it writes its result in that order, and so does
SiLU times up; other inputs are gathered into it by a kernel of its own. Joined layers are one weight if their orders are equal,
else one weight each. int4.py and w8a16.py have the formats.
"""

from typing import Protocol, TypeVar

import torch

from quire.kernels.elementwise import activation
from quire.kernels.elementwise import norm as norms
from quire.kernels.triton_support.dependent_launch import mode_for, mode_for_split_k
from quire.workers.layers.formats.quantized import QuantizedFormat
from quire.workers.layers.norm import Norm


class Ordered(Protocol):
    """A weight: column i multiplies input perm[i], and places is perm's inverse; None: inputs are in order."""

    @property
    def perm(self) -> torch.Tensor | None: ...

    @property
    def places(self) -> torch.Tensor | None: ...

    @property
    def outputs(self) -> int: ...


W = TypeVar("W", bound=Ordered)


class OrderedFormat(QuantizedFormat[W]):
    """Subclasses make weights, join two of equal order, and multiply."""

    def _linear(
        self, x: torch.Tensor, weight: W, bias: torch.Tensor | None, out: torch.Tensor | None, is_gated: bool, pdl: int
    ) -> torch.Tensor:
        """y, for x with its columns in the weight's order."""
        raise NotImplementedError

    def _linear_split_k(self, x: torch.Tensor, weight: W, bias: torch.Tensor | None, pdl: int) -> torch.Tensor:
        """y, or its partial sums for a norm."""
        return self._linear(x, weight, bias, None, False, pdl)

    def _joined(self, above: W, below: W) -> W:
        raise NotImplementedError

    def _stacked(self, above: W, below: W) -> W | None:
        first, second = above.perm, below.perm
        if first is None or second is None:
            is_same = first is second
        else:
            is_same = torch.equal(first, second)
        return self._joined(above, below) if is_same else None

    def _outputs(self, weight: W) -> int:
        return weight.outputs

    def _multiplied(
        self, x: torch.Tensor, weight: W, bias: torch.Tensor | None, out: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        pdl = mode_for(len(x))
        if weight.perm is not None:
            x = activation.gather(x, weight.perm, pdl=pdl)
        return self._linear(x, weight, bias, out, is_gated, pdl)

    def fuses_silu(self, rows: int) -> bool:
        """Whether SiLU times up must write its result in the weight's order."""
        return len(self.weights) == 1 and self.weights[0][0].perm is not None

    def behind_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self.fuses_silu(len(gate_up)):
            return super().behind_silu(gate_up)
        (weight, bias), pdl = self.weights[0], mode_for(len(gate_up))
        return self._linear_split_k(activation.silu_mul(gate_up, perm=weight.perm, pdl=pdl), weight, bias, pdl)

    def split_k(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.weights) > 1:
            return self.product(x)
        (weight, bias), pdl = self.weights[0], mode_for(len(x))
        if weight.perm is not None:
            x = activation.gather(x, weight.perm, pdl=pdl)
        return self._linear_split_k(x, weight, bias, pdl)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: Norm, is_gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.weights) > 1 or not norm.is_plain or self.weights[0][0].places is None:
            return super().normed(x, residual, norm, is_gated)
        (weight, bias), pdl = self.weights[0], mode_for(len(residual))
        if x is None:
            h = norms.rms_norm(residual, norm.weight, norm.eps, places=weight.places, pdl=pdl)
        else:
            mode = mode_for_split_k(len(residual)) if x.dim() == 3 else pdl
            h = norms.add_rms_norm(x, residual, norm.weight, norm.eps, places=weight.places, pdl=mode)
        return self._linear(h, weight, bias, None, is_gated, pdl), residual
