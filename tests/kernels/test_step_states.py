"""Which states a step's rows read and write: the CPU path against plans written by hand, the kernel against the CPU path."""

import numpy as np
import pytest
import torch

from quire.ipc.step import plan as wire
from quire.kernels.step import step_inputs_cpu, step_states_cpu
from quire.kernels.step.tables import KeptTables, SlotTables, StateRows, StepBuffers

SLOTS, ROWS, TOKENS = 7, 6, 40
SIZES = {"block_size": 4, "num_blocks": 50, "vocab": 101}


def plan_of(states, decode, chunks):
    """states: (slot, its state); chunks: (slot, first token, tokens, first state, last state)."""
    slots = wire.default_slots(len(states))
    for i, (slot, state) in enumerate(states):
        slots[i]["slot"], slots[i]["state"] = slot, state
    rows = np.zeros(len(chunks), wire.DTYPES["prefill_rows"])
    for i, chunk in enumerate(chunks):
        for name, value in zip(("slot", "start", "length", "first_state", "last_state"), chunk, strict=True):
            rows[name][i] = value
    tokens = np.zeros(sum(chunk[2] for chunk in chunks), np.int32)
    some = {"slot_updates": slots, "decode_rows": np.asarray(decode, np.int32), "prefill_rows": rows, "prefill_tokens": tokens}
    words = wire.StepPlan(1, {name: value for name, value in some.items() if len(value)}).encode()
    buffer = np.full(600, 12345, np.int32)  # stale words lie behind the plan
    buffer[: len(words)] = words
    return torch.from_numpy(buffer)


def tables_on(device):
    return SlotTables.allocate(SLOTS, 1, 20, device), StepBuffers.allocate(TOKENS, ROWS, 1, device), stale_rows(device)


def stale_rows(device):
    rows = StateRows.allocate(ROWS, device)
    rows.num_states = 12
    for ids in (rows.own, rows.first, rows.last):
        ids.fill_(99)
    return rows


def ids_of(rows):
    return [ids.tolist() for ids in (rows.own, rows.first, rows.last)]


PLANS = [
    (([(0, 3), (2, 5), (4, 9)], [2, 0], [(4, 0, 6, 0, 11)]), [[5, 3, 9, 0, 0, 0], [5, 3, 0, 0, 0, 0], [0, 0, 11, 0, 0, 0]]),
    (([], [], [(4, 6, 2, 9, 0), (5, 8, 3, 7, 8)]), [[9, 0, 0, 0, 0, 0], [9, 7, 0, 0, 0, 0], [0, 8, 0, 0, 0, 0]]),
    (([], [0, 2, 4], []), [[3, 5, 9, 0, 0, 0], [3, 5, 9, 0, 0, 0], [0] * 6]),
]


def test_rows_have_the_states_of_their_slots_and_chunks_those_of_the_plan():
    tables, step, rows = tables_on("cpu")
    for plan, wanted in PLANS:
        made = plan_of(*plan)
        step_inputs_cpu.prepare_step(made, tables, step, TOKENS, ROWS, **SIZES)
        step_states_cpu.prepare_states(made, tables, step, rows, ROWS)
        assert ids_of(rows) == wanted


def kept_after(module, device="cpu"):
    """What is kept of slots, after a plan that gives slot 4 to another sequence, and after its step with windows."""
    kept = KeptTables.allocate(SLOTS + 1, 30, torch.device(device))
    kept.num_kept.fill_(3), kept.keep_at.fill_(64)
    step = StepBuffers.allocate(TOKENS, ROWS, 1, device, ROWS)
    for name, values in (("row_slots", [2, 0, 4]), ("query_start", [0, 2, 7, 9]), ("accepted", [1, 4, 1])):
        getattr(step, name)[: len(values)] = torch.tensor(values, dtype=torch.int32)
    step.num_decode_rows[0], step.num_rows[0] = 2, 3
    plan = plan_of([(4, 9)], [2, 0], [(4, 0, 2, 0, 0)]).to(device)
    module.begin_kept(plan, kept)
    before = kept.num_kept.tolist(), kept.keep_at.tolist(), kept.base.tolist()
    module.end_kept(step, kept, ROWS)
    return before, kept.num_kept.tolist(), kept.first_kept.tolist()


KEPT = ([3, 3, 3, 3, 0, 3, 3, 3], [64, 64, 64, 64, 0, 64, 64, 64], [30]), [4, 3, 1, 3, 0, 3, 3, 3], [32, 0, 30, 0, 0, 0, 0, 0]


def test_what_is_kept_is_noted_by_slot():
    assert kept_after(step_states_cpu) == KEPT


@pytest.mark.interpret
def test_what_is_kept_is_noted_by_slot_in_the_interpreter():
    from quire.kernels.step import step_states

    assert kept_after(step_states) == KEPT


@pytest.mark.gpu
def test_what_is_kept_is_noted_by_slot_on_a_gpu():
    from quire.kernels.step import step_states

    assert kept_after(step_states, "cuda") == KEPT


@pytest.mark.gpu
def test_the_kernel_does_what_the_cpu_path_does_and_clamps_ids():
    from quire.kernels.step import step_inputs, step_states

    tables, step, rows = tables_on("cuda")
    for plan, wanted in PLANS:
        made = plan_of(*plan).cuda()
        step_inputs.prepare_step(made, tables, step, TOKENS, ROWS, **SIZES)
        step_states.prepare_states(made, tables, step, rows, ROWS)
        assert ids_of(rows) == wanted
    made = plan_of([(0, 400)], [0], [(1, 0, 2, -3, 500)]).cuda()
    step_inputs.prepare_step(made, tables, step, TOKENS, ROWS, **SIZES)
    step_states.prepare_states(made, tables, step, rows, ROWS)
    assert ids_of(rows)[0][0] == 11 and ids_of(rows)[1][1] == 0 and ids_of(rows)[2][1] == 11
