"""Attention over packed rows on the CPU: as varlen_reference, with rows of one length in one call of torch's attention.

Scores with a bias are computed for some queries at a time, so that memory stays bounded for rows of any length. With a window,
a slice of queries sees only the keys that one of them sees.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.attention.score_shape import PLAIN_SCORES, ScoreShape
from quire.kernels.attention.varlen_reference import ALL, Reach, relative_bias, visible

_QUERY_SLICE = 256


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    scale: float,
    reach: Reach = ALL,
    shape: ScoreShape = PLAIN_SCORES,
    relative: torch.Tensor | None = None,
    seen: Sequence[int] | None = None,
) -> torch.Tensor:
    """q [T, Hq, D], k, v [T, Hkv, D], any strides -> [T, Hq, D]; zeros for tokens after the last row.

    seen: the end of the keys that a row's queries see, by row; None: the row's own. A query that sees none has NaN."""
    out = None
    for rows, length, keys in _by_length(cu_seqlens, seen):
        own = (_gathered(q, rows, length), _gathered(k, rows, length)[:, :, :keys], _gathered(v, rows, length)[:, :, :keys])
        result = _attend(*own, scale, reach, shape, relative).transpose(1, 2)  # [n, L, Hq, D], mostly dense
        if len(rows) * length == len(q):
            return result.reshape(q.shape)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
        if _are_consecutive(rows, length):
            out[rows[0] : rows[0] + len(rows) * length].unflatten(0, (len(rows), length)).copy_(result)
            continue
        for row, begin in zip(result, rows, strict=True):
            out[begin : begin + length] = row
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    out[cu_seqlens[-1] :] = 0
    return out


def _by_length(cu_seqlens: Sequence[int], seen: Sequence[int] | None) -> Iterable[tuple[list[int], int, int]]:
    """(first tokens of the rows, their length, how many of their keys are seen), for each length and number that there is."""
    found: dict[tuple[int, int], list[int]] = {}
    for (begin, end), last in zip(pairwise(cu_seqlens), seen or cu_seqlens[1:], strict=True):
        if end > begin:
            found.setdefault((end - begin, last - begin), []).append(begin)
    return ((rows, *lengths) for lengths, rows in found.items())


def _are_consecutive(rows: list[int], length: int) -> bool:
    return rows[-1] - rows[0] == (len(rows) - 1) * length


def _gathered(x: torch.Tensor, rows: list[int], length: int) -> torch.Tensor:
    """[n, H, L, D] of the rows; a view if they follow one another."""
    if _are_consecutive(rows, length):
        return x[rows[0] : rows[0] + len(rows) * length].unflatten(0, (len(rows), length)).transpose(1, 2)
    return torch.stack([x[begin : begin + length] for begin in rows]).transpose(1, 2)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    reach: Reach,
    shape: ScoreShape,
    relative: torch.Tensor | None,
) -> torch.Tensor:
    length, num_keys, is_grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    sees_all = all(far is None or far >= length - 1 for far in reach)
    if sees_all and shape.is_plain and relative is None:
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=is_grouped)
    parts = []
    for query in range(0, length, _QUERY_SLICE):
        stop = min(query + _QUERY_SLICE, length)
        first = 0 if reach.before is None else min(max(query - reach.before, 0), num_keys - 1)
        end = num_keys if reach.after is None else min(stop + reach.after, num_keys)
        some = q[:, :, query:stop], k[:, :, first:end], v[:, :, first:end]
        distances = torch.arange(first, end)[None, :] - torch.arange(query, stop)[:, None]
        bias = _bias(distances, reach, shape, relative)
        if shape.softcap:
            parts.append(_capped(*some, bias, scale, shape.softcap))
        else:
            mask = bias.to(q.dtype)
            parts.append(scaled_dot_product_attention(*some, attn_mask=mask, scale=scale, enable_gqa=is_grouped))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _bias(distances: torch.Tensor, reach: Reach, shape: ScoreShape, relative: torch.Tensor | None) -> torch.Tensor:
    """The sum of all biases of scores at these distances: float32 [1 or Hq, Q, L], -inf where a query does not see a key."""
    bias = torch.zeros(1, *distances.shape)
    if shape.slopes is not None:
        bias = bias - shape.slopes.float()[:, None, None] * distances.abs() * shape.alibi_scale
    if relative is not None:
        bias = bias + relative_bias(relative, distances)
    return bias.masked_fill(~visible(distances, reach), float("-inf"))


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.matmul(q, keys.transpose(2, 3)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    return torch.matmul(torch.softmax(scores + bias, -1).to(v.dtype), values)
