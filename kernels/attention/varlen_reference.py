"""Attention over packed rows in plain torch: the oracle of `varlen` and `varlen_cpu`, row by row, in float32.

The formula is in varlen.py. `Reach` and `row_spans`, which all of them use, are here, too.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from quire.kernels.attention.score_shape import PLAIN_SCORES, ScoreShape


class Reach(NamedTuple):
    """How far a query sees within its row: so many keys before it and after it, besides its own. None: all of them.

    `after` 0 is causal attention; a window of w tokens, the token itself included, is `before` w - 1.
    """

    before: int | None = None
    after: int | None = None


ALL = Reach()


def row_spans(cu_seqlens: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, end) of the row of each of num_tokens tokens, int32 [T] each, from cu_seqlens int32 [R + 1].

    Tokens after the last row are padding: their row is empty. Nothing waits for the device.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    after = torch.searchsorted(cu_seqlens, tokens, right=True)  # the number of the row's end among the bounds
    last = len(cu_seqlens) - 1
    is_padding = after > last
    ends = cu_seqlens[after.clamp(max=last)]
    firsts = torch.where(is_padding, ends, cu_seqlens[(after - 1).clamp(0, last)])
    return firsts.to(torch.int32), ends.to(torch.int32)


def relative_bias(relative: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """Biases [Hq, *distances] by distance, key - query; relative [Hq, 2 n + 1] is of distances -n to n, which clamp there."""
    most = relative.shape[1] // 2
    return relative[:, distances.clamp(-most, most) + most]


def visible(distances: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Whether a query sees keys at these distances, key - query."""
    seen = torch.ones_like(distances, dtype=torch.bool)
    if reach.before is not None:
        seen &= distances >= -reach.before
    if reach.after is not None:
        seen &= distances <= reach.after
    return seen


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: list[int],
    *,
    scale: float,
    reach: Reach = ALL,
    shape: ScoreShape = PLAIN_SCORES,
    relative: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, Hq, D], k, v [T, Hkv, D] -> [T, Hq, D]; zeros for tokens after the last row. relative: see `relative_bias`."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for begin, end in pairwise(cu_seqlens):
        own = slice(begin, end)
        keys, values = (x[own].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own].float(), keys) * scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        places = torch.arange(end - begin, device=q.device)
        distances = places[None, :] - places[:, None]
        if shape.slopes is not None:
            scores -= shape.slopes.float()[:, None, None] * distances.abs() * shape.alibi_scale
        if relative is not None:
            scores += relative_bias(relative.float(), distances)
        scores = scores.masked_fill(~visible(distances, reach), float("-inf"))
        out[own] = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values).to(q.dtype)
    return out
