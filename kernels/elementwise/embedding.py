"""Rows of an embedding table: out[t] = scale * weight[ids[t]], computed in float32.

ids int32 [T], clamped to the table; weight [V, H] with unit stride in H, out [T, H], one dtype of any kind. Moves 2 * T * H
elements. A program copies BLOCK elements of one row. torch.nn.functional.embedding is the reference; its kernel for few rows
takes 2 us at 1 and 9 us at 16 rows of 4096, where this one takes as long as a launch. A plain launch: at the start of a step's
chain of dependent launches, it ensures that the step's inputs are complete for all of them (`dependent_launch`).
"""

import torch
import triton
import triton.language as tl

from quire.kernels.tuning.current import current


@triton.jit
def _embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, weight_stride, vocab, scale, H: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.minimum(tl.maximum(tl.load(ids_ptr + token), 0), vocab - 1).to(tl.int64)
    values = tl.load(weight_ptr + row * weight_stride + cols, cols < H)
    if SCALED:
        values = (values.to(tl.float32) * scale).to(values.dtype)
    tl.store(out_ptr + token * H + cols, values, cols < H)


def embedding(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The rows of weight [V, H] at ids int32 [T], times `scale`; [T, H]."""
    if ids.dim() != 1 or ids.dtype != torch.int32 or ids.stride() != (1,) or weight.dim() != 2 or weight.stride(1) != 1:
        raise ValueError(f"embedding: ids {ids.dtype} {ids.shape}, weight {weight.shape} of strides {weight.stride()}")
    tokens, (vocab, hidden) = len(ids), weight.shape
    out = weight.new_empty((tokens, hidden))
    if tokens:
        block = min(triton.next_power_of_2(hidden), current().elementwise.embedding_block)
        warps = max(1, min(block // 256, 8))
        _embedding_kernel[(tokens, triton.cdiv(hidden, block))](
            ids, weight, out, weight.stride(0), vocab, scale, hidden, block, scale != 1.0, num_warps=warps
        )
    return out
