"""Whether the kernels written for Hopper in Gluon can be used here: `linear_hopper`, `prefill_hopper` and others.

Gluon is an experimental part of Triton, and its names change. With Triton versions other than those below, the portable kernels
are used, and a line in the log says so. Does not import Gluon itself.
"""

import functools
import logging

import torch
import triton

from quire.kernels.tuning.current import linear_tuning

log = logging.getLogger("quire.kernels")

# 3.6 has run the kernels, 3.7 compiles them (tests/kernels/test_gluon.py), 3.9 has renamed functions that they call.
FIRST_TRITON, END_TRITON = (3, 6), (3, 8)
SHARED_BYTES = 227 * 1024  # limit of a program on a Hopper
MAX_ROWS = 64  # limit of linear_hopper; if it pays only for fewer, the tuning table says so


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the GPU is a Hopper and Triton's version is known."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if is_known_triton():
        return True
    log.warning(
        "Triton %s is not known to the kernels written for this GPU: slower, portable ones are used", triton.__version__
    )
    return False


def is_known_triton() -> bool:
    """Whether we know the internals of this version of Triton."""
    return FIRST_TRITON <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < END_TRITON


def max_rows() -> int:
    """Rows of the largest step in which linear_hopper computes the linear layers."""
    return min(MAX_ROWS, linear_tuning().stream.max_rows)


def supports_linear(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear_hopper` can compute x @ weight^T: 2 to 64 rows, 16-bit, as TMA needs them; x [M, K], weight [N, K]."""
    if not 2 <= x.shape[0] <= max_rows() or x.dtype.itemsize != 2 or x.dtype != weight.dtype or not available(x.device):
        return False
    return can_copy(x) and can_copy(weight)


def can_copy(lines: torch.Tensor) -> bool:
    """Whether TMA can copy boxes of `lines` [n, k]: elements side by side, lines 16 bytes or a multiple apart."""
    unit = 16 // lines.element_size()
    return lines.stride(-1) == 1 and lines.stride(0) % unit == 0 and lines.data_ptr() % 16 == 0


def block_rows(rows: int) -> int:
    """Rows that kernels for few rows pad to: at least what tensor cores take at once, and a power of two."""
    return max(16, triton.next_power_of_2(rows))


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have on this GPU, a Hopper or not."""
    if device.type != "cuda":
        return SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@functools.cache
def num_sms(device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
