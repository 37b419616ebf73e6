"""Attention of a layer of transformers: its attention module's call becomes one call of ours (Attend).

Queries and keys are rotated already, unless the rotation was recognized and left to us (rotary.py). If values and keys differ
in size, the smaller is padded with zeros, which add nothing to products; the padding's columns of the output are cut off.
"""

from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from quire.workers.models.config import AttentionSpec
from quire.workers.models.step_context import Attend
from quire.workers.models.transformers.recorder import AttentionCall


def spec_of(call: AttentionCall) -> AttentionSpec:
    """The spec of a recorded call, for the kernels and the cache."""
    rope, head_dim = call.rope, max(call.qk_dim, call.v_dim)
    if rope is not None and not rope.rotary_dim and call.qk_dim < head_dim:
        rope = msgspec.structs.replace(rope, rotary_dim=call.qk_dim)
    return AttentionSpec(
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=head_dim,
        scale=call.scale,
        window=call.window,
        rope=rope,
        softcap=call.softcap,
        has_sinks=call.has_sinks,
    )


class Step:
    """The attention of the current step, which all layers share."""

    attend: Attend


class LayerAttention:
    """The attribute interface.ATTENTION of an attention module: computes its attention by ours."""

    def __init__(self, layer: int, call: AttentionCall, step: Step):
        self._layer, self._step = layer, step
        self._head_dim, self._v_dim = max(call.qk_dim, call.v_dim), call.v_dim
        self._out = call.num_heads, self._head_dim
        self._qk_pads = call.qk_dim < self._head_dim

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if self._qk_pads:
            query, key = self._padded(query), self._padded(key)
        qkv = _side_by_side(query, key, value)
        if qkv is None:
            qkv = torch.cat([_rows(x, value.dtype) for x in (query, key, self._padded(value))], 1)
        if s_aux is None:
            out = self._step.attend(self._layer, qkv, None, None)
        else:
            out = self._step.attend(self._layer, qkv, None, None, s_aux.flatten())
        return out.view(1, -1, *self._out)[..., : self._v_dim]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = self._head_dim - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x


def _side_by_side(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """[T, (Hq + 2 Hkv) D], if the three are its columns in memory: the unchanged result of a joined product; else None."""
    _, heads, tokens, head_dim = query.shape
    q_size, kv_size = heads * head_dim, key.shape[1] * head_dim
    row, first = q_size + 2 * kv_size, query.storage_offset()
    places = ((query, first), (key, first + q_size), (value, first + q_size + kv_size))
    storage = query.untyped_storage()._cdata
    for x, offset in places:
        if (
            x.storage_offset() != offset
            or x.shape[3] != head_dim
            or x.stride(3) != 1
            or (x.shape[1] > 1 and x.stride(1) != head_dim)
            or (tokens > 1 and x.stride(2) != row)
            or x.untyped_storage()._cdata != storage
        ):
            return None
    return query.as_strided((tokens, row), (row, 1), first)


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, heads, T, D] -> [T, heads · D], a view if the memory layout allows it."""
    return x[0].transpose(0, 1).flatten(1).to(dtype)
