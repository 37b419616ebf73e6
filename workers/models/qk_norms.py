"""Norms of queries and keys for `make_qk_norm` of SelfAttention, other than attention's own, an RMSNorm of each head with one
weight. They change x [T, H D], this rank's heads, in place.
"""

from collections.abc import Callable, Iterator

import torch

from quire.kernels.elementwise.norm_reference import Weighs
from quire.workers.layers import ops
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import new_parameter
from quire.workers.layers.norm import Norm
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.shard import Shard, whole

MakeQKNorm = Callable[[Shard, Placement], Norm]


class AllHeadsNorm(Norm):
    """RMSNorm over all of a token's heads, those of other ranks included."""

    def __init__(self, heads: Shard, head_dim: int, eps: float, weighs: Weighs, place: Placement):
        super().__init__()
        self.eps, self._weighs, self._parallel = eps, weighs, place.parallel
        self._shard = heads.times(head_dim)
        self.weight = new_parameter((self._shard.size,), place.dtype, place.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._shard.is_whole:
            return ops.rms_norm(x, self.weight, self.eps, x, weighs=self._weighs)
        # ranks may hold the same KV head: then every head is counted equally often
        squares = self._parallel.all_reduce(x.float().square().sum(-1, keepdim=True))
        normed = x.float() * torch.rsqrt(squares / (x.shape[1] * self._parallel.size) + self.eps)
        return x.copy_(self.weight * (normed.to(x.dtype) if self._weighs == "rounded" else normed))

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        yield f"{name}.weight", copied(self.weight, (self._shard,))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)


class HeadLayerNorms(Norm):
    """LayerNorm of each head with a weight of its own."""

    def __init__(self, heads: Shard, head_dim: int, eps: float, place: Placement):
        super().__init__()
        self.eps, self._heads = eps, heads
        self.weight = new_parameter((heads.size, head_dim), place.dtype, place.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(1, self.weight.shape)
        ops.layer_norm(heads, self.weight, None, self.eps, heads)
        return x

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        yield f"{name}.weight", copied(self.weight, (self._heads, whole(self.weight.shape[1])))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)


def over_all_heads(head_dim: int, eps: float, weighs: Weighs) -> MakeQKNorm:
    return lambda heads, place: AllHeadsNorm(heads, head_dim, eps, weighs, place)


def layer_norm_of_each_head(head_dim: int, eps: float) -> MakeQKNorm:
    return lambda heads, place: HeadLayerNorms(heads, head_dim, eps, place)
