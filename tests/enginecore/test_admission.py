"""Who is let in, in what order, and how much work a step may spend on that: counted, not timed."""

import os
from pathlib import Path

import pytest
from scheduler_harness import Harness

from quire.enginecore.kv.pool import BlockHasher
from quire.enginecore.scheduling import admission
from quire.enginecore.scheduling.sequence import SequenceState


def run_until(h, done, limit=2000):
    for turns in range(limit):
        if done():
            return turns
        h.turn()
    raise AssertionError("it never came about")


# --------------------------------------------------------------------------------------------------- shared prefixes
def count_calls(monkeypatch, owner, name):
    calls, real = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **more: calls.append(args) or real(*args, **more))
    return calls


def test_who_shares_a_new_prefix_is_looked_at_twice_however_long_it_takes(monkeypatch):
    """300 requests behind one new prefix of 60k tokens: each was looked up again after each of its chunks, 66 ms a step."""
    h = Harness(num_blocks=600, max_num_seqs=40, budget=8, max_model_len=256)
    names = [h.add([*range(50), *range(50), n], 3) for n in range(30)]
    lookups = count_calls(monkeypatch, h.scheduler.kv, "find_prefix")
    h.turn(depth=1)
    while h.sequences[names[0]].state is SequenceState.PREFILL:
        h.turn(depth=1)
        assert len(lookups) <= 30  # the first was let in, the others stand aside
    assert len([p for p in h.plans if len(p.prefill_rows)]) > 10
    h.run()
    assert len(lookups) == 30 + 29
    assert [h.sequences[n].num_cached_tokens for n in names] == [0] + [100] * 29
    h.assert_right()


def test_those_behind_who_shares_a_prefix_go_on():
    h = Harness(num_blocks=600, max_num_seqs=40, budget=64, max_model_len=256)
    sharing = [h.add([*range(50), n], 3) for n in range(20)]
    other = h.add([7, 7], 3)
    _, step = h.schedule()
    assert [seq.key >> 8 for seq, _ in step.prefills] == [sharing[0], other]
    h.run()
    h.assert_right()


def test_when_the_one_that_computes_a_prefix_is_aborted_another_does():
    h = Harness(num_blocks=600, max_num_seqs=8, budget=8, max_model_len=256)
    names = [h.add([*range(50), n], 3) for n in range(4)]
    h.turn()
    h.scheduler.abort(0, names[0])
    h.run()
    assert set(h.finished) == set(names[1:])
    assert [h.sequences[n].num_cached_tokens for n in names[1:]][1:] == [48, 48]
    h.assert_right()


# ---------------------------------------------------------------------------------------------------- work of a step
@pytest.fixture
def small_steps(monkeypatch):
    """Four looks a step, or twenty blocks hashed, or forty found."""
    monkeypatch.setattr(admission, "MAX_WORK", 40)
    monkeypatch.setattr(admission, "LOOK_WORK", 10)


@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_step_looks_at_so_many_and_the_next_ones_go_on(small_steps, monkeypatch, look_ahead):
    h = Harness(num_blocks=400, max_num_seqs=64, budget=512, look_ahead=look_ahead)
    names = [h.add([n, 1], 40) for n in range(30)]
    lookups, seen = count_calls(monkeypatch, h.scheduler.kv, "find_prefix"), 0
    while h.turn(depth=1):
        assert len(lookups) - seen <= 4
        seen = len(lookups)
        if len(h.finished) == 30:
            break
    assert seen == 30
    admitted = [len(p.prefill_rows) for p in h.plans]
    assert admitted[:8] == [4] * 7 + [2]  # prompts of two tokens are not hashed
    assert set(h.finished) == set(names)
    h.assert_right()


def test_a_long_prompt_is_hashed_over_several_steps(small_steps, monkeypatch):
    h = Harness(num_blocks=400, block_size=4, max_num_seqs=4, budget=512, max_model_len=512)
    first = h.add([1, 2], 60)
    run_until(h, lambda: h.outputs[first])
    hashed = []
    extend = BlockHasher.extend
    monkeypatch.setattr(BlockHasher, "extend", lambda *args, **more: hashed.append(extend(*args, **more)) or hashed[-1])
    long = h.add([n % 50 for n in range(400)], 3)  # 100 blocks
    steps = 0
    while not h.outputs[long]:
        before, decoded = sum(hashed), len(h.outputs[first])
        h.turn(depth=1)
        assert sum(hashed) - before <= 22  # and one block that the other row fills
        assert len(h.outputs[first]) == decoded + 1, "decode rows wait for the hashes"
        steps += 1
    assert 5 <= steps <= 8
    h.run()
    h.assert_right()


@pytest.mark.parametrize("depth", [1, 2])
def test_where_nothing_runs_a_long_prompt_is_hashed_at_once(small_steps, depth):
    """No result would come that schedules the next step."""
    h = Harness(num_blocks=400, block_size=4, max_num_seqs=4, budget=512, max_model_len=512)
    h.add([n % 50 for n in range(400)], 3)
    assert h.schedule() is not None
    h.run(depth)
    h.assert_right()


def test_prompts_with_one_beginning_are_hashed_once():
    hasher, root = BlockHasher(4), b"r"
    ids = [list(range(60)), [*range(40), 1, *range(41, 60)], [9, *range(1, 60)]]
    h = Harness(num_blocks=400, block_size=4, max_model_len=128)
    names = [h.add(prompt, 2) for prompt in ids]
    h.run()
    for name in names:
        chain = []
        h.scheduler.kv.hasher.extend(chain, h.sequences[name].blocks.root_hash, h.sequences[name].prompt)
        assert h.sequences[name].blocks.hashes[: len(chain)] == chain
    prompts = [h.sequences[name].prompt for name in names]
    chains = [[] for _ in prompts]
    assert [hasher.begin(chain, root, prompt) for chain, prompt in zip(chains, prompts, strict=True)] == [1, 1, 1]
    hasher.extend(chains[0], root, prompts[0])
    again, other = [], []
    assert hasher.begin(again, root, prompts[0].copy()) == 15 and again == chains[0]
    assert hasher.begin(other, root, prompts[1]) == 10 and other == chains[0][:10]
    assert hasher.begin([], b"another", prompts[0]) == 1


def test_a_full_batch_of_short_prompts_is_limited_by_tokens():
    h = Harness(num_blocks=20_000, block_size=64, max_num_seqs=512, budget=8192, max_model_len=128)
    for n in range(512):
        h.add([n % 50, *[n // 50] * 79], 2)
    assert [len(h.schedule()[0].prefill_rows) for _ in range(2)] == [103, 102]  # the last in part, then beside 102 decode rows
    h.run()
    h.assert_right()


def test_short_sequences_of_a_long_context_take_little_memory():
    """Huge pages: 1,024 short ones took 512 MiB, and clearing that was most of the 275 ms of the step that admitted them."""

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    h = Harness(num_blocks=400, max_num_seqs=256, budget=512, max_model_len=131_072)
    before = resident_bytes()
    for n in range(256):
        h.add([n % 50], 1)
    assert len(h.schedule()[0].prefill_rows) > 100
    assert resident_bytes() - before < 32 << 20  # 128 MiB if all of a huge page is taken
    h.run()
