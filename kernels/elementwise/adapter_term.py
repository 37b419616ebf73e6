"""What LoRA adapters add to a row, B h: helpers of the kernels that compute it, of a norm (norm.py) and of kernels/lora."""

import torch
import triton
import triton.language as tl


@triton.jit
def padded(rank, RANK_STEP: tl.constexpr):
    """A rank, rounded up to RANK_STEP: up to there h and B are zero, so both are read in words of 16 bytes."""
    return tl.multiple_of((rank + RANK_STEP - 1) // RANK_STEP * RANK_STEP, RANK_STEP)


@triton.jit
def load_h(at, mask, parts_stride, PARTS: tl.constexpr):
    """h at these places, the total of its partial sums if there are several."""
    h = tl.load(at, mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        h += tl.load(at + part * parts_stride, mask, other=0.0)
    return h


def num_parts(h: torch.Tensor) -> int:
    """Partial sums of which h [T, P * R] or [S, T, P * R] consists."""
    return 1 if h.dim() == 2 else len(h)
