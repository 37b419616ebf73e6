"""KVCache: the device memory that KV blocks stand for, and where each layer keeps its part. Block ids are the core's business.

Layers whose cache spec is equal (window and shape) are a group and share a block table. All groups draw block ids from one
pool, and a block belongs to one group at a time, so the i-th layers of all groups of one shape share one tensor: there are as
many tensors of a shape as its largest group has layers.
"""

from typing import NamedTuple

import torch

from quire.ipc.memory_plan import block_bytes
from quire.workers.models.config import AttentionSpec, CacheSpec


class CacheGroup(NamedTuple):
    spec: CacheSpec
    layers: list[int]


class Place(NamedTuple):
    group: int
    tensor: int


class KVCache:
    """k, v: tensors [num_blocks, Hkv, block_size, D], one for each layer of a shape's largest group, once allocated.

    `specs` are the layers' attention, with the heads of this rank.
    """

    def __init__(self, specs: list[AttentionSpec], block_size: int, dtype: torch.dtype):
        self.specs = specs
        self.groups = cache_groups(specs)
        self.block_size = block_size
        self.dtype = dtype
        self._shapes: list[tuple[int, int, int]] = []  # of the tensors, without num_blocks
        self.places = [Place(0, 0)] * len(specs)
        first: dict[tuple[int, int, int], int] = {}
        for shape in dict.fromkeys(self._shape(group) for group in self.groups):
            first[shape] = len(self._shapes)
            self._shapes += [shape] * max(len(group.layers) for group in self.groups if self._shape(group) == shape)
        for g, group in enumerate(self.groups):
            for i, layer in enumerate(group.layers):
                self.places[layer] = Place(g, first[self._shape(group)] + i)
        self.num_blocks = 0
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    def _shape(self, group: CacheGroup) -> tuple[int, int, int]:
        return group.spec.num_kv_heads, self.block_size, group.spec.head_dim

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each group."""
        return tuple(group.spec.window for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self._shapes, self.dtype.itemsize)

    def allocate(self, num_blocks: int, device: torch.device) -> None:
        """Replace the tensors; the null block is zeroed, so that nothing it holds is NaN."""
        self.release()
        self.num_blocks = num_blocks
        for shape in self._shapes:
            for side in (self.k, self.v):
                side.append(torch.empty((num_blocks, *shape), dtype=self.dtype, device=device))
                side[-1][0].zero_()

    def release(self) -> None:
        """Give the memory back."""
        self.k, self.v, self.num_blocks = [], [], 0


def cache_groups(specs: list[AttentionSpec]) -> list[CacheGroup]:
    """Layers that share a block table, full attention (window 0) first where there is any."""
    kinds = sorted({spec.cache for spec in specs})
    return [CacheGroup(kind, [i for i, spec in enumerate(specs) if spec.cache == kind]) for kind in kinds]
