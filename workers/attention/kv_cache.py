"""KVCache: the device memory of KV blocks, and the tensor of each layer's keys and values. The core assigns block ids.

Layers of equal cache spec (window and shape) are a group and share a block table. For chunked layers a sequence keeps as many
tokens as for a window of the chunk's size, which is never less than they see. All groups draw block ids from one pool, and a
block belongs to one group at a time, so the i-th layers of all groups of one shape share one tensor: a shape has as many
tensors as its largest group has layers. Layers that are left out of an 8-bit cache have tensors of their own but share the
block table. A layer that reads another layer's keys and values has the other's place; one without attention has none. A stage
has tensors for its own layers only, but the groups of the whole model: all stages get the same block tables.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from quire.ipc.memory_plan import block_bytes
from quire.ipc.messages.workers import FullAttention, KVGroupKind, SlidingWindow
from quire.workers.layers.kv_scales import KVScales
from quire.workers.models.config import AttentionSpec, CacheSpec


class CacheGroup(NamedTuple):
    spec: CacheSpec
    layers: list[int]


class Place(NamedTuple):
    group: int
    tensor: int


class Kind(NamedTuple):
    """Layers of equal kind may share a tensor."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    has_values: bool = True  # values are stored apart from keys

    def block_bytes(self, block_size: int) -> int:
        pair = block_bytes([(self.num_kv_heads, block_size, self.head_dim, self.dtype.itemsize)])
        return pair if self.has_values else pair // 2


DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
NO_SCALES: Mapping[int, KVScales] = MappingProxyType({})


class KVCache:
    """k, v: tensors [num_blocks, Hkv, block_size, D], one for each layer of a kind's largest group, once allocated.

    If keys contain the values (latent attention), v is k. specs: attention of all layers of the model, with the heads of this
    rank. layers: those of this stage. An 8-bit cache holds k / k_scale and v / v_scale; `scales` are the checkpoint's, by
    layer, 1.0 for those it does not have.
    """

    def __init__(
        self,
        specs: list[AttentionSpec],
        block_size: int,
        dtype: torch.dtype,
        scales: Mapping[int, KVScales] = NO_SCALES,
        layers: range | None = None,
        *,
        one_table: bool = False,
    ):
        """one_table: all groups will have the same block ids, so that no two layers share a tensor."""
        self.specs = specs
        self.layers: Sequence[int] = range(len(specs)) if layers is None else layers
        self.groups = cache_groups(specs)
        self.block_size = block_size
        self.dtype = dtype
        self._kinds: list[Kind] = []  # of the tensors
        self.places = [Place(0, 0)] * len(specs)
        makers = [i for i in self.layers if specs[i].has_cache]
        of_kind = [[i for i in makers if self._kind(specs[i]) == kind] for kind in self._all_kinds()]
        for alike in of_kind:
            first, placed = len(self._kinds), [0] * len(self.groups)
            for layer in alike:
                group = next(g for g, group in enumerate(self.groups) if layer in group.layers)
                counter = 0 if one_table else group
                self.places[layer] = Place(group, first + placed[counter])
                placed[counter] += 1
            self._kinds += [self._kind(specs[alike[0]])] * max(placed)
        self.scales = {layer: (found.k or 1.0, found.v or 1.0) for layer, found in scales.items()}
        for layer, maker in ((i, spec.shares) for i, spec in enumerate(specs) if spec.shares is not None):
            self.places[layer] = self.places[maker]
            if maker in self.scales:
                self.scales[layer] = self.scales[maker]
        self.scale_tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the same for kernels, float32 [1]
        self.num_blocks = 0
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.more_bytes = 0  # that something else keeps for each block
        self.drafter: KVCache | None = None  # keys and values of a draft model, under the same blocks' ids

    def _all_kinds(self) -> dict[Kind, None]:
        """The kinds of this stage's layers, in the order of the groups."""
        own = set(self.layers)
        return dict.fromkeys(self._kind(self.specs[i]) for group in self.groups for i in group.layers if i in own)

    def _kind(self, spec: AttentionSpec) -> Kind:
        return Kind(spec.num_kv_heads, spec.head_dim, self.dtype_of(spec), not spec.latent_dim)

    @property
    def own_specs(self) -> list[AttentionSpec]:
        """The distinct specs of this stage's layers with attention over the cache."""
        return list(dict.fromkeys(self.specs[i] for i in self.layers if self.specs[i].is_there and self.specs[i].is_causal))

    def dtype_of(self, spec: AttentionSpec) -> torch.dtype:
        """The dtype of keys and values of layers with this spec."""
        return self.dtype if spec.cache_dtype is None else DTYPES[spec.cache_dtype]

    @property
    def kinds(self) -> tuple[KVGroupKind, ...]:
        """The kind of each group, for the core."""
        return tuple(SlidingWindow(g.spec.window) if g.spec.window else FullAttention() for g in self.groups)

    @property
    def block_bytes(self) -> int:
        own = sum(kind.block_bytes(self.block_size) for kind in self._kinds)
        return own + self.more_bytes + (0 if self.drafter is None else self.drafter.block_bytes)

    def allocate(self, num_blocks: int, device: torch.device) -> None:
        """Replace the tensors; the null block is zeroed, so that it contains no NaN."""
        self.release()
        if self.drafter is not None:
            self.drafter.allocate(num_blocks, device)
        self.num_blocks = num_blocks
        for kind in self._kinds:
            shape = num_blocks, kind.num_kv_heads, self.block_size, kind.head_dim
            for side in (self.k, self.v):
                is_shared = side is self.v and not kind.has_values
                side.append(self.k[-1] if is_shared else torch.empty(shape, dtype=kind.dtype, device=device))
                side[-1][0].zero_()
        if not self.scale_tensors:  # kept, since captured graphs may have their addresses
            for layer, (k, v) in self.scales.items():
                self.scale_tensors[layer] = torch.tensor([k], device=device), torch.tensor([v], device=device)

    def release(self) -> None:
        """Free the memory."""
        self.k, self.v, self.num_blocks = [], [], 0
        if self.drafter is not None:
            self.drafter.release()


def cache_groups(specs: list[AttentionSpec]) -> list[CacheGroup]:
    """Groups of the layers that write KV: each shares a block table. Full attention (window 0), if any, comes first."""
    makers = {i: spec.cache for i, spec in enumerate(specs) if spec.has_cache}
    return [CacheGroup(kind, [i for i, cache in makers.items() if cache == kind]) for kind in sorted(set(makers.values()))]
