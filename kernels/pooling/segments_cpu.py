"""Sums and maxima of rows' tokens in plain torch: the CPU path and the oracle of `segments`, with the same signature."""

from typing import Literal

import torch

How = Literal["sum", "weighted", "max"]


def segments(x: torch.Tensor, firsts: torch.Tensor, ends: torch.Tensor, origins: torch.Tensor, how: How) -> torch.Tensor:
    """float32 [R, H] of x [T, H] over tokens [firsts, ends) of each row. See `segments.segments`."""
    out = torch.empty(len(firsts), x.shape[1], dtype=torch.float32, device=x.device)
    for row, (first, end, origin) in enumerate(zip(firsts.tolist(), ends.tolist(), origins.tolist(), strict=True)):
        tokens = x[first:end].float()
        if how == "weighted":
            tokens = tokens * torch.arange(first - origin + 1, end - origin + 1, dtype=torch.float32)[:, None]
        if how == "max":
            out[row] = tokens.amax(0) if end > first else float("-inf")
        else:
            out[row] = tokens.sum(0)
    return out
