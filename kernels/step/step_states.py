"""Which recurrent states the rows of a step read and write: from the slots of rows, and from the plan's records of chunks.

One launch after `step_inputs.prepare_step`, for models with recurrent layers only. It reads counts on the device, so a captured
launch serves every step, and clamps ids to the states that there are. `step_states_cpu` is the reference.
"""

import torch
import triton
import triton.language as tl

from quire.ipc.step.sections import HEADER, PREFILL, SLOT
from quire.kernels.step.tables import SlotTables, StateRows, StepBuffers

H_NUM_PREFILL_ROWS, H_PREFILL_ROWS = tl.constexpr(HEADER.at["num_prefill_rows"]), tl.constexpr(HEADER.at["prefill_rows"])
SLOT_WORDS, PREFILL_WORDS = tl.constexpr(SLOT.width), tl.constexpr(PREFILL.width)
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
