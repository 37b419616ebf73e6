"""KVCache: the device memory that KV blocks stand for, and where each layer keeps its part. Block ids are the core's business.

Layers are in groups that share a block table (one per window size). All groups draw block ids from one pool, and a block
belongs to one group at a time, so the i-th layers of all groups can share one tensor: there are as many tensors as the largest
group has layers.
"""

from typing import NamedTuple

import torch

from quire.workers.models.config import ModelConfig, kv_groups


class Place(NamedTuple):
    group: int
    tensor: int


class KVCache:
    """k, v: one tensor [num_blocks, Hkv, block_size, D] for each layer of the largest group, once `allocate` was called."""

    def __init__(self, config: ModelConfig, block_size: int, dtype: torch.dtype):
        self.groups = kv_groups(config)
        self.block_size = block_size
        self.dtype = dtype
        self._shape = (config.num_kv_heads, block_size, config.head_dim)
        self.num_tensors = max(len(layers) for _, layers in self.groups)
        self.places = [Place(0, 0)] * config.num_layers
        for g, (_, layers) in enumerate(self.groups):
            for i, layer in enumerate(layers):
                self.places[layer] = Place(g, i)
        self.num_blocks = 0
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(w for w, _ in self.groups)

    @property
    def block_bytes(self) -> int:
        heads, size, dim = self._shape
        return 2 * self.num_tensors * heads * size * dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> None:
        """Replace the tensors; the null block is zeroed, so that nothing it holds is NaN."""
        self.release()
        self.num_blocks = num_blocks
        for _ in range(self.num_tensors):
            for side in (self.k, self.v):
                side.append(torch.empty((num_blocks, *self._shape), dtype=self.dtype, device=device))
                side[-1][0].zero_()

    def release(self) -> None:
        """Give the memory back."""
        self.k, self.v, self.num_blocks = [], [], 0
