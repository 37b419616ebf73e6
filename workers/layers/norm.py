"""RMSNorm, alone or with the addition to the residual stream before it; arithmetic is in ops.py."""

from collections.abc import Iterator

import torch

from quire.workers.layers import ops
from quire.workers.layers.module import WeightOwner, new_parameter
from quire.workers.loading.target import Target, copied
from quire.workers.parallel import whole


class RMSNorm(WeightOwner):
    """RMSNorm with a weight [size]; `forward` normalises x, `add` first adds x to the residual stream, in place."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.eps = eps
        self.weight = new_parameter((size,), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        yield f"{name}.weight", copied(self.weight, (whole(len(self.weight)),))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)
