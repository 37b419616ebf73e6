"""Boxes of a matrix copied to shared memory by Hopper's Tensor Memory Accelerator: what our Gluon kernels share."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy = tma.async_copy_global_to_shared


def lines(tensor: torch.Tensor, count: int, width: int, stride: int, box: tuple[int, int]) -> TensorDescriptor:
    """A 16- or 8-bit tensor as `count` lines of `width` elements, `stride` apart, to be copied in boxes; outside are zeros."""
    size = tensor.element_size()
    layout = gl.NVMMASharedLayout(min(128, size * box[1]), 8 * size)
    return TensorDescriptor(tensor, [count, width], [stride, 1], list(box), layout)
