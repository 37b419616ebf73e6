"""Attention on a GPU: our Triton kernels, scheduled once a step on the device.

Layers of one shape (heads and head size) share workspaces and the list of prefill tiles; layers of one shape and window share
the decode schedule, too. A step launches one schedule for each, whatever the number of layers. Nothing waits for the device.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from quire.kernels.attention.decode import decode_attention
from quire.kernels.attention.decode_rope import Rope, can_fuse
from quire.kernels.attention.decode_schedule import (
    MAX_QUERY_LEN,
    DecodeSchedule,
    DecodeWorkspace,
    decode_schedule,
    takes_queries,
)
from quire.kernels.attention.latent_decode import latent_decode, num_splits
from quire.kernels.attention.latent_prefill import latent_prefill
from quire.kernels.attention.latent_rope_kv import latent_rope_kv
from quire.kernels.attention.prefill import prefill_attention
from quire.kernels.attention.prefill_schedule import PrefillWorkspace, prefill_schedule
from quire.kernels.attention.rope_kv import choose_tile, rope_kv
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.kernels.triton_support.dependent_launch import mode_for
from quire.kernels.tuning.current import current
from quire.workers.attention.attention import ModelAttention, RotaryTables, score_shape
from quire.workers.attention.kv_cache import KVCache
from quire.workers.attention.latent import Latents
from quire.workers.attention.rope import query_scales
from quire.workers.devices.device import DeviceContext
from quire.workers.models.config import AttentionSpec

NO_SCALES = (None, None)  # of a cache that does not have 8 bits


class HeadShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Kind(NamedTuple):
    """The properties that a workspace depends on."""

    shape: HeadShape
    cache_dtype: torch.dtype


class Window(NamedTuple):
    """The further properties that a decode schedule depends on."""

    keys: int
    is_chunked: bool


class Step(NamedTuple):
    """The current step, as all layers see it."""

    buffers: StepBuffers
    block_table: torch.Tensor  # int32 [groups, slots, blocks]
    rows: torch.Tensor  # int32 [R], slots
    lengths: tuple[torch.Tensor, torch.Tensor]  # query_start [R + 1], seq_lens [R]
    has_decode: bool
    has_prefill: bool
    limit: torch.Tensor | None  # int32 [1], number of decode rows, if the host does not know it
    has_drafts: bool = False  # decode rows have up to MAX_QUERY_LEN queries, not one each
    has_more_tokens: bool = False  # and together more queries than there are rows, padding included
    last_visible: torch.Tensor | None = None  # int32 [T], if some token sees keys behind its own


class DecodeSide(NamedTuple):
    """Decode attention of rows with up to so many queries: device memory, and a schedule for each of the layers' windows."""

    workspace: DecodeWorkspace
    schedules: dict[Window, DecodeSchedule]


class Workspace:
    """Device memory of all layers of one shape and dtype, and which kernels compute them in the current step."""

    def __init__(self, kind: Kind, windows: list[Window], ctx: DeviceContext):
        shape, cached = kind
        rows, device, dtype = max(ctx.max_rows, ctx.max_samples), ctx.device, ctx.dtype

        def side(max_rows: int, queries: int) -> DecodeSide:
            space = DecodeWorkspace.allocate(max_rows, *shape, queries, device, dtype, cache_dtype=cached)
            return DecodeSide(space, {window: space.new_schedule(*window) for window in windows})

        takes = takes_queries(dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads, MAX_QUERY_LEN)
        self.single = side(ctx.max_rows, 1)
        # for rows with drafts; None: prefill attention computes those
        self.several = side(rows, MAX_QUERY_LEN) if ctx.max_samples and takes else None
        self.prefill = PrefillWorkspace.allocate(rows, ctx.max_tokens, *shape, device, dtype, cache_dtype=cached)
        sizes = [window.keys for window in windows]
        self.prefill_window = max(sizes) if all(sizes) else 0
        self.decode: DecodeSide | None = None  # of the current step; None: it has no rows for decode attention
        self.has_prefill = False  # whether it has rows for prefill attention

    def launch(self, num_rows: int, has_drafts: bool) -> Hashable:
        """Decode attention of steps with equal values here runs the same compiled kernel."""
        side = self.several if has_drafts else self.single
        return side and side.workspace.launch(num_rows)

    def begin(self, step: Step, num_tokens: int, max_keys: int) -> None:
        self.decode = (self.several if step.has_drafts else self.single) if step.has_decode else None
        is_prefill_of_all = step.has_decode and self.decode is None
        self.has_prefill = step.has_prefill or is_prefill_of_all
        if self.decode is not None:
            for schedule in self.decode.schedules.values():
                decode_schedule(self.decode.workspace, schedule, *step.lengths, num_tokens, max_keys, step.limit)
        if self.has_prefill:
            limit = None if is_prefill_of_all else step.limit
            prefill_schedule(self.prefill, *step.lengths, num_tokens, max_keys, limit, window=self.prefill_window)


class CudaModelAttention(ModelAttention):
    def __init__(self, ctx: DeviceContext):
        cache = ctx.cache
        self._max_keys = ctx.max_blocks * cache.block_size
        rotary, specs = RotaryTables(cache, ctx.max_model_len, ctx.device), cache.own_specs

        def kind_of(spec: AttentionSpec) -> Kind:
            return Kind(HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim), cache.dtype_of(spec))

        windows: dict[Kind, list[Window]] = {}
        for spec in sorted(specs, key=lambda spec: spec.cache):  # in the order of the cache's groups
            if not spec.latent_dim:
                windows.setdefault(kind_of(spec), []).append(Window(spec.window, spec.is_chunked))
        self.workspaces = {kind: Workspace(kind, list(dict.fromkeys(some)), ctx) for kind, some in windows.items()}
        kinds = {
            spec: CudaAttention(spec, cache, rotary[spec], ctx.max_model_len, self.workspaces[kind_of(spec)])
            for spec in specs
            if not spec.latent_dim
        }
        latents = {spec: CudaLatentAttention(spec, cache, rotary[spec], ctx.max_model_len) for spec in specs if spec.latent_dim}
        self._layers = [kinds.get(spec) for spec in cache.specs]
        self._latent_layers = [latents.get(spec) for spec in cache.specs]
        self._latent_heads = {spec.num_heads for spec in latents}

    def kernel_specialization(self, num_tokens: int, num_rows: int, windows: bool = False) -> Hashable:
        latents = [num_splits(num_rows, heads) > 1 for heads in self._latent_heads]
        return choose_tile(num_tokens), *(space.launch(num_rows, windows) for space in self.workspaces.values()), *latents

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
        # A mixed step gives all rows to both kernels, which skip the other's rows by a count on the device: a graph must not
        # depend on the mix, and for a slice from an odd row, which is aligned differently, Triton would compile anew.
        mixed = num_decode_rows is None or 0 < num_decode_rows < num_rows
        limit = step.num_decode_rows if mixed else None
        lengths = (step.query_start[: num_rows + 1], step.seq_lens[:num_rows])
        has_decode, has_prefill = mixed or num_decode_rows == num_rows, mixed or num_decode_rows == 0
        if current().fixed_order:  # one kernel for a token's attention, whether it is of a prompt or was sampled
            limit, has_decode, has_prefill = None, False, True
        rows = step.row_slots[:num_rows]
        last, step.sees_ahead = step.last_visible[:num_tokens] if step.sees_ahead else None, False
        which = has_decode, has_prefill, limit, windows, has_more_tokens
        self._begin(Step(step, tables.block_table, rows, lengths, *which, last), num_tokens)

    def begin_writes(self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_rows: int) -> None:
        lengths = step.query_start[: num_rows + 1], step.seq_lens[:num_rows]
        self._begin(Step(step, tables.block_table, step.row_slots[:num_rows], lengths, False, False, None), num_tokens)

    def _begin(self, step: Step, num_tokens: int) -> None:
        self._step = step
        for space in self.workspaces.values():
            space.begin(step, num_tokens, self._max_keys)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor | Latents,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(qkv, Latents):
            latents = self._latent_layers[layer]
            assert latents is not None
            return latents.attend(self._step, layer, qkv)
        attention = self._layers[layer]
        assert attention is not None
        return attention.attend(self._step, layer, qkv, q_norm, k_norm, sinks)


class CudaLatentAttention:
    """Latent attention of the layers of one spec."""

    def __init__(self, spec: AttentionSpec, cache: KVCache, cos_sin: torch.Tensor, max_positions: int):
        self._spec, self._cache, self._cos_sin = spec, cache, cos_sin
        self._q_scales = query_scales(spec, max_positions, cos_sin.device)
        self._interleaved = spec.rope is not None and spec.rope.interleaved

    def attend(self, step: Step, layer: int, x: Latents) -> torch.Tensor:
        """[T, Hq, L]"""
        place, t, pdl = self._cache.places[layer], len(x.kv), mode_for(len(x.kv))
        latent_cache, positions = self._cache.k[place.tensor], step.buffers.positions[:t]
        mapping = step.buffers.slot_mapping[place.group, :t]
        at = (self._cos_sin, positions, mapping, latent_cache)
        q = latent_rope_kv(
            x.q, x.q_latent, x.kv, x.norm_weight, x.eps, *at, interleaved=self._interleaved, q_scales=self._q_scales, pdl=pdl
        )
        out = torch.empty_like(x.q_latent).view(t, self._spec.num_heads, -1)
        arguments = (q, latent_cache, step.block_table[place.group], step.rows, *step.lengths, out)
        hides_first = self._spec.window < 0
        if step.has_decode:
            queries, most = MAX_QUERY_LEN if step.has_drafts else 1, t if step.has_more_tokens else 0
            latent_decode(
                *arguments,
                scale=self._spec.scale,
                limit=step.limit,
                max_query_len=queries,
                max_tokens=most,
                hides_first=hides_first,
                pdl=pdl,
            )
        if step.has_prefill:
            latent_prefill(*arguments, scale=self._spec.scale, first_row=step.limit, hides_first=hides_first)
        return out


class CudaAttention:
    """Attention of the layers of one spec."""

    def __init__(self, spec: AttentionSpec, cache: KVCache, cos_sin: torch.Tensor, max_positions: int, workspace: Workspace):
        self._spec = spec
        self._cache = cache
        self._cos_sin = cos_sin
        self._workspace = workspace
        self._interleaved = spec.rope is not None and spec.rope.interleaved
        self._axes: torch.Tensor | None = None  # int32 [pairs]; None: positions are plain
        if spec.rope is not None and spec.rope.axes:
            self._axes = torch.tensor(spec.rope.axes, dtype=torch.int32, device=cos_sin.device)
        self._q_scales = query_scales(spec, max_positions, cos_sin.device)
        self._shape = score_shape(spec, cos_sin.device)
        self._window = Window(spec.window, spec.is_chunked)

    def attend(
        self,
        step: Step,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        spec, cache, space, buffers = self._spec, self._cache, self._workspace, step.buffers
        place, t, pdl, decode = cache.places[layer], qkv.shape[0], mode_for(qkv.shape[0]), space.decode
        k, v = cache.k[place.tensor], cache.v[place.tensor]
        k_scale, v_scale = cache.scale_tensors.get(layer, NO_SCALES)
        mapping = buffers.slot_mapping[place.group, :t]
        cos_sin, rope, interleaved = self._cos_sin, None, self._interleaved
        shape = self._shape if sinks is None else self._shape._replace(sinks=sinks)
        # one row, or QK-norm, is faster with rotation and KV write in a kernel of their own (benchmarks/LOG.md)
        is_plain = q_norm is None and self._q_scales is None and spec.shares is None
        if decode and not space.has_prefill and t > 1 and is_plain and can_fuse(decode.workspace, cos_sin, interleaved):
            rope = Rope(qkv, cos_sin, mapping, buffers.rotary[0, :t] if self._axes is not None else None)
        else:
            eps = spec.qk_norm_eps or 0.0
            positions = buffers.positions[:t] if self._axes is None else buffers.rotary[:, :t]
            tensors = (qkv, positions, cos_sin, mapping, k, v)
            norms = (q_norm, k_norm, eps, k_scale, v_scale)
            how: dict[str, Any] = {
                "interleaved": interleaved,
                "weighs": spec.qk_norm_weighs,
                "axes": self._axes,
                "q_scales": self._q_scales,
            }
            rope_kv(*tensors, spec.num_heads, *norms, **how, pdl=pdl)
        q = qkv[:, : spec.q_size].unflatten(1, (spec.num_heads, spec.head_dim))
        out = torch.empty(t, spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
        arguments = (q, k, v, step.block_table[place.group], step.rows, *step.lengths, out)
        if decode:
            decode_attention(
                *arguments,
                scale=spec.scale,
                workspace=decode.workspace,
                schedule=decode.schedules[self._window],
                shape=shape,
                k_scale=k_scale,
                v_scale=v_scale,
                rope=rope,
                dependent_launch=pdl,
            )
        if space.has_prefill:
            prefill_attention(
                *arguments,
                scale=spec.scale,
                workspace=space.prefill,
                window=spec.window,
                is_chunked=spec.is_chunked,
                shape=shape,
                k_scale=k_scale,
                v_scale=v_scale,
                last_visible=step.last_visible if spec.sees_ahead else None,
            )
        return out.view(t, -1)
