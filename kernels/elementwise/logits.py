"""The change that some models make to their logits: softcap * tanh(scale * x / softcap), or scale * x, in place.

logits [R, V] with unit stride in V and any row stride, of any float dtype; math in float32. Moves 2 * R * V elements. A plain
launch. The reference is `ops.shape_logits` on a CPU.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _shape_kernel(x_ptr, stride, width, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + tl.program_id(0).to(tl.int64) * stride + cols
    x = tl.load(at, cols < width, other=0.0)
    y = x.to(tl.float32) * scale
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        y = softcap * (1.0 - 2.0 / (tl.exp(y * (2.0 / softcap)) + 1.0))
    tl.store(at, y.to(x.dtype), cols < width)


def shape_logits(logits: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """The same tensor, changed in place. softcap 0: none."""
    rows, width = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("shape_logits: the last dimension must have stride 1")
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _shape_kernel[grid](logits, logits.stride(0), width, scale, softcap, softcap > 0.0, BLOCK, num_warps=8)
    return logits
