"""QK-norm, rotary embedding and KV write on the CPU: as rope_kv_reference, but work that layers share is done once.

Once a step: `rotations`, and the cache entries to write (kv_entries_cpu.token_entries). A layer then rotates q and k together,
(x1, x2) -> (x1, x2) * (cos, cos) + (x2, x1) * (-sin, sin), and makes two writes. numpy's calls cost half of torch's: one token
of 4 + 2 heads of 64 takes 7 us, rope_kv_reference 47. In a long prefill this is 1% of one core's time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.attention.kv_entries_cpu import as_numpy
from quire.kernels.elementwise import norm_cpu
from quire.kernels.elementwise.norm_reference import Weighs


class Rotations(NamedTuple):
    """Factors for a step's tokens, float32 [T, 1, R] each, for the first R elements of a head; R 0: nothing is rotated."""

    cos: np.ndarray  # cos | cos
    sin: np.ndarray  # -sin | sin
    interleaved: bool = False  # then both are laid out by pairs: cos0 cos0 cos1 cos1 ...


class Writes(NamedTuple):
    """The cache entries that a step's keys and values are written to."""

    entries: np.ndarray  # int64 [N, Hkv], indices of cache entries
    tokens: np.ndarray | None  # int64 [N], which tokens are written; None: all


class EightBits(NamedTuple):
    """For a cache of 8-bit floats, which holds k / k_scale and v / v_scale."""

    dtype: torch.dtype
    k_scale: float
    v_scale: float


def rotations(cos_sin: torch.Tensor, positions: np.ndarray, interleaved: bool = False, axes: Sequence[int] = ()) -> Rotations:
    """The rotations for positions int [T], from the table cos_sin float32 [P, R] = cos | sin.

    axes: the axis of each pair's position; then positions are int [axes, T]."""
    rows = cos_sin.numpy()[positions] if not axes else cos_sin.numpy()[positions[[*axes, *axes]].T, np.arange(2 * len(axes))]
    half = rows.shape[1] // 2
    both = np.empty((2, len(rows), 1, 2 * half), np.float32)
    both[0, :, 0, :half] = both[0, :, 0, half:] = rows[:, :half]
    both[1, :, 0, half:] = rows[:, half:]
    np.negative(rows[:, half:], out=both[1, :, 0, :half])
    if interleaved:
        both = both.reshape(2, len(rows), 1, 2, half).swapaxes(3, 4).reshape(both.shape)
    return Rotations(both[0], both[1], interleaved)


def head_weights(q_weight: torch.Tensor, k_weight: torch.Tensor, num_q_heads: int, num_kv_heads: int) -> torch.Tensor:
    """QK-norm weights [D] of queries and keys, by head: [Hq + Hkv, D]."""
    return torch.cat((q_weight.expand(num_q_heads, -1), k_weight.expand(num_kv_heads, -1)))


def rope_kv(
    qkv: torch.Tensor,
    at: Rotations,
    writes: Writes,
    k_entries: np.ndarray,
    v_entries: np.ndarray | None,
    num_q_heads: int,
    weights: torch.Tensor | None = None,
    eps: float = 1e-6,
    eight_bits: EightBits | None = None,
    weighs: Weighs = "rounded",
    q_scales: np.ndarray | None = None,
) -> torch.Tensor:
    """Write k and v of qkv [T, (Hq + 2 Hkv) D] to the cache, in its dtype; returns the rotated q [T, Hq, D], strided.

    `weights` are QK-norm's by head (`head_weights`), q_scales float32 [T] multiply the tokens' queries; qkv is not modified.
    v_entries None: there is no v in qkv. In a layer that shares another's keys and values, qkv is q alone: nothing is written.
    """
    num_rotated = num_q_heads + writes.entries.shape[1]
    shape = (qkv.shape[0], -1, k_entries.shape[1])
    heads = as_numpy(qkv).reshape(shape)
    if qkv.dtype == torch.float32 and weights is None:
        x = heads[:, :num_rotated]
    else:
        wide = qkv.view(shape)[:, :num_rotated]
        x = _normed(wide, None if weights is None else weights[: wide.shape[1]], eps, weighs).float().numpy()
    rotated = _rotate(x, at)
    if q_scales is not None:
        rotated[:, :num_q_heads] *= q_scales[:, None, None]
    if qkv.dtype == torch.float32:
        q, k = torch.from_numpy(rotated[:, :num_q_heads]), rotated[:, num_q_heads:]
    else:
        narrow = torch.from_numpy(rotated).to(qkv.dtype)
        q, k = narrow[:, :num_q_heads], as_numpy(narrow)[:, num_q_heads:]
    if heads.shape[1] == num_q_heads:
        return q
    v = heads[:, num_rotated:]
    if writes.tokens is not None:
        k, v = k[writes.tokens], v[writes.tokens]
    if eight_bits is not None:
        k = to_eight_bits(k, qkv.dtype, eight_bits.dtype, eight_bits.k_scale)
        v = to_eight_bits(v, qkv.dtype, eight_bits.dtype, eight_bits.v_scale)
    k_entries[writes.entries] = k
    if v_entries is not None:
        v_entries[writes.entries] = v
    return q


def to_eight_bits(x: np.ndarray, dtype: torch.dtype, to: torch.dtype, scale: float) -> np.ndarray:
    """x, of `dtype` and as as_numpy returns it -> x / scale as 8-bit floats, which saturate."""
    top = torch.finfo(to).max
    return as_numpy((torch.from_numpy(x).view(dtype).float() / scale).clamp_(-top, top).to(to))


def _normed(x: torch.Tensor, weights: torch.Tensor | None, eps: float, weighs: Weighs) -> torch.Tensor:
    return x if weights is None else norm_cpu.rms_norm(x, weights, eps, weighs=weighs)


def _rotate(x: np.ndarray, at: Rotations) -> np.ndarray:
    """Rotate the first R elements of each head of x float32 [T, H, D]."""
    rotary = at.cos.shape[2]
    if rotary < x.shape[2]:
        whole = x.copy()
        if rotary:
            whole[..., :rotary] = _rotate(x[..., :rotary], at)
        return whole
    half = rotary // 2
    crossed = np.empty(x.shape, np.float32)
    if at.interleaved:
        crossed[..., ::2], crossed[..., 1::2] = x[..., 1::2], x[..., ::2]
    else:
        crossed[..., :half], crossed[..., half:] = x[..., half:], x[..., :half]
    crossed *= at.sin
    turned = x * at.cos
    turned += crossed
    return turned
