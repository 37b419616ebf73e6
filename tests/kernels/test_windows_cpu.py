"""Windows on the CPU, the oracle of the kernels: how drafts are shared out, which samples count, where keys may go."""

import numpy as np
import pytest
import torch
from step_plans import MAX_SEQS, SIZES, make_plan

from quire.ipc.step.plan import decode_plan
from quire.ipc.step.sections import HEADER, MAX_DRAFTS, NO_TOKEN, REJECTED
from quire.kernels.speculation.accept_cpu import accept
from quire.kernels.step.step_inputs_cpu import prepare_step
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.kernels.step.windows_cpu import share_drafts


def some_state():
    tables = SlotTables.allocate(MAX_SEQS, 2, 6, "cpu", speculates=True)
    return tables, StepBuffers.allocate(100, MAX_SEQS, 2, "cpu", 40)


def plan_of(rows, window, draft_tokens, prefill=()):
    plan = make_plan(1, decode_rows=rows, prefill=prefill)
    plan[HEADER.at["window"]], plan[HEADER.at["draft_tokens"]] = window, draft_tokens
    return plan


def shared(possible, most):
    """A draft at a time, to the row that has the fewest of those that may have more."""
    given = [0] * len(possible)
    for _ in range(most):
        row = min((r for r in range(len(given)) if given[r] < possible[r]), key=lambda r: (given[r], r), default=None)
        if row is not None:
            given[row] += 1
    return given


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_shared_place_by_place(seed):
    rng, (tables, step) = np.random.default_rng(seed), some_state()
    rows, window, most = (
        rng.permutation(MAX_SEQS)[: rng.integers(1, MAX_SEQS + 1)],
        int(rng.integers(2, 17)),
        int(rng.integers(60)),
    )
    tables.num_drafts[:] = torch.from_numpy(rng.integers(MAX_DRAFTS + 1, size=MAX_SEQS + 1))
    tables.column("max_window")[:] = torch.from_numpy(rng.choice([1, 4, 16, 16], MAX_SEQS + 1))
    tables.column("final_len")[:] = torch.from_numpy(rng.integers(6, 30, MAX_SEQS + 1))
    tables.seq_len[:] = 5
    tables.decode_slots[0, : len(rows)] = torch.from_numpy(rows)
    plan = plan_of(rows, window, most)
    narrow = torch.from_numpy(rng.choice([1, 2, 3, 16], len(rows)))
    if seed % 2:
        plan[HEADER.at["num_row_windows"]], plan[HEADER.at["row_windows"]] = len(rows), 500
        plan[500 : 500 + len(rows)] = narrow
    else:
        narrow[:] = 16
    share_drafts(plan, tables, step, 40)
    bounds = tables.num_drafts, tables.column("max_window").clamp(max=window) - 1, tables.column("final_len") - 2 - 5
    possible = torch.stack(bounds).amin(0).clamp(min=0)[torch.from_numpy(rows)].minimum(narrow - 1).tolist()
    assert (step.row_tokens[:40] - 1).tolist()[: len(rows)] == shared(possible, most)
    assert not step.row_tokens[len(rows) : 40].any()


def test_only_drafts_before_the_first_wrong_one_count():
    tables, step = some_state()
    rows = [4, 2, 0, 5]
    for slot, drafts in zip(rows, ([10, 11, 12], [20, 21], [], [50, 51]), strict=True):
        tables.drafts[slot, : len(drafts)], tables.num_drafts[slot] = torch.tensor(drafts, dtype=torch.int32), len(drafts)
        tables.column("max_window")[slot] = 16
    tables.last_token[:] = 9
    tables.seq_len[:] = 7
    tables.column("final_len")[0] = 8  # its last token was sampled in another step
    plan = plan_of(rows, 4, 9, prefill=[(1, 0, [60, 61, 62], 1), (3, 4, [63], 0)])
    assert decode_plan(plan.numpy(), np.zeros(0, np.int32)).num_samples == 15
    prepare_step(plan, tables, step, 18, 15, windows=True, **SIZES)
    assert step.input_ids[:18].tolist() == [9, 10, 11, 12, 9, 20, 21, 9, 9, 50, 51, 60, 61, 62, 63, 0, 0, 0]
    assert step.positions[:11].tolist() == [7, 8, 9, 10, 7, 8, 9, 7, 7, 8, 9]
    assert step.first_sample[:16].tolist() == [0, 4, 7, 8, 11, 12, *[13] * 10]
    assert step.logits_indices[:15].tolist() == [*range(11), 13, 14, 0, 0]
    assert (step.slot_mapping[:, :18] < 0).sum(0).tolist() == [0] * 7 + [2] + [0] * 7 + [2] * 3
    sampled = torch.tensor([10, 11, 99, 77, 98, 21, 76, 5, 50, NO_TOKEN, 75, 70, 71, 3, 3], dtype=torch.int32)
    accept(step, sampled, 15)
    assert step.accepted[:15].tolist() == [3, 1, 0, 1, 1, *[0] * 10]  # nothing may follow the last row's first draft
    r = REJECTED
    assert sampled.tolist() == [10, 11, 99, r, 98, r, r, r, 50, r, r, 70, 71, 3, 3]


def test_a_row_past_its_end_writes_no_key_in_a_step_without_windows():
    """Another step may have sampled its last token, and behind its blocks the table has those of other sequences."""
    tables, step = some_state()
    tables.seq_len[:], tables.block_table[:] = 7, 3
    tables.column("final_len")[:] = 9
    tables.column("final_len")[2] = 8
    prepare_step(make_plan(1, decode_rows=[1, 2, 3]), tables, step, 3, 3, **SIZES)
    assert step.slot_mapping[:, :3].tolist() == [[15, -1, 15]] * 2 and step.seq_lens[:3].tolist() == [8] * 3
