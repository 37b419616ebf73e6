"""Tensors before which no memory can be read: a kernel in Triton's interpreter that reads there ends the process."""

import ctypes
import mmap

import torch


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor at the begin of a page, behind a page without access."""
    size = tensor.numel() * tensor.element_size()
    memory = mmap.mmap(-1, mmap.PAGESIZE + size)
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) != 0:
        raise OSError(ctypes.get_errno(), "a page cannot be protected")
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=mmap.PAGESIZE).view(tensor.shape)
    return copy.copy_(tensor)
