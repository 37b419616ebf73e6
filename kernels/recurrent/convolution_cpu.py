"""Causal convolution on the CPU: all decode rows at once, and each chunk of a prompt by as many products as the window is long.

Formula and signature: convolution_reference. A prompt is computed by chunks of 64 tokens, which have the same bits wherever its
row began.
"""

import torch
from torch.nn import functional as F

from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.windows_cpu import kept_turns, own_turns


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: Rows,
    gates: Gates | None = None,
) -> torch.Tensor:
    """x [T, C], weight [W, C], bias [C] -> y [T, C]; tails [N, W - 1, C] of all states are read and written."""
    if gates is not None:
        return _convolved_rows(x * gates.before, weight, bias, tails, rows, is_gated=True).mul_(gates.after)
    return _convolved_rows(x, weight, bias, tails, rows, is_gated=False)


def _convolved_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tails: torch.Tensor, rows: Rows, *, is_gated: bool
) -> torch.Tensor:
    """As causal_convolution, before the second gate: without silu if there is one."""
    y = torch.zeros(x.shape, dtype=x.dtype)
    if rows.windows is not None:
        _convolve_windows(x, weight, bias, tails, rows, y, is_gated)
    elif rows.has_decode:
        ids = rows.decoding()
        window = torch.cat((tails[ids], x[: len(ids), None]), 1)
        y[: len(ids)] = _convolved(window.transpose(0, 1), weight, bias, 1, is_gated)[0]
        tails[ids] = window[:, 1:]
    if rows.has_prefill:
        before = len(tails[0])
        for chunk in rows.chunks():
            tail = tails[chunk.first] if chunk.first else torch.zeros_like(tails[0])
            window = torch.cat((tail, x[chunk.start : chunk.stop]))
            for start in range(chunk.start, chunk.stop, CHUNK):
                count, at = min(CHUNK, chunk.stop - start), start - chunk.start
                y[start : start + count] = _convolved(window[at : at + before + count], weight, bias, count, is_gated)
            for state in chunk.written:
                tails[state] = window[len(window) - before :]
    return y


def _convolve_windows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: Rows,
    y: torch.Tensor,
    is_gated: bool,
) -> None:
    assert rows.windows is not None
    some, ids, kept = rows.kept_rows(), rows.decoding(), rows.windows.inputs
    taken = tails[ids]
    for turn in kept_turns(some, tails, taken):
        taken[turn.rows] = torch.cat((taken[turn.rows, 1:], kept[0][turn.at, None]), 1)
    tails[ids] = taken
    for turn in own_turns(some):
        window = torch.cat((taken[turn.rows], x[turn.at, None]), 1)
        y[turn.at] = _convolved(window.transpose(0, 1), weight, bias, 1, is_gated)[0]
        taken[turn.rows] = window[:, 1:]
    base, count = int(rows.windows.base[0]), int(rows.query_start[len(some)])
    for tensor, values in zip(kept, (x, y), strict=False):
        tensor[base : base + count] = values[:count]


def _convolved(
    window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, count: int, is_gated: bool
) -> torch.Tensor:
    """window [W - 1 + count, ..., C] -> [count, ..., C], in the window's dtype."""
    wide, weight = window.float(), weight.float()
    sums = wide[:count] * weight[0]
    for i in range(1, len(weight)):
        sums += wide[i : i + count] * weight[i]
    sums = sums if bias is None else sums.add_(bias.float())
    return (sums if is_gated else F.silu(sums)).to(window.dtype)
