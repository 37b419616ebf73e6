"""Gives memory back while weights are loaded on a CPU: pages of mapped files, and what malloc keeps of freed temporaries.

A page of a mapped file counts as resident from its first reader on, and in a cgroup it counts towards the limit. So a
tensor's pages are let go once its owner has what it needs; a later reader would find them in the file again. Called by
weights.py.
"""

import ctypes
import mmap

import torch

_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


def forget(tensor: torch.Tensor) -> None:
    """Let go of the whole pages of a contiguous tensor in a mapped file. Its values must not be needed any more."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
