"""Whether what is written for Hopper in Gluon can be used here: `linear_hopper` and `prefill_hopper`.

Gluon is an experimental part of Triton whose names change. Another Triton than the ones below takes the portable kernels, and
a line in the log says so. Imports no Gluon itself.
"""

import functools
import logging

import torch
import triton

from quire.kernels.tuning.current import linear_tuning

log = logging.getLogger("quire.kernels")

# 3.6 has run them, 3.7 compiles them (tests/kernels/test_gluon.py), 3.9 has other names for what they call.
FIRST_TRITON, END_TRITON = (3, 6), (3, 8)
SHARED_BYTES = 227 * 1024  # that a program may have on a Hopper
MAX_ROWS = 64  # that linear_hopper computes; where it pays for fewer only, the tuning table says so


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the GPU is a Hopper and Triton one of those known."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if is_known_triton():
        return True
    log.warning(
        "Triton %s is not known to the kernels written for this GPU: slower, portable ones are used", triton.__version__
    )
    return False


def is_known_triton() -> bool:
    """Whether Triton's version is one whose inner parts we know."""
    return FIRST_TRITON <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < END_TRITON


def max_rows() -> int:
    """Rows of the largest step whose linear layers linear_hopper computes."""
    return min(MAX_ROWS, linear_tuning().stream.max_rows)


def supports_linear(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear_hopper` computes x @ weight^T: 2 to 64 rows, 16-bit, as TMA needs them; x [M, K], weight [N, K]."""
    if not 2 <= x.shape[0] <= max_rows() or x.dtype.itemsize != 2 or x.dtype != weight.dtype or not available(x.device):
        return False
    return can_copy(x) and can_copy(weight)


def can_copy(lines: torch.Tensor) -> bool:
    """Whether TMA can copy boxes of `lines` [n, k]: elements side by side, lines 16 bytes or a multiple apart."""
    unit = 16 // lines.element_size()
    return lines.stride(-1) == 1 and lines.stride(0) % unit == 0 and lines.data_ptr() % 16 == 0


def block_rows(rows: int) -> int:
    """What the kernels of few rows pad them to: what tensor cores take at once, and powers of two."""
    return max(16, triton.next_power_of_2(rows))


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """That a program may have on this GPU, a Hopper or not."""
    if device.type != "cuda":
        return SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@functools.cache
def num_sms(device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
