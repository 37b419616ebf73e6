"""Boxes of a matrix copied to shared memory by Hopper's Tensor Memory Accelerator: shared by our Gluon kernels."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy = tma.async_copy_global_to_shared


@gluon.jit
def copy_tile(w_desc, buffer, ready, tile, k, N, ROWS: gl.constexpr, GATED: gl.constexpr):
    """Start the copy of a tile of W from column k on: ROWS of its rows, or half as many of the gate's with up's below."""
    HALF: gl.constexpr = ROWS // 2
    if GATED:
        copy(w_desc, [tile * HALF, k], ready, buffer.slice(0, HALF))
        copy(w_desc, [N + tile * HALF, k], ready, buffer.slice(HALF, HALF))
    else:
        copy(w_desc, [tile * ROWS, k], ready, buffer)


def lines(tensor: torch.Tensor, count: int, width: int, stride: int, box: tuple[int, int]) -> TensorDescriptor:
    """A 16- or 8-bit tensor as `count` lines of `width` elements, `stride` apart, to be copied in boxes; outside are zeros."""
    size = tensor.element_size()
    layout = gl.NVMMASharedLayout(min(128, size * box[1]), 8 * size)
    return TensorDescriptor(tensor, [count, width], [stride, 1], list(box), layout)


def tiles(tensor: torch.Tensor, width: int, rows: int) -> TensorDescriptor:
    """An 8-bit matrix [n, k] as n / width tiles [width, k], to be copied in boxes of `rows` lines: lines below a tile are 0."""
    (n, k), stride = tensor.shape, tensor.stride(0)
    layout = gl.NVMMASharedLayout(128, 8, rank=3)
    return TensorDescriptor(tensor, [n // width, width, k], [width * stride, stride, 1], [1, rows, 128], layout)
