"""Which recurrent states the rows of a step read and write: from the slots of rows, and from the plan's records of chunks.

One launch after `step_inputs.prepare_step`, for models with recurrent layers only. It reads counts on the device, so a captured
launch serves every step, and clamps ids to the states that there are. `step_states_cpu` is the reference.

Where decode rows may have windows, two more launches look after the tables of what is kept of them: one clears the slots of new
sequences and says where this step keeps inputs; the other, after `accept`, notes how many of each row's were accepted.
"""

import torch
import triton
import triton.language as tl

from quire.ipc.step.sections import HEADER, PREFILL, SLOT
from quire.kernels.step.tables import KeptTables, SlotTables, StateRows, StepBuffers

H_NUM_PREFILL_ROWS, H_PREFILL_ROWS = tl.constexpr(HEADER.at["num_prefill_rows"]), tl.constexpr(HEADER.at["prefill_rows"])
SLOT_WORDS, PREFILL_WORDS = tl.constexpr(SLOT.width), tl.constexpr(PREFILL.width)
H_STEP, S_SLOT = tl.constexpr(HEADER.at["step"]), tl.constexpr(SLOT.at["slot"])
H_NUM_SLOT_UPDATES, H_SLOT_UPDATES = tl.constexpr(HEADER.at["num_slot_updates"]), tl.constexpr(HEADER.at["slot_updates"])
S_STATE = tl.constexpr(SLOT.at["state"])
P_FIRST, P_LAST = tl.constexpr(PREFILL.at["first_state"]), tl.constexpr(PREFILL.at["last_state"])

BLOCK = 128  # rows of a program


@triton.jit(do_not_specialize=["R"])  # one compilation for all padded sizes
def _states_kernel(
    plan,
    plan_len,
    slot_params,
    num_slots,
    row_slots,
    num_decode_rows,
    num_rows,
    own,
    first,
    last,
    R,
    num_states,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    decode_rows, rows = tl.load(num_decode_rows), tl.load(num_rows)
    is_used = row < tl.minimum(rows, R)
    slot = tl.minimum(tl.maximum(tl.load(row_slots + row, is_used, other=0), 0), num_slots - 1)
    state = tl.load(slot_params + slot * SLOT_WORDS + S_STATE, is_used, other=0)
    at = tl.minimum(tl.maximum(tl.load(plan + H_PREFILL_ROWS), 0), plan_len)
    chunk = row - decode_rows
    fits = (plan_len - at) // PREFILL_WORDS
    is_chunk = is_used & (chunk >= 0) & (chunk < tl.minimum(tl.load(plan + H_NUM_PREFILL_ROWS), fits))
    words = plan + at + chunk * PREFILL_WORDS
    begins = tl.where(is_chunk, tl.load(words + P_FIRST, is_chunk, other=0), state)
    leaves = tl.load(words + P_LAST, is_chunk, other=0)
    most = num_states - 1
    tl.store(own + row, tl.minimum(tl.maximum(state, 0), most), row < R)
    tl.store(first + row, tl.minimum(tl.maximum(begins, 0), most), row < R)
    tl.store(last + row, tl.minimum(tl.maximum(leaves, 0), most), row < R)


def prepare_states(plan: torch.Tensor, tables: SlotTables, step: StepBuffers, rows: StateRows, num_rows: int) -> None:
    """Write the states of a step padded to num_rows, whose inputs `prepare_step` has built, to `rows`."""
    _states_kernel[(triton.cdiv(num_rows, BLOCK),)](
        plan,
        plan.numel(),
        tables.params,
        len(tables.seq_len),
        step.row_slots,
        step.num_decode_rows,
        step.num_rows,
        rows.own,
        rows.first,
        rows.last,
        num_rows,
        rows.num_states,
        BLOCK,
    )


@triton.jit
def _begin_kernel(plan, plan_len, num_kept, keep_at, base, half, num_slots, BLOCK: tl.constexpr):
    at = tl.minimum(tl.maximum(tl.load(plan + H_SLOT_UPDATES), 0), plan_len)
    count = tl.minimum(tl.maximum(tl.load(plan + H_NUM_SLOT_UPDATES), 0), (plan_len - at) // SLOT_WORDS)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        slot = tl.load(plan + at + i * SLOT_WORDS + S_SLOT, i < count, other=0)
        slot = tl.minimum(tl.maximum(slot, 0), num_slots - 1)
        tl.store(num_kept + slot, tl.zeros_like(slot), i < count)
        tl.store(keep_at + slot, tl.zeros_like(slot), i < count)
    tl.store(base, (tl.load(plan + H_STEP) & 1) * half)


def begin_kept(plan: torch.Tensor, kept: KeptTables) -> None:
    """Nothing is kept of the plan's new sequences, and a step with windows keeps inputs from kept.base on."""
    _begin_kernel[(1,)](
        plan, plan.numel(), kept.num_kept, kept.keep_at, kept.base, kept.half, len(kept.num_kept), BLOCK
    )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def _end_kernel(
    row_slots, num_decode_rows, query_start, accepted, base, num_kept, first_kept, R, num_slots, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_decode = row < tl.minimum(tl.load(num_decode_rows), R)
    slot = tl.minimum(tl.maximum(tl.load(row_slots + row, is_decode, other=0), 0), num_slots - 1)
    tl.store(num_kept + slot, tl.load(accepted + row, is_decode, other=0), is_decode)
    tl.store(first_kept + slot, tl.load(base) + tl.load(query_start + row, is_decode, other=0), is_decode)


def end_kept(step: StepBuffers, kept: KeptTables, num_rows: int) -> None:
    """Note what a step with windows, padded to num_rows, has kept of its decode rows: as many inputs as samples that count."""
    _end_kernel[(triton.cdiv(num_rows, BLOCK),)](
        step.row_slots, step.num_decode_rows, step.query_start, step.accepted, kept.base, kept.num_kept, kept.first_kept,
        num_rows, len(kept.num_kept), BLOCK,
    )  # fmt: skip
