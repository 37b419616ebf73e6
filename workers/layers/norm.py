"""RMSNorm and LayerNorm, alone or after an addition to the residual stream; the arithmetic is in ops.py."""

from collections.abc import Iterator
from typing import Literal

import msgspec
import torch

from quire.kernels.elementwise.norm_reference import Weighs
from quire.workers.layers import ops
from quire.workers.layers.module import WeightOwner, new_parameter
from quire.workers.layers.unadded import settled
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.shard import whole


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model's norm."""

    eps: float
    type: Literal["rms", "layer"] = "rms"
    weighs: Weighs = "rounded"  # rms: how the weight is applied
    has_bias: bool = False  # layer
    residual_scale: float = 1.0  # a factor of x in `add`

    @property
    def is_plain(self) -> bool:
        """`Norm.is_plain` of norms that are made of it."""
        return self.type == "rms" and self.weighs == "rounded" and self.residual_scale == 1.0


class Norm(WeightOwner):
    """`forward` normalises x [T, size]; `add` first adds x to the residual stream, in place."""

    is_plain = False  # an RMSNorm of `weight` and `eps` alone, as it is built into kernels of products and of sums
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        for parameter, tensor in self.named_parameters(recurse=False):
            yield f"{name}.{parameter}", copied(tensor, (whole(len(tensor)),))


class RMSNorm(Norm):
    """RMSNorm with a weight [size]."""

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weighs: Weighs = "rounded",
        residual_scale: float = 1.0,
    ):
        super().__init__()
        self.eps = eps
        self.weight = new_parameter((size,), dtype, device)
        self.is_plain = weighs == "rounded" and residual_scale == 1.0
        self._weighs, self._residual_scale = weighs, residual_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps, weighs=self._weighs)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return ops.add_rms_norm(x, residual, self.weight, self.eps, scale=self._residual_scale, weighs=self._weighs)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self.weight.fill_(0.0 if self._weighs == "plus_one" else 1.0)


class UnweightedRMSNorm(RMSNorm):
    """RMSNorm without a weight: the checkpoint has none, and kernels get ones."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device, *, weighs: Weighs = "rounded"):
        super().__init__(size, eps, dtype, device)
        self.weight.fill_(1.0)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        yield from ()

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        """Keep the ones."""


class LayerNorm(Norm):
    """LayerNorm with a weight [size] and an optional bias."""

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_bias: bool = False,
        residual_scale: float = 1.0,
    ):
        super().__init__()
        self.eps = eps
        self.weight = new_parameter((size,), dtype, device)
        self.bias = new_parameter((size,), dtype, device) if has_bias else None
        self._residual_scale = residual_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, scale=self._residual_scale)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()


class NoNorm(Norm):
    """For a block without a norm before a product: x as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(settled(x))


def make_norm(spec: NormSpec, size: int, dtype: torch.dtype, device: torch.device) -> Norm:
    """The norm of rows of `size` elements."""
    if spec.type == "layer":
        return LayerNorm(size, spec.eps, dtype, device, has_bias=spec.has_bias, residual_scale=spec.residual_scale)
    return RMSNorm(size, spec.eps, dtype, device, weighs=spec.weighs, residual_scale=spec.residual_scale)
