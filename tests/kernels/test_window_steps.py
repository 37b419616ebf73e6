"""Steps with windows: kernels that share drafts, build inputs, accept and record, against the CPU path, over random steps."""

import numpy as np
import pytest
import torch
from step_plans import BLOCK_SIZE, GROUPS, MAX_BLOCKS, MAX_SEQS, SIZES, VOCAB, make_plan

from quire.ipc.step.sections import HEADER, MAX_DRAFTS, MAX_WINDOW, NO_TOKEN, draft_words, logprob_record, result_words
from quire.kernels.speculation import accept_cpu
from quire.kernels.step import step_inputs_cpu, windows_cpu
from quire.kernels.step.tables import ENTRY_PLANES, LogitsProcessorPool, SlotTables, StepBuffers

MAX_TOKENS, MAX_SAMPLES, NUM_TOP = 60, 45, 3
LENGTH = MAX_BLOCKS * BLOCK_SIZE
NARROW_AT = 580  # where a plan has row_windows
DRAFT_WORDS = draft_words(MAX_SEQS, MAX_SAMPLES)


def make_state(device):
    tables = SlotTables.allocate(MAX_SEQS, GROUPS, MAX_BLOCKS, device, speculates=True)
    pool = LogitsProcessorPool.allocate(MAX_SEQS, VOCAB, 1000, device, multiplier=1)
    rng = np.random.default_rng(0)  # many tokens have occurred as often as a byte tells, or nearly, and tables are small
    pool.counts.copy_(torch.from_numpy(rng.choice(np.array([0, 126, 127, 254, 255], np.uint8), tuple(pool.counts.shape))))
    pool.entries = torch.zeros(MAX_SEQS, ENTRY_PLANES, 8, dtype=torch.int32, device=device)
    results = torch.zeros(3, result_words(MAX_SEQS, NUM_TOP, MAX_SAMPLES), dtype=torch.int64, device=device)
    return tables, pool, StepBuffers.allocate(MAX_TOKENS, MAX_SEQS, GROUPS, device, MAX_SAMPLES), results


def tensors(*owners):
    return {name: x for owner in owners for name, x in vars(owner).items() if isinstance(x, torch.Tensor)}


def random_plans(seed, count, tables):
    """Plans, with their windows, of sequences that come, decode and end; `tables` are the CPU's, as they are at each step."""
    rng = np.random.default_rng(seed)
    running: set[int] = set()
    for step in range(1, count + 1):
        lengths, final = tables.seq_len, tables.column("final_len")
        running -= {s for s in running if lengths[s] >= final[s] or rng.random() < 0.05}
        decode = rng.permutation([s for s in sorted(running) if rng.random() < 0.9])
        updates, prefill, blocks = [], [], []
        for slot in [s for s in range(MAX_SEQS) if s not in running][: rng.integers(0, 4)]:
            ids, start = rng.integers(0, VOCAB, rng.integers(1, 6)).tolist(), int(rng.integers(0, 4))
            processed, most = int(rng.random() < 0.5), int(rng.choice([1, 3, 16]))
            values = {"final_len": int(rng.integers(start + len(ids) + 1, LENGTH + 1)), "max_window": most}
            updates.append({"slot": slot, "has_processors": processed, **values})
            prefill.append((slot, start, ids, int(rng.random() < 0.8)))
            blocks += [(g * (MAX_SEQS + 1) + slot, b, rng.integers(1, 50)) for g in range(GROUPS) for b in range(MAX_BLOCKS)]
        window = int(rng.choice([1, 2, 4, 16]))
        room = MAX_SAMPLES - len(decode) - len(prefill)
        drafts = 0 if window == 1 else int(rng.integers(1, max(2, min(room, (window - 1) * len(decode)))))
        plan = make_plan(step, updates, blocks, decode, prefill)
        plan[HEADER.at["window"]], plan[HEADER.at["draft_tokens"]] = window, drafts
        plan[HEADER.at["mask_window"]] = step % 3
        if window > 1 and step % 2 and len(decode):
            plan[HEADER.at["num_row_windows"]], plan[HEADER.at["row_windows"]] = len(decode), NARROW_AT
            plan[NARROW_AT : NARROW_AT + len(decode)] = torch.from_numpy(rng.choice([1, 2, 5, 16], len(decode)))
        yield plan, window > 1
        running.update(slot for slot, *_ in prefill)


def random_sampled(rng, step, count):
    """Half of the drafts are right; some samples are NO_TOKEN."""
    sampled = torch.from_numpy(rng.integers(NO_TOKEN, VOCAB, count).astype(np.int32))
    sampled[rng.random(count) < 0.05] = NO_TOKEN
    right = torch.from_numpy(rng.random(count - 1) < 0.7)
    sampled[:-1][right] = step.input_ids[1:count][right]
    return sampled


def compare_steps(device, count, seed):
    from quire.kernels.speculation import accept
    from quire.kernels.step import step_inputs

    ours, theirs = make_state(device), make_state("cpu")
    rng, seen = np.random.default_rng(seed), np.zeros(17, int)
    device_plan = torch.zeros(600, dtype=torch.int32, device=device)
    given = {"max_rows": MAX_SEQS, "max_samples": MAX_SAMPLES}
    for number, (plan, windows) in enumerate(random_plans(seed, count, theirs[0]), 1):
        drafts = torch.from_numpy(rng.integers(-3, VOCAB + 3, (MAX_SEQS + 1, MAX_DRAFTS)).astype(np.int32))
        valid = torch.from_numpy(rng.integers(0, MAX_DRAFTS + 1, MAX_SEQS + 1).astype(np.int32))
        for tables, *_ in (ours, theirs):
            tables.drafts.copy_(drafts)
            tables.num_drafts.copy_(valid)
        device_plan.copy_(plan)
        n = MAX_SAMPLES if windows else MAX_SEQS
        sizes = SIZES | {"windows": windows}
        for module, side, words in ((step_inputs, ours, device_plan), (step_inputs_cpu, theirs, plan)):
            to = side[3][:, DRAFT_WORDS] if windows else None
            module.prepare_step(words, side[0], side[2], MAX_TOKENS, n, draft_words=to, **sizes)
        compare(ours, theirs, number)
        sampled = random_sampled(rng, theirs[2], n)
        on_device = sampled.to(device, copy=True)
        if windows:
            accept.accept(ours[2], on_device, n)
            accept_cpu.accept(theirs[2], sampled, n)
            rows = int(theirs[2].num_rows)
            used = int(theirs[2].num_samples)
            assert torch.equal(on_device[:used].cpu(), sampled[:used]), number
            seen += np.bincount(theirs[2].accepted[:rows], minlength=17)
        g = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCAB, (n, NUM_TOP), generator=g, dtype=torch.int32)
        columns = (torch.randn(n, generator=g), ids[:, 0].contiguous(), ids, torch.randn(n, NUM_TOP, generator=g))
        logprobs = columns if number % 2 else None
        of_device = logprobs and tuple(x.to(device) for x in logprobs)
        step_inputs.finish_step(
            device_plan, *ours[:3], on_device, ours[3], n, logprobs=of_device, windows=windows, **given
        )  # fmt: skip
        step_inputs_cpu.finish_step(plan, *theirs[:3], sampled, theirs[3], n, logprobs=logprobs, windows=windows, **given)
        compare(ours, theirs, number)
        assert torch.equal(ours[3].cpu(), theirs[3]), number
    assert (seen[:4] > 0).all() and seen[4:].any(), seen
    assert (theirs[1].entries != 0).any() and logprob_record(NUM_TOP).width == 8


def compare(ours, theirs, number):
    expected = tensors(*theirs[:3])
    for name, x in tensors(*ours[:3]).items():
        assert torch.equal(x.cpu(), expected[name]), (number, name)


def compare_sharing(device, rows, seed):
    """More rows than the kernel takes at once, and every number of drafts."""
    from quire.kernels.step import windows

    rng = np.random.default_rng(seed)
    sides = []
    for place in (device, "cpu"):
        tables = SlotTables.allocate(rows, 1, 1, place, speculates=True)
        sides.append((tables, StepBuffers.allocate(8, rows, 1, place, rows + 3)))
    slots = torch.from_numpy(rng.permutation(rows).astype(np.int32))
    for most in (0, 1, rows // 2, 3 * rows, 7 * rows + 1, 20 * rows):
        length = torch.from_numpy(rng.integers(0, 50, rows + 1).astype(np.int32))
        final, window, valid = (
            torch.from_numpy(rng.integers(*x, rows + 1).astype(np.int32)) for x in ((1, 99), (1, 17), (0, 16))
        )
        survives = torch.from_numpy(-np.sort(-rng.integers(0, 1025, (rows + 1, MAX_WINDOW)).astype(np.int32)))
        plan = torch.zeros(200 + rows, dtype=torch.int32)
        words = {"num_decode_rows": rows, "window": int(rng.integers(2, 17)), "draft_tokens": most}
        for name, value in words.items():
            plan[HEADER.at[name]] = value
        if most % 2:
            plan[HEADER.at["num_row_windows"]], plan[HEADER.at["row_windows"]] = rows, len(plan) - rows
            plan[-rows:] = torch.from_numpy(rng.integers(1, 17, rows))
        for tables, _ in sides:
            tables.decode_slots[0, :rows] = slots.to(tables.seq_len.device)
            for name, column in (("final_len", final), ("max_window", window)):
                tables.column(name).copy_(column)
            tables.seq_len.copy_(length)
            tables.num_drafts.copy_(valid)
            if most > rows:  # else all rows have the same
                tables.survival[: rows + 1, MAX_WINDOW:].copy_(survives)
        windows.share_drafts(plan.to(device), *sides[0], rows + 3)
        windows_cpu.share_drafts(plan, *sides[1], rows + 3)
        tokens = sides[1][1].row_tokens
        assert torch.equal(sides[0][1].row_tokens.cpu(), tokens), most
        starts = torch.nn.functional.pad(tokens[:rows].cumsum(0), (1, 0))
        assert torch.equal(sides[0][1].query_start[: rows + 1].cpu(), starts.int())


def check_wild_plan(device):
    """Indices and counts out of range: nothing outside the tables is touched (interpreter and allocator would notice)."""
    from quire.kernels.speculation import accept
    from quire.kernels.step import step_inputs

    tables, pool, step, results = make_state(device)
    wild = 2**30
    for words in (make_plan(1, [{"slot": wild}], (), [wild, -3], [(wild, wild, [wild, -wild], 1)]), torch.full((600,), wild)):
        plan = words.int()
        for name in ("window", "draft_tokens", "mask_window", "num_row_windows", "row_windows"):
            plan[HEADER.at[name]] = wild
        plan = plan.to(device)
        tables.num_drafts.fill_(wild)
        tables.column("max_window").fill_(wild)
        step_inputs.prepare_step(plan, tables, step, 8, 5, windows=True, draft_words=results[:, DRAFT_WORDS], **SIZES)
        assert int(step.input_ids.min()) >= 0 and int(step.input_ids.max()) < VOCAB
        assert int(step.sample_slots.min()) >= 0 and int(step.sample_slots.max()) <= MAX_SEQS
        assert int(step.logits_indices.max()) < 8 and int(step.logits_indices.min()) >= 0
        sampled = torch.full((5,), wild, dtype=torch.int32, device=device)
        accept.accept(step, sampled, 5)
        step_inputs.finish_step(plan, tables, pool, step, sampled, results, 5, max_rows=MAX_SEQS, max_samples=9, windows=True)
        assert int(tables.last_token.max()) < VOCAB


@pytest.mark.interpret
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kernels_agree_with_the_cpu_path_in_the_interpreter(seed):
    compare_steps("cpu", 24, seed)


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [5, 300])
def test_drafts_are_shared_as_on_the_cpu_in_the_interpreter(rows):
    compare_sharing("cpu", rows, rows)


@pytest.mark.interpret
def test_wild_indices_are_clamped_in_the_interpreter():
    check_wild_plan("cpu")


@pytest.mark.gpu
def test_kernels_agree_with_the_cpu_path():
    compare_steps("cuda", 300, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 256, 300, 1000])
def test_drafts_are_shared_as_on_the_cpu(rows):
    compare_sharing("cuda", rows, rows)


@pytest.mark.gpu
def test_wild_indices_are_clamped():
    check_wild_plan("cuda")
    torch.cuda.synchronize()
