"""The CPU path against plans applied by hand in plain Python, the kernels against the CPU path, over random steps."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from step_plans import BLOCK_SIZE, GROUPS, MAX_BLOCKS, MAX_SEQS, NUM_BLOCKS, SIZES, VOCAB, make_plan, make_state

from quire.ipc.step import plan as wire
from quire.ipc.step.sections import HEADER, MAX_LOGPROBS, NO_TOKEN, SLOT_VALUES, logprob_record
from quire.kernels.step import step_inputs_cpu, tables
from quire.kernels.step.tables import SlotTables, StepBuffers


def random_steps(seed, count):
    """Plans of a made-up scheduler: sequences come, are prefilled in chunks, decode for a while, go."""
    rng = np.random.default_rng(seed)
    running: dict[int, int] = {}  # slot -> tokens computed
    previous: list[int] = []
    for step in range(1, count + 1):
        for slot in [s for s in running if running[s] > 18 or rng.random() < 0.05]:
            del running[slot]
        decode = [s for s in running if rng.random() < 0.9]
        if rng.random() < 0.5 and previous and all(s in running for s in previous):
            decode = list(previous)
        free = [s for s in range(MAX_SEQS) if s not in running][: rng.integers(0, 4)]
        slot_updates, prefill, blocks = [], [], []
        for slot in free:
            values = {"temperature": float(rng.random()), "top_k": 3, "has_processors": int(rng.random() < 0.5)}
            slot_updates.append({"slot": slot, **values})
            start = int(rng.integers(0, 5))
            ids = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
            prefill.append((slot, start, ids, int(rng.random() < 0.7)))
            blocks += [
                (g * (MAX_SEQS + 1) + slot, b, rng.integers(1, NUM_BLOCKS)) for g in range(GROUPS) for b in range(MAX_BLOCKS)
            ]
        same = decode == previous
        yield (
            make_plan(step, slot_updates, blocks, decode, prefill, same),
            len(decode) + sum(len(p[2]) for p in prefill),
            (len(decode) + len(prefill)),
        )
        previous = decode
        for slot in decode:
            running[slot] += 1
        for slot, start, ids, _ in prefill:
            running[slot] = start + len(ids)


def expected_inputs(plan, state, decode_rows):
    """The unpadded inputs, token by token, from the tables as they are after the plan was applied."""
    p = wire.decode_plan(plan.numpy(), decode_rows)
    ids, positions, slots, lens, starts, samples, token_slots = [], [], [], [], [0], [], []
    for slot in p.decode_rows.tolist():
        ids.append(int(state.last_token[slot]))
        positions.append(int(state.seq_len[slot]))
        token_slots.append(slot)
        slots.append(slot)
        lens.append(positions[-1] + 1)
        starts.append(len(ids))
        samples.append(1)
    at = 0
    for slot, start, length, flags, *_ in p.prefill_rows.tolist():
        ids += p.prefill_tokens[at : at + length].tolist()
        positions += range(start, start + length)
        token_slots += [slot] * length
        at += length
        slots.append(slot)
        lens.append(start + length)
        starts.append(len(ids))
        samples.append(flags & 1)
    mapping = [
        [
            int(state.block_table[g, s, q // BLOCK_SIZE]) * BLOCK_SIZE + q % BLOCK_SIZE
            for s, q in zip(token_slots, positions, strict=True)
        ]
        for g in range(GROUPS)
    ]
    return p, {
        "input_ids": ids, "positions": positions, "row_slots": slots, "seq_lens": lens, "query_start": starts,
        "samples": samples, "logits_indices": [s - 1 for s in starts[1:]], "slot_mapping": mapping,
    }  # fmt: skip


def check_inputs(step, want, padded_tokens, padded_rows):
    rows, tokens = len(want["row_slots"]), len(want["input_ids"])
    pad_rows, pad_tokens = [0] * (padded_rows - rows), [0] * (padded_tokens - tokens)
    assert step.num_rows.item() == rows
    assert step.input_ids[:padded_tokens].tolist() == want["input_ids"] + pad_tokens
    assert step.positions[:padded_tokens].tolist() == want["positions"] + pad_tokens
    assert step.row_slots[:padded_rows].tolist() == want["row_slots"] + [MAX_SEQS] * len(pad_rows)
    assert step.query_start[: padded_rows + 1].tolist() == want["query_start"] + [tokens] * len(pad_rows)
    for name in ("seq_lens", "samples", "logits_indices"):
        assert getattr(step, name)[:padded_rows].tolist() == want[name] + pad_rows, name
    for group in range(GROUPS):
        assert step.slot_mapping[group, :padded_tokens].tolist() == want["slot_mapping"][group] + [-1] * len(pad_tokens)


def logprobs_of(rows, step, device="cpu", num_top=tables.NUM_TOP):
    g = torch.Generator().manual_seed(step)
    return tuple(
        x.to(device)
        for x in (
            torch.randn(rows, generator=g),
            torch.randint(1, 100, (rows,), generator=g, dtype=torch.int32),
            torch.randint(0, VOCAB, (rows, num_top), generator=g, dtype=torch.int32),
            torch.randn(rows, num_top, generator=g),
        )
    )


def test_steps_on_the_cpu_agree_with_plain_python():
    state, pool, step = make_state()
    results = torch.zeros(3, MAX_SEQS * (1 + tables.LOGPROB_WORDS), dtype=torch.int64)
    decode_rows = np.zeros(0, np.int32)
    seen_same = 0
    for number, (plan, tokens, rows) in enumerate(random_steps(0, 60), 1):
        t, r = max(tokens, 1) + 2, max(rows, 1)
        step_inputs_cpu.prepare_step(plan, state, step, t, r, **SIZES)
        p, want = expected_inputs(plan, state, decode_rows)
        seen_same += p.same_decode_rows
        decode_rows = p.decode_rows.copy()
        check_inputs(step, want, t, r)
        for update in p.section("slot_updates"):
            assert state.params[update["slot"]].numpy().tobytes() == update.tobytes()

        before_last, before_counts = state.last_token.clone(), pool.counts.clone()
        before_history = state.history.clone()
        results_of = torch.randint(NO_TOKEN, VOCAB, (r,), dtype=torch.int32)
        sampled = results_of.clamp(min=0)  # as what NO_TOKEN counts
        logprobs = logprobs_of(r, number)
        step_inputs_cpu.finish_step(plan, state, pool, step, results_of, results, r, max_rows=MAX_SEQS, logprobs=logprobs)
        for row, slot in enumerate(want["row_slots"]):
            assert state.seq_len[slot] == want["seq_lens"][row]
            if want["samples"][row]:
                before_last[slot] = sampled[row]
                if state.column("has_processors")[slot]:
                    before_counts[slot, sampled[row]] += 1  # none occurs more often than a byte tells
                    before_history[slot] = torch.cat([before_history[slot, 1:], sampled[row : row + 1]])
            word = results[number % 3, row].item()
            assert (word >> 32, word & 0xFFFFFFFF) == (number, results_of[row] & 0xFFFFFFFF)
            columns = results[number % 3, MAX_SEQS + row * tables.LOGPROB_WORDS :][: tables.LOGPROB_WORDS]
            assert (columns >> 32).tolist() == [number] * tables.LOGPROB_WORDS
            bits = (columns & 0xFFFFFFFF).numpy().astype(np.uint32)
            assert bits[0] == logprobs[0][row].numpy().view(np.uint32)
            assert bits[1] == logprobs[1][row]
            assert bits[2:22].tolist() == logprobs[2][row].tolist()
            assert (bits[22:].view(np.float32) == logprobs[3][row].numpy()).all()
        assert torch.equal(state.last_token, before_last)
        assert torch.equal(pool.counts, before_counts)
        assert torch.equal(state.history, before_history)
    assert seen_same >= 2


def test_every_value_of_an_update_is_found_in_its_column():
    state, _, step = make_state()
    update = {v.name: 0.5 + i if v.dtype == "float32" else i for i, v in enumerate(SLOT_VALUES)} | {
        "slot": 3,
        "seed": 2**63 + 5,
    }
    step_inputs_cpu.prepare_step(make_plan(1, [update]), state, step, 1, 1, **SIZES)
    for value in SLOT_VALUES:
        if value.name != "seed":
            assert state.column(value.name)[3] == update[value.name], value.name
    assert state.column("seed")[3].tolist() == [5, -(2**31)]
    for value in SLOT_VALUES:  # of the slots beside it
        assert (state.column(value.name)[[2, 4]] == value.default).all(), value.name


def test_a_decode_step_of_one_row_takes_the_cpu_microseconds():
    state, pool, step = make_state()
    plan, sampled = make_plan(5, decode_rows=[2], same=False), torch.tensor([4], dtype=torch.int32)
    results = torch.zeros(2, MAX_SEQS, dtype=torch.int64)
    best = 1.0
    for _ in range(50):
        began = time.perf_counter()
        step_inputs_cpu.prepare_step(plan, state, step, 1, 1, **SIZES)
        step_inputs_cpu.finish_step(plan, state, pool, step, sampled, results, 1, max_rows=MAX_SEQS)
        best = min(best, time.perf_counter() - began)
        state.seq_len.zero_()
    assert best < 500e-6  # measured: about 50 µs; the bound only catches a slip by an order of magnitude


def count_on(pool):
    """Many tokens have occurred as often as a byte tells, or nearly, and tables are small: they collide, and overflow."""
    rng = np.random.default_rng(0)
    counts = rng.choice(np.array([0, 126, 127, 254, 255], np.uint8), tuple(pool.counts.shape))
    pool.counts.copy_(torch.from_numpy(counts))
    pool.entries = torch.zeros(len(counts), tables.ENTRY_PLANES, 8, dtype=torch.int32, device=pool.counts.device)


def compare_steps(device, steps, capture=False, num_top=tables.NUM_TOP):
    """The kernels and the CPU path over the same plans: every table, buffer and result word equal."""
    from quire.kernels.step import step_inputs

    ours, theirs = make_state(device), make_state()
    count_on(ours[1])
    count_on(theirs[1])
    words = MAX_SEQS * (1 + logprob_record(num_top).width)
    results = [torch.zeros(3, words, dtype=torch.int64, device=d) for d in (device, "cpu")]
    device_plan = torch.zeros(600, dtype=torch.int32, device=device)
    t, r = 40, MAX_SEQS
    sampled = torch.zeros(r, dtype=torch.int32, device=device)
    logprobs = logprobs_of(r, 0, device, num_top)

    def run():
        step_inputs.prepare_step(device_plan, ours[0], ours[2], t, r, **SIZES)
        step_inputs.finish_step(device_plan, *ours[:2], ours[2], sampled, results[0], r, max_rows=MAX_SEQS, logprobs=logprobs)

    replay = run
    if capture:
        run()
        for ours_part, theirs_part in zip(ours[:2], theirs[:2], strict=True):
            for name, value in vars(theirs_part).items():
                if isinstance(value, torch.Tensor):
                    getattr(ours_part, name).copy_(value)
        results[0].zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    for number, (plan, _, _) in enumerate(random_steps(1, steps), 1):
        device_plan.copy_(plan)
        cpu_sampled = torch.randint(NO_TOKEN, VOCAB, (r,), dtype=torch.int32)
        cpu_logprobs = logprobs_of(r, number, num_top=num_top)
        sampled.copy_(cpu_sampled)
        for x, y in zip(logprobs, cpu_logprobs, strict=True):
            x.copy_(y)
        replay()
        step_inputs_cpu.prepare_step(plan, theirs[0], theirs[2], t, r, **SIZES)
        step_inputs_cpu.finish_step(plan, *theirs, cpu_sampled, results[1], r, max_rows=MAX_SEQS, logprobs=cpu_logprobs)
        for ours_part, theirs_part in zip(ours, theirs, strict=True):
            for name, value in vars(theirs_part).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(getattr(ours_part, name).cpu(), value), (number, name)
        assert torch.equal(results[0].cpu(), results[1]), number
    assert (theirs[1].entries[:, tables.ENTRY_KEY] != 0).any()


def compare_micro_batches(device):
    """Each has its own decode rows, sent or held; both paths."""
    from quire.kernels.step import step_inputs

    ours, theirs = (SlotTables.allocate(MAX_SEQS, GROUPS, MAX_BLOCKS, d, num_micro_batches=3) for d in (device, "cpu"))
    buffers = [StepBuffers.allocate(40, MAX_SEQS, GROUPS, d) for d in (device, "cpu")]
    sent = {0: [2, 4], 1: [1], 2: [0, 3, 5]}
    for step, micro_batch in enumerate([0, 1, 2, 1, 0, 2, 1, 0], 1):
        plan = make_plan(step, decode_rows=sent[micro_batch], same=step > 3)
        plan[HEADER.at["micro_batch"]] = micro_batch
        step_inputs.prepare_step(plan.to(device), ours, buffers[0], 8, 5, **SIZES)
        step_inputs_cpu.prepare_step(plan, theirs, buffers[1], 8, 5, **SIZES)
        for side in buffers:
            assert side.row_slots[: len(sent[micro_batch])].tolist() == sent[micro_batch]
        assert torch.equal(ours.decode_slots.cpu(), theirs.decode_slots)
    for wild in (3, -1, 2**31 - 1):
        plan = make_plan(9, decode_rows=[1])
        plan[HEADER.at["micro_batch"]] = wild
        step_inputs.prepare_step(plan.to(device), ours, buffers[0], 8, 5, **SIZES)


def check_wild_plan(device):
    """Every index out of range: nothing outside the tables is touched (the interpreter and the allocator would notice)."""
    from quire.kernels.step import step_inputs

    state, pool, step = make_state(device)
    wild = 2**30
    plan = make_plan(
        1,
        [{"slot": wild, "has_processors": wild}],
        [(wild, wild, wild), (-5, -5, -5)],
        [wild, -3],
        [(wild, wild, [wild, -wild], 1)],
    )
    step_inputs.prepare_step(plan.to(device), state, step, 8, 5, **SIZES)
    sampled = torch.full((5,), wild, dtype=torch.int32, device=device)
    results = torch.zeros(2, MAX_SEQS, dtype=torch.int64, device=device)
    step_inputs.finish_step(plan.to(device), state, pool, step, sampled, results, 5, max_rows=MAX_SEQS)
    assert int(step.input_ids.min()) >= 0 and int(step.input_ids.max()) < VOCAB
    assert int(step.row_slots.min()) >= 0 and int(step.row_slots.max()) <= MAX_SEQS
    assert int(step.slot_mapping.max()) < NUM_BLOCKS * BLOCK_SIZE
    assert int(state.block_table.min()) >= 0 and int(state.block_table.max()) < NUM_BLOCKS
    assert int(state.last_token.max()) < VOCAB
    header = torch.full((600,), wild, dtype=torch.int32, device=device)
    step_inputs.prepare_step(header, state, step, 8, 5, **SIZES)
    assert int(step.num_rows.item()) <= 5


@pytest.mark.interpret
def test_kernels_agree_with_the_cpu_path_in_the_interpreter():
    compare_steps("cpu", 12)


@pytest.mark.interpret
def test_kernels_write_as_many_logprobs_as_they_get_in_the_interpreter():
    compare_steps("cpu", 12, num_top=MAX_LOGPROBS)


@pytest.mark.interpret
def test_micro_batches_have_decode_rows_of_their_own_in_the_interpreter():
    compare_micro_batches("cpu")


@pytest.mark.gpu
def test_micro_batches_have_decode_rows_of_their_own():
    compare_micro_batches("cuda")
    torch.cuda.synchronize()


@pytest.mark.interpret
def test_wild_indices_are_clamped_in_the_interpreter():
    check_wild_plan("cpu")


PROGRAM = """
import hopper_offline
hopper_offline.compile_launches()
import torch
from test_step_inputs import MAX_SEQS, make_state
from quire.kernels.step import step_inputs
state, pool, step = make_state("meta")
words = {"dtype": torch.int32, "device": "meta"}
results = torch.zeros(2, MAX_SEQS, dtype=torch.int64, device="meta")
step_inputs.finish_step(torch.zeros(600, **words), state, pool, step, torch.zeros(5, **words), results, 5, max_rows=MAX_SEQS)
assert pool.multiplier == 1 and len(hopper_offline.COMPILED) == 1
"""


@pytest.mark.slow  # seconds of compiling
def test_tokens_are_counted_whatever_the_hash_is_multiplied_by(tmp_path, monkeypatch):
    """A number of 1 is a constant to Triton, which has not all that a number has; the interpreter knows no such difference."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *(path for path in sys.path if path)]))
    child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True])
def test_kernels_agree_with_the_cpu_path(capture):
    compare_steps("cuda", 60, capture)


@pytest.mark.gpu
def test_wild_indices_are_clamped():
    check_wild_plan("cuda")
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_results_can_be_pinned_host_memory():
    from quire.kernels.step import step_inputs

    state, pool, step = make_state("cuda")
    plan = make_plan(5, decode_rows=[2, 4]).cuda()
    results = torch.zeros(4, MAX_SEQS, dtype=torch.int64).pin_memory()
    step_inputs.prepare_step(plan, state, step, 4, 4, **SIZES)
    sampled = torch.tensor([7, 8, 9, 10], dtype=torch.int32, device="cuda")
    step_inputs.finish_step(plan, state, pool, step, sampled, results, 4, max_rows=MAX_SEQS)
    torch.cuda.synchronize()
    assert results[1].tolist() == [5 << 32 | 7, 5 << 32 | 8, 0, 0, 0, 0, 0]
