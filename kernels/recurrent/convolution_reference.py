"""Causal convolution in plain torch: the oracle of `convolution`, token by token, with the same signature.

    y[t, c] = silu(bias[c] + Σ_i weight[i, c] · x[t - W + 1 + i, c]),    i from 0 to W - 1, in float32

x before a row's first token is the tail in its state, the last W - 1 inputs, or zeros. With gates, the inputs are before · x,
which the tails keep, and y is after · the sum, without silu; all three are rounded to x's dtype.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from quire.kernels.recurrent.rows import Rows


class Gates(NamedTuple):
    """Factors of a convolution's inputs and outputs, [T, C] each."""

    before: torch.Tensor
    after: torch.Tensor


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: Rows,
    gates: Gates | None = None,
) -> torch.Tensor:
    """x [T, C], weight [W, C], bias [C] -> y [T, C]; tails [N, W - 1, C] of all states are read and written."""
    x = x if gates is None else x * gates.before
    y, starts = torch.zeros(x.shape, dtype=x.dtype), rows.query_start.tolist()
    for row in range(len(rows.own)):
        is_decode = row < int(rows.decode_limit[0])
        own, last = int(rows.own[row]), 0 if is_decode else int(rows.last[row])
        first = own if is_decode else int(rows.first[row])
        if starts[row] == starts[row + 1]:
            continue
        tail = tails[first].clone() if first else torch.zeros_like(tails[0])
        for t in range(starts[row], starts[row + 1]):
            window = torch.cat((tail, x[t : t + 1]))
            sums = (window.float() * weight.float()).sum(0)
            sums = sums if bias is None else sums + bias.float()
            y[t] = F.silu(sums).to(x.dtype) if gates is None else sums.to(x.dtype) * gates.after[t]
            tail = window[1:]
        tails[own] = tail
        if last:
            tails[last] = tail
    return y
