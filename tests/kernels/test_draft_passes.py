"""The kernels around a draft model's passes: what they write is what the functions for a CPU write."""

import numpy as np
import pytest
import torch

from quire.ipc.step.plan import StepPlan, default_slots
from quire.ipc.step.sections import INT32_MAX, SLOT
from quire.kernels.speculation import draft_passes_cpu
from quire.kernels.speculation.draft_state import UNKNOWN, DraftState
from quire.kernels.step.tables import SlotTables, StepBuffers

SLOTS, BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS, VOCAB = 9, 4, 40, 300, 50
HOW = {"block_size": BLOCK_SIZE, "vocab": VOCAB}


def world(seed):
    """Tables, a step that is done, a draft model's state and its inputs: rows of every kind, in random order."""
    draw = np.random.default_rng(seed)
    tables = SlotTables.allocate(SLOTS, 2, MAX_BLOCKS, "cpu", speculates=True)
    step, out = StepBuffers.allocate(200, SLOTS, 2, "cpu", 64), StepBuffers.allocate(200, SLOTS, 1, "cpu")
    state = DraftState.allocate(NUM_BLOCKS, BLOCK_SIZE, SLOTS, "cpu")
    host, now, kept = tables.host, step.host, state.host
    blocks = draw.permutation(np.arange(1, NUM_BLOCKS)).astype(np.int32)
    lengths = draw.integers(0, (MAX_BLOCKS - 8) * BLOCK_SIZE, SLOTS).astype(np.int32)
    lengths[0] = lengths[0] // BLOCK_SIZE * BLOCK_SIZE  # its last token has no block
    for slot, length in enumerate(lengths):
        more = 0 if slot == 0 else int(draw.integers(6))
        used = min(-(-int(length) // BLOCK_SIZE) + more, MAX_BLOCKS, len(blocks))
        host["block_table"][1, slot, :used], blocks = blocks[:used], blocks[used:]
        full = int(draw.integers(length + 1))
        filled = np.clip(full - np.arange(used) * BLOCK_SIZE, 0, BLOCK_SIZE)
        kept["filled"][host["block_table"][1, slot, :used]] = filled
        kept["draft_len"][slot] = draw.choice([UNKNOWN, max(int(length) - int(draw.integers(30)), 0)])
    host["seq_len"][:SLOTS], host["last_token"][:SLOTS] = lengths, draw.integers(0, 60, SLOTS)
    params = host["params"]
    params[:SLOTS, SLOT.at["final_len"]] = draw.choice([INT32_MAX, 10**6], SLOTS)
    params[2, SLOT.at["final_len"]] = lengths[2] + 3
    params[:SLOTS, SLOT.at["max_window"]] = draw.choice([1, 16, 16, 16], SLOTS)
    rows = 7
    now["num_rows"][0], now["num_decode_rows"][0] = rows, 4
    now["row_slots"][:rows] = draw.permutation(SLOTS)[:rows]
    now["row_slots"][rows:] = SLOTS
    now["samples"][:rows] = draw.integers(0, 2, rows)
    now["samples"][:2] = 1
    kept["text"][:] = draw.integers(0, 60, len(kept["text"]))
    return tables, step, state, out


def passes(kernels, seed, num_tokens, num_rows, depth, longest):
    """All tensors behind a pass and its drafts, by name."""
    tables, step, state, out = world(seed)
    words = StepPlan(1, {"slot_updates": default_slots(1)}).encode()
    plan = torch.zeros(100, dtype=torch.int32)
    plan[: len(words)] = torch.from_numpy(words)
    kernels.begin_sequences(plan, tables, state, 0)  # of slot 0, in a table that nothing reads here
    mapped = np.random.default_rng(seed).permutation(NUM_BLOCKS * BLOCK_SIZE)[:40]
    step.host["slot_mapping"][1, :40], step.host["input_ids"][:40] = np.where(mapped % 5, mapped, -1), mapped % 60
    kernels.note_tokens(step, state, 1, 40, block_size=BLOCK_SIZE)
    tokens, rows = kernels.begin_pass(tables, step, state, out, 1, num_tokens, num_rows, depth=depth, longest=longest, **HOW)
    tokens = int(out.query_start[rows])
    seen = {f"input {name}": out.host[name][:tokens].copy() for name in ("input_ids", "positions")}
    seen |= {"input slots": out.host["slot_mapping"][0, :tokens].copy(), "starts": out.query_start[: rows + 1].numpy().copy()}
    seen |= {name: out.host[name][:rows].copy() for name in ("row_slots", "seq_lens", "logits_indices")}
    for place in range(depth):
        drawn = torch.tensor([(7 * row + place) % 55 - (row == 3) for row in range(num_rows)], dtype=torch.int32)
        if not kernels.next_drafts(tables, state, out, 1, drawn, place, rows, **HOW) or place + 1 == depth:
            break
        names = "row_slots", "seq_lens", "input_ids", "positions"
        active = state.slots[:rows].numpy() != SLOTS
        assert active.any() or kernels is not draft_passes_cpu
        if active.any():
            seen |= {f"{place} {name}": out.host[name][:rows].copy() for name in names}
            seen |= {f"{place} mapping": out.host["slot_mapping"][0, :rows].copy()}
            seen |= {f"{place} {name}": state.host[name][:rows].copy() for name in ("slots", "positions", "places")}
    seen |= {name: state.host[name].copy() for name in ("filled", "draft_len", "text")}
    counts = seen["row drafts"] = state.host["num_drafts"][:rows].copy()
    slots = step.host["row_slots"][:rows]
    seen["num_drafts"] = tables.host["num_drafts"][:SLOTS].copy()
    seen["drafts"] = np.concatenate([tables.host["drafts"][slot, :n] for slot, n in zip(slots, counts, strict=True)])
    return seen


CASES = [(200, 7, 4, 10**6), (33, 7, 15, 10**6), (16, 7, 1, 10**6), (200, 7, 6, 60), (150, 7, 0, 10**6)]


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_write_what_a_cpu_writes(case):
    from quire.kernels.speculation import draft_passes

    any_drafts = 0
    for seed in range(4):
        want, got = (passes(kernels, seed, *case) for kernels in (draft_passes_cpu, draft_passes))
        assert want.keys() <= got.keys()
        for name, values in want.items():
            np.testing.assert_array_equal(got[name], values, err_msg=f"seed {seed}, {name}")
        any_drafts += int(want["row drafts"].sum())
    assert any_drafts > 0 or case[2] == 0


@pytest.mark.interpret
def test_padded_rows_have_no_tokens():
    from quire.kernels.speculation import draft_passes

    exact, padded = (passes(draft_passes, 1, 64, rows, 3, 10**6) for rows in (7, SLOTS))
    for name in ("filled", "draft_len", "num_drafts", "drafts"):
        np.testing.assert_array_equal(padded[name], exact[name], err_msg=name)
    assert not padded["seq_lens"][7:].any() and (padded["row_slots"][7:] == SLOTS).all()


def test_a_pass_computes_what_is_missing():
    """Tokens go on where a row's own or its blocks' computed ones end, and a row drafts once it has all of its known tokens."""
    tables, step, state, out = world(3)
    before = {slot: int(state.draft_len[slot]) for slot in range(SLOTS)}
    draft_passes_cpu.begin_pass(tables, step, state, out, 1, 200, SLOTS, depth=3, longest=10**6, **HOW)
    starts = out.query_start.tolist()
    for row, slot in enumerate(step.row_slots.tolist()[: int(step.num_rows)]):
        positions = out.positions[starts[row] : starts[row + 1]].tolist()
        end = int(state.draft_len[slot])
        assert positions == list(range(end - len(positions), end))
        assert before[slot] == UNKNOWN or end - len(positions) == before[slot]
        known = int(tables.seq_len[slot]) + int(step.samples[row])
        assert end <= known
        assert not state.num_drafts[row] or end == known
