"""Programmatic dependent launch (Hopper): a kernel begins while the one before it ends, and waits there for its results.

    PLAIN   an ordinary launch: all kernels before it are complete
    LATE    wait for the kernel before, then let the next one begin
    EARLY   let the next one begin, then wait: kernels of a chain queue up, each with its weights being loaded

EARLY is for chains of kernels of many small programs, i.e. steps of one row: 0.6B 0.65 ms, LATE 0.72, PLAIN 0.89. Programs that
fill an SM would crowd, two and three together, onto the first SMs to come free, while others idle (8B, 4 rows: 5.8 ms; LATE
4.3, PLAIN 4.5).

Data that a kernel reads before `wait_for_previous` must be constant (weights), or written before the chain's last PLAIN launch.
All programs of every kernel must wait, since a kernel is complete only after those it waited for; none may store before.
"""

import functools

import torch
import triton
import triton.language as tl

from quire.kernels.triton_support import hopper
from quire.kernels.tuning.current import cached, current

PLAIN, LATE, EARLY = 0, 1, 2


@functools.cache
def supported() -> bool:
    """Whether the GPU supports dependent launches: from Hopper on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def late() -> int:
    """LATE if the GPU supports it: for a kernel that follows others in any step."""
    return LATE if supported() else PLAIN


@cached
def _max_rows() -> int:
    """With more rows cuBLAS kernels are in the chain, launched plainly, and little can be gained."""
    if not supported():
        return 0
    streams = hopper.available(torch.device("cuda", torch.cuda.current_device()))
    return hopper.max_rows() if streams else current().step.dependent_rows


def mode_for(rows: int) -> int:
    """The mode of the kernels in a step of so many rows."""
    if rows > _max_rows():
        return PLAIN
    return EARLY if rows <= current().step.early_rows else LATE


def mode_for_split_k(rows: int) -> int:
    """The mode of a norm that adds up split-K partial sums, and of adapters' kernels, which occur in any step: LATE if other
    kernels are PLAIN."""
    return max(late(), mode_for(rows))


@triton.jit
def wait_for_previous(MODE: tl.constexpr):
    """For kernels beside which the next one may begin at any time, since the grid or its programs are small."""
    if MODE == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if MODE > 0:
        tl.extra.cuda.gdc_wait()
    if MODE == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(lines):
    """Prefetch the 128 bytes at each of these addresses into L2: for constants, before `wait_for_previous`."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


def launch_options(mode: int) -> dict[str, bool]:
    """Options that a kernel's launch needs for this mode."""
    return {"launch_pdl": True} if mode else {}
