"""Attention of a step without a cache: packed rows of whole texts whose tokens see both ways. Encoders begin it once a step.

It is called by blocks as `step_context.Attend`, like attention over the cache (attention.py). The kernels are
kernels/attention/varlen on a GPU and varlen_cpu elsewhere; q and k are normed and rotated before, in place on a GPU: rope_kv
writes keys and values to a cache, and the cache that it is given is the product itself.
"""

from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.attention.kv_entries_cpu import as_numpy
from quire.kernels.attention.rope_kv_cpu import Rotations, Writes, head_weights, rope_kv, rotations
from quire.kernels.attention.score_shape import ScoreShape
from quire.kernels.attention.varlen_cpu import varlen_attention as attend_on_cpu
from quire.kernels.attention.varlen_reference import Reach, row_spans
from quire.workers.attention.attention import score_shape
from quire.workers.attention.latent import Latents
from quire.workers.attention.rope import cos_sin_table
from quire.workers.models.config import AttentionSpec, RopeConfig


class Seen(NamedTuple):
    """The ends of the keys that rows see: none of a row's tokens sees those behind."""

    rows: list[int]  # by row
    tokens: torch.Tensor  # the same by token, int32 [T]

    @classmethod
    def of(cls, ends: np.ndarray, lengths: np.ndarray, device: torch.device) -> "Seen":
        return cls(ends.tolist(), torch.from_numpy(np.repeat(ends, lengths).astype(np.int32)).to(device))


_Rotary = tuple[RopeConfig | None, int]


def reach_of(spec: AttentionSpec) -> Reach:
    """How far the queries of a layer see."""
    before = spec.window - 1 if spec.window else None
    return Reach(before, 0 if spec.is_causal else before)


def _heads(spec: AttentionSpec, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D], views of the product."""
    q, k, v = qkv.unflatten(1, (-1, spec.head_dim)).split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    return q, k, v


class PackedAttention:
    """Attention of all layers of an encoder. specs: of each layer, with the heads of this rank."""

    def __init__(self, specs: list[AttentionSpec], max_positions: int, device: torch.device):
        self._specs = specs
        self._shapes: dict[AttentionSpec, ScoreShape] = {spec: score_shape(spec, device) for spec in specs}
        self._tables: dict[_Rotary, torch.Tensor] = {}
        for spec in specs:
            if (spec.rope, spec.head_dim) not in self._tables:
                self._tables[spec.rope, spec.head_dim] = cos_sin_table(spec, max_positions, device)
        self._relative: torch.Tensor | None = None

    def begin(
        self,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        relative: torch.Tensor | None = None,
        seen: Seen | None = None,
    ) -> None:
        """A step of rows cu_seqlens int32 [R + 1] whose tokens are at positions int32 [T] of their texts.

        relative float32 [Hq, 2 n + 1]: biases by distance, if the model has them (kernels/attention/varlen.py).
        """
        self._positions, self._relative = positions, relative
        if positions.is_cuda:
            self._begin_kernels(cu_seqlens, seen)
            return
        self._seen = None if seen is None else seen.rows
        self._bounds: list[int] = cu_seqlens.tolist()
        at = positions.numpy()
        self._turned: dict[tuple[_Rotary, bool], Rotations] = {}
        for spec in self._specs:
            is_interleaved = spec.rope is not None and spec.rope.interleaved
            key = (spec.rope, spec.head_dim), is_interleaved
            if key not in self._turned:
                self._turned[key] = rotations(self._tables[key[0]], at, is_interleaved)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor | Latents,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]."""
        assert isinstance(qkv, torch.Tensor) and sinks is None, "no encoder has latent attention or sinks"
        spec = self._specs[layer]
        if qkv.is_cuda:
            return self._attend_kernels(spec, qkv, q_norm, k_norm)
        q, k, v = self._rotated(spec, qkv, q_norm, k_norm)
        how = {"shape": self._shapes[spec], "relative": self._relative, "seen": self._seen}
        out = attend_on_cpu(q, k, v, self._bounds, scale=spec.scale, reach=reach_of(spec), **how)  # type: ignore[arg-type]
        return out.flatten(1)

    def _begin_kernels(self, cu_seqlens: torch.Tensor, seen: Seen | None = None) -> None:
        positions = self._positions
        firsts, ends = row_spans(cu_seqlens, len(positions))
        self._spans = firsts, ends if seen is None else seen.tokens
        self._slots = torch.arange(len(positions), dtype=torch.int64, device=positions.device)

    def _attend_kernels(
        self, spec: AttentionSpec, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        from quire.kernels.attention.varlen import varlen_attention  # imports Triton, which a CPU may not have

        if spec.rope is not None or q_norm is not None:
            self._rotate_in_place(spec, qkv, q_norm, k_norm)
        q, k, v = _heads(spec, qkv)
        shape, relative = self._shapes[spec], self._relative
        out = varlen_attention(q, k, v, *self._spans, scale=spec.scale, reach=reach_of(spec), shape=shape, relative=relative)
        return out.flatten(1)

    def _rotate_in_place(
        self, spec: AttentionSpec, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> None:
        from quire.kernels.attention.rope_kv import rope_kv as rope_kv_on_gpu

        blocks = qkv.view(len(qkv), -1, 1, spec.head_dim)  # a cache of blocks of one token
        k_end = spec.num_heads + spec.num_kv_heads
        rope_kv_on_gpu(
            qkv,
            self._positions,
            self._tables[spec.rope, spec.head_dim],
            self._slots,
            blocks[:, spec.num_heads : k_end],
            blocks[:, k_end:],
            spec.num_heads,
            q_norm,
            k_norm,
            spec.qk_norm_eps or 0.0,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            weighs=spec.qk_norm_weighs,
        )

    def _rotated(
        self, spec: AttentionSpec, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v with q and k normed and rotated; the product is left as it is."""
        if spec.rope is None and q_norm is None:
            return _heads(spec, qkv)
        turned = self._turned[(spec.rope, spec.head_dim), spec.rope is not None and spec.rope.interleaved]
        kv_shape = len(qkv), spec.num_kv_heads, spec.head_dim
        k = torch.empty(kv_shape, dtype=qkv.dtype)
        entries = as_numpy(k.view(-1, spec.head_dim))
        writes = Writes(np.arange(len(entries)).reshape(kv_shape[:2]), None)
        weights = None
        if q_norm is not None and k_norm is not None:
            weights = head_weights(q_norm, k_norm, spec.num_heads, spec.num_kv_heads)
        eps, v = spec.qk_norm_eps or 0.0, qkv[:, -spec.kv_size :].unflatten(1, kv_shape[1:])
        return rope_kv(qkv, turned, writes, entries, None, spec.num_heads, weights, eps, None, spec.qk_norm_weighs), k, v
