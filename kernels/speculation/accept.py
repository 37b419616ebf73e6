"""Which samples of a step with windows count: a draft counts while it equals the token sampled at its place.

The first sample that differs counts, too, and the others of the row become REJECTED. So does a sample behind an accepted draft
that is no token: the row's next step meets its place first. `accept_cpu` is the reference. Moves 8 bytes a sample.
"""

import torch
import triton
import triton.language as tl

import quire.ipc.step.sections as sections
from quire.kernels.step.tables import StepBuffers

MAX_WINDOW, REJECTED = tl.constexpr(sections.MAX_WINDOW), tl.constexpr(sections.REJECTED)
NO_TOKEN = tl.constexpr(sections.NO_TOKEN)

ROWS = 16  # of a program


@triton.jit(do_not_specialize=["num_rows", "num_samples"])  # one compilation for all padded sizes
def _accept_kernel(
    num_decode_rows, num_rows_ptr, query_start, samples, input_ids, sampled, accepted, num_rows, num_samples,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    decode = row < tl.minimum(tl.load(num_decode_rows), num_rows)
    real = row < tl.minimum(tl.load(num_rows_ptr), num_rows)
    begin = tl.load(query_start + row, decode, other=0)
    length = tl.load(query_start + row + 1, decode, other=0) - begin
    place = tl.arange(0, MAX_WINDOW)[None, :]
    at = begin[:, None] + place
    is_place = decode[:, None] & (place < length[:, None]) & (at < num_samples)
    behind = is_place & (place > 0)
    draft = tl.load(input_ids + at, behind, other=0)
    before = tl.load(sampled + at - 1, behind, other=0)
    own = tl.load(sampled + at, behind, other=0)
    ends = (is_place == 0) | (behind & ((draft != before) | (own == NO_TOKEN)))
    counts = tl.min(tl.where(ends, place, MAX_WINDOW), 1)
    counts = tl.where(tl.load(samples + row, real, other=0) == 1, tl.where(decode, counts, 1), 0)
    tl.store(accepted + row, counts, row < num_rows)
    tl.debug_barrier()  # every thread must have read the samples before one writes
    tl.store(sampled + at, tl.full([ROWS, MAX_WINDOW], REJECTED, tl.int32), is_place & (place >= counts[:, None]))


def accept(step: StepBuffers, sampled: torch.Tensor, num_rows: int) -> None:
    """Write step.accepted [num_rows], and REJECTED over the samples that do not count; sampled int32 [num_rows] or more.

    See `accept_cpu.accept`.
    """
    if sampled.dtype != torch.int32 or not 0 < num_rows <= min(len(sampled), len(step.accepted)):
        raise ValueError(f"accept: {num_rows} rows do not fit sampled {sampled.dtype} {tuple(sampled.shape)}")
    _accept_kernel[(triton.cdiv(num_rows, ROWS),)](
        step.num_decode_rows, step.num_rows, step.query_start, step.samples, step.input_ids, sampled, step.accepted, num_rows,
        len(sampled), ROWS, num_warps=1,
    )  # fmt: skip
