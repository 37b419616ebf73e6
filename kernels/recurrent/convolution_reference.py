"""Causal convolution in plain torch: the oracle of `convolution`, token by token, with the same signature.

    y[t, c] = silu(bias[c] + Σ_i weight[i, c] · x[t - W + 1 + i, c]),    i from 0 to W - 1, in float32

x before a row's first token is the tail in its state, the last W - 1 inputs, or zeros. With gates, the inputs are before · x,
which the tails keep, and y is after · the sum, without silu; all three are rounded to x's dtype.

With windows, tails take the kept inputs that were accepted, and those of this step's decode rows are kept: x in the first
tensor, y, which the recurrence takes, in the second if there is one.
"""

from collections.abc import Callable
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

    def next_y(t: int, tail: torch.Tensor) -> torch.Tensor:
        """Write y[t]; returns the tail behind it."""
        window = torch.cat((tail, x[t : t + 1]))
        sums = (window.float() * weight.float()).sum(0)
        sums = sums if bias is None else sums + bias.float()
        y[t] = F.silu(sums).to(x.dtype) if gates is None else sums.to(x.dtype) * gates.after[t]
        return window[1:]

    if rows.windows is not None:
        _windows(x, y, tails, rows, next_y)
    for row in range(len(rows.own)):
        is_decode = row < int(rows.decode_limit[0])
        if is_decode and rows.windows is not None:
            continue
        own, last = int(rows.own[row]), 0 if is_decode else int(rows.last[row])
        first = own if is_decode else int(rows.first[row])
        if starts[row] == starts[row + 1]:
            continue
        tail = tails[first].clone() if first else torch.zeros_like(tails[0])
        for t in range(starts[row], starts[row + 1]):
            tail = next_y(t, tail)
        tails[own] = tail
        if last:
            tails[last] = tail
    return y


def _windows(
    x: torch.Tensor, y: torch.Tensor, tails: torch.Tensor, rows: Rows, next_y: Callable[[int, torch.Tensor], torch.Tensor]
) -> None:
    assert rows.windows is not None
    kept, base = rows.windows.inputs, int(rows.windows.base[0])
    for row in rows.kept_rows():
        tail = tails[row.own].clone()
        if row.leaves == 0:
            tails[row.keep_state] = tail
        for count, at in enumerate(range(row.first, row.end), 1):
            tail = torch.cat((tail[1:], kept[0][at : at + 1]))
            if count == row.leaves:
                tails[row.keep_state] = tail
        tails[row.own] = tail
        for t in range(row.start, row.stop):
            tail = next_y(t, tail)
            for tensor, values in zip(kept, (x, y), strict=False):
                tensor[base + t] = values[t]
