"""Attention on the CPU, in torch and numpy. Everything that layers share is computed once a step.

Layers with the same rotary table share rotations; layers of the same KV group share the cache entries to write and to read.
"""

from itertools import pairwise

import numpy as np
import torch

from quire.kernels.attention.attention_cpu import CpuAttentionPlan, Scratch, attend_entries
from quire.kernels.attention.kv_entries_cpu import as_entries, entry_strides, token_entries
from quire.kernels.attention.rope_kv_cpu import EightBits, Rotations, Writes, head_weights, rope_kv, rotations
from quire.kernels.attention.score_shape import ScoreShape
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.attention.attention import ModelAttention, RotaryTables, score_shape
from quire.workers.attention.kv_cache import KVCache
from quire.workers.attention.latent import Latents
from quire.workers.attention.rope import query_scales
from quire.workers.devices.device import DeviceContext
from quire.workers.models.config import AttentionSpec


class CpuModelAttention(ModelAttention):
    def __init__(self, ctx: DeviceContext):
        self._cache, self._dtype = ctx.cache, ctx.dtype
        self._scratch = Scratch()
        cache = ctx.cache
        rotary, specs = RotaryTables(cache, ctx.max_model_len, ctx.device), cache.own_specs
        self._kinds = {spec: CpuAttention(spec, cache, rotary[spec], ctx.max_model_len) for spec in specs}
        own = [i for i in cache.layers if cache.specs[i].is_there and cache.specs[i].is_causal]
        self._layers = {i: self._kinds[cache.specs[i]] for i in own}
        places = {i: cache.places[i] for i in own}
        # one tensor of each group and dtype, since all of these have the same shape and strides
        self._tensors = {(p.group, cache.dtype_of(s := cache.specs[i]), s.sees_ahead): p.tensor for i, p in places.items()}
        self._of_group = {place.group: place.tensor for place in places.values()}  # groups with layers in this stage

    def begin(
        self,
        tables: SlotTables,
        step: StepBuffers,
        num_tokens: int,
        num_rows: int,
        num_decode_rows: int | None,
        windows: bool = False,
        has_more_tokens: bool = False,
    ) -> None:
        cache, host = self._cache, step.host
        block_table = tables.host["block_table"][:, host["row_slots"][:num_rows]]
        seq_lens = host["seq_lens"][:num_rows].tolist()
        starts = host["query_start"][: num_rows + 1].tolist()
        query_lens = [end - begin for begin, end in pairwise(starts)]
        writes = {g: self._writes(g, host["slot_mapping"][g, :num_tokens]) for g in self._of_group}
        last_visible, step.sees_ahead = host["last_visible"][:num_tokens] if step.sees_ahead else None, False
        plans = {
            (g, dtype, ahead): CpuAttentionPlan(
                block_table[g],
                seq_lens,
                query_lens,
                cache.k[tensor],
                dtype=self._dtype,
                window=cache.groups[g].spec.window,
                is_chunked=cache.groups[g].spec.is_chunked,
                scratch=self._scratch,
                last_visible=last_visible if ahead else None,
            )
            for (g, dtype, ahead), tensor in self._tensors.items()
        }
        positions = host["positions"][:num_tokens]
        turned: dict[tuple[int, bool, tuple[int, ...]], Rotations] = {}  # by the table's id
        for kind in self._kinds.values():
            table = id(kind.cos_sin), kind.interleaved, kind.axes
            if table not in turned:
                at = host["rotary"][:, :num_tokens] if kind.axes else positions
                turned[table] = rotations(kind.cos_sin, at, kind.interleaved, kind.axes)
            kind.begin(positions, turned[table], writes[kind.group], plans[kind.group, kind.dtype, kind.sees_ahead])

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor | Latents,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(qkv, Latents):
            return self._layers[layer].attend_latents(layer, qkv)
        return self._layers[layer].attend(layer, qkv, q_norm, k_norm, sinks)

    def _first_keys(self, group: int) -> torch.Tensor:
        """One of the group's key tensors. All have the same shape and strides, whatever their dtypes."""
        return self._cache.k[self._of_group[group]]

    def _writes(self, group: int, mapping: np.ndarray) -> Writes:
        tokens = None
        if mapping.min() < 0:
            tokens = np.flatnonzero(mapping >= 0)
            mapping = mapping[tokens]
        num_kv_heads = self._cache.groups[group].spec.num_kv_heads
        entries = token_entries(mapping, entry_strides(self._first_keys(group)), self._cache.block_size, num_kv_heads)
        return Writes(entries, tokens)


class CpuAttention:
    """Attention of the layers of one spec."""

    def __init__(self, spec: AttentionSpec, cache: KVCache, cos_sin: torch.Tensor, max_positions: int):
        self.cos_sin = cos_sin
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.axes = spec.rope.axes if spec.rope is not None else ()
        self._shape = score_shape(spec, cos_sin.device)
        scales = query_scales(spec, max_positions)
        self._all_q_scales = None if scales is None else scales.numpy()
        self.group = next(g for g, group in enumerate(cache.groups) if group.spec == spec.cache)
        self.dtype, self.sees_ahead = cache.dtype_of(spec), spec.sees_ahead
        self._spec = spec
        self._cache = cache
        self._head_weights: dict[int, torch.Tensor] = {}  # of QK-norm, by layer
        # of the cache as currently allocated
        self._cached: list[torch.Tensor] = []
        self._entries: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of k and v, by layer

    def begin(self, positions: np.ndarray, turned: Rotations, writes: Writes, plan: CpuAttentionPlan) -> None:
        self._q_scales = None if self._all_q_scales is None else self._all_q_scales[positions]
        self._rotations, self._writes, self._plan = turned, writes, plan
        if self._cached is not self._cache.k:
            self._cached, self._entries = self._cache.k, {}

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        spec = self._spec
        shape = self._shape if sinks is None else self._shape._replace(sinks=sinks)
        k_entries, v_entries = self._entries_of(layer)
        weights, eps = None, 0.0
        if q_norm is not None and k_norm is not None and spec.qk_norm_eps is not None:
            eps = spec.qk_norm_eps
            weights = self._head_weights.get(layer)
            if weights is None:
                weights = self._head_weights[layer] = head_weights(q_norm, k_norm, spec.num_heads, spec.num_kv_heads)
        if spec.cache_dtype is not None:
            return self._attend_eight_bits(layer, qkv, k_entries, v_entries, weights, eps, shape)
        heads, how = spec.num_heads, (spec.qk_norm_weighs, self._q_scales)
        q = rope_kv(qkv, self._rotations, self._writes, k_entries, v_entries, heads, weights, eps, None, *how)
        return attend_entries(q, k_entries, v_entries, self._plan, spec.scale, shape).reshape(qkv.shape[0], -1)

    def attend_latents(self, layer: int, latents: Latents) -> torch.Tensor:
        """[T, Hq, L]. Whole entries are used as keys and as values; the rotated elements of the output are then cut off."""
        spec, qk = self._spec, latents.queries_and_keys()
        entries, _ = self._entries_of(layer)
        q = rope_kv(qk, self._rotations, self._writes, entries, None, spec.num_heads, q_scales=self._q_scales)
        return attend_entries(q, entries, entries, self._plan, spec.scale)[..., -spec.latent_dim :]

    def _attend_eight_bits(
        self,
        layer: int,
        qkv: torch.Tensor,
        k_entries: np.ndarray,
        v_entries: np.ndarray,
        weights: torch.Tensor | None,
        eps: float,
        shape: ScoreShape,
    ) -> torch.Tensor:
        spec, (k_scale, v_scale) = self._spec, self._cache.scales[layer]
        cached = EightBits(self.dtype, k_scale, v_scale)
        heads, how = spec.num_heads, spec.qk_norm_weighs
        q = rope_kv(qkv, self._rotations, self._writes, k_entries, v_entries, heads, weights, eps, cached, how, self._q_scales)
        out = attend_entries(q, k_entries, v_entries, self._plan, spec.scale * k_scale, shape)
        return out.reshape(qkv.shape[0], -1).mul_(v_scale)

    def _entries_of(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The entries of the layer's k and v caches; made once."""
        found = self._entries.get(layer)
        if found is None:
            tensor = self._cache.places[layer].tensor
            found = self._entries[layer] = as_entries(self._cache.k[tensor]), as_entries(self._cache.v[tensor])
        return found
