"""Recurrent states and their checkpoints under the scheduler: where prefixes are found again, and what is given up first."""

import pytest
from fake_worker import solo_output
from late_checkpoints import keep_late
from scheduler_harness import VOCAB, Harness

from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.kv.states import States
from quire.ipc.messages.frontend import TokenInputs
from quire.ipc.speculative_config import SpeculativeConfig

DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=15)


def engine(**changes):
    usual = {"num_blocks": 800, "block_size": 16, "num_states": 40, "max_model_len": 2048, "budget": 256}
    return Harness(**usual | changes)


def tokens(seed, count):
    return [(seed * 7 + i * i) % VOCAB for i in range(count)]


def found(h, prompt, max_tokens=3, **more):
    """How many tokens of a prompt are cached."""
    name = h.add(prompt, max_tokens, **more)
    h.run()
    h.assert_right()
    return h.sequences[name].num_cached_tokens


@pytest.mark.parametrize(("length", "second"), [(640, 576), (641, 640), (64, 0), (65, 64), (700, 640), (40, 0)])
def test_a_prompt_asked_twice_is_found_up_to_the_last_place_before_its_end(length, second):
    h = engine()
    assert [found(h, tokens(1, length)) for _ in range(3)] == [0, second, second]


BLOCK_SIZES = [16, 32, 64, 128, 256]
ALL_BUDGETS = [7, 32, 48, 63, 64, 65, 100, 128, 150, 256, 1000]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    ("budget", "lengths"),
    [
        *((budget, [1, 64, 65, 128, 200, 257]) for budget in (48, 64, 100)),
        *(pytest.param(budget, range(1, 401), marks=pytest.mark.slow) for budget in ALL_BUDGETS),
    ],
)
def test_a_prompt_of_any_length_is_found_to_its_last_place(block_size, budget, lengths):
    """Asked twice, and continued: only steps with less room than a chunk of the kernels leave nothing."""
    period, h = max(64, block_size), engine(block_size=block_size, num_blocks=3200 // block_size, budget=budget)
    for n in lengths:
        prompts = tokens(1, n), tokens(1, n), tokens(1, n) + tokens(2, 40)
        cached = []
        for prompt in prompts:
            name = h.add(prompt, max_tokens=1, salt=b"%d" % n)
            h.run()
            cached.append(h.sequences[name].num_cached_tokens)
        assert cached == ([0, (n - 1) // period * period, n // period * period] if budget >= 64 else [0, 0, 0])


@pytest.mark.parametrize("speculation", [None, DRAFTS])
@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("block_size", [16, 128])
def test_an_answer_is_found_to_the_last_place_that_is_computed(block_size, is_stopped, speculation):
    """All tokens but the last are computed. An answer that has its most tokens is in no further step."""
    period, h = max(64, block_size), engine(block_size=block_size, num_blocks=6400 // block_size, speculation=speculation)
    for n, m in (
        (1, 64),
        (30, 34),
        (30, 35),
        (30, 36),
        (63, 66),
        (63, 67),
        (100, 28),
        (100, 29),
        (129, 64),
        (192, 1),
        (192, 2),
    ):
        name = h.add(tokens(1, n), m, salt=b"%d %d" % (n, m))
        h.run()
        out = h.outputs[name]
        if is_stopped and out[-1] not in out[:-1]:
            name = h.add(tokens(1, n), m + 50, salt=b"%d %d" % (m, n), stop_token_ids=[out[-1]])
            h.run()
            assert h.outputs[name] == out
        salt = b"%d %d" % ((m, n) if is_stopped else (n, m))
        if not is_stopped or out[-1] not in out[:-1]:
            assert found(h, tokens(1, n) + out + tokens(3, 70), salt=salt) == (n + m - 1) // period * period


def test_a_sequence_that_never_ran_keeps_nothing():
    states = States(4, 16)
    held = SequenceBlocks(b"", True, hashes=[b"%d" % i for i in range(8)])
    states.take(held, 128)
    held.num_registered = 8
    states.keep_own(held, 128)
    states.free(held)
    assert states.num_used == 0 and states.count_hits(held.hashes, 8) == 0


def test_a_continued_prompt_is_found_to_its_end_where_that_is_a_place():
    h = engine()
    assert found(h, tokens(1, 640), max_tokens=1) == 0
    assert found(h, tokens(1, 640) + tokens(2, 50)) == 640


def test_a_system_prompt_is_found_at_the_third_request_and_with_a_mark_at_the_second():
    system, h = tokens(1, 480), engine()
    assert [found(h, system + tokens(i, 100)) for i in (2, 3, 4, 5)] == [0, 0, 448, 448]
    h = engine()
    assert [found(h, system + tokens(i, 100), marks=(480,)) for i in (2, 3, 4)] == [0, 448, 448]


def test_marks_beyond_the_prompt_are_passed_over():
    h = engine()
    assert found(h, tokens(1, 300), marks=(-5, 0, 299, 300, 301, 1 << 70)) == 0
    assert found(h, tokens(1, 300), marks=(100,)) == 256


def test_marks_have_a_default():
    assert TokenInputs(b"").marks == []


def test_a_conversation_is_found_to_the_newest_place_of_its_answers():
    h, conversation, hits, total = engine(), tokens(1, 100), 0, 0
    for turn in range(8):
        name = h.add(conversation, 150)
        h.run()
        hits, total = hits + h.sequences[name].num_cached_tokens, total + len(conversation)
        conversation = conversation + h.outputs[name] + tokens(turn, 60)
    h.assert_right()
    assert hits >= total - 8 * (60 + 64) - 100


def test_those_that_come_together_wait_for_the_first_ones_state():
    """They have 400 tokens in common: once one has left a state within them, the others begin with it."""
    h = engine(max_num_seqs=6)
    names = [h.add(tokens(1, 400) + tokens(i, 50)) for i in range(2, 7)]
    h.run()
    h.assert_right()
    cached = [h.sequences[name].num_cached_tokens for name in names]
    assert cached[0] == 0 and cached[3:] == [384, 384]


def test_a_prefix_of_another_salt_is_not_found():
    h = engine()
    assert found(h, tokens(1, 300), salt=b"a") == 0
    assert found(h, tokens(1, 300), salt=b"b") == 0
    assert found(h, tokens(1, 300), salt=b"a") == 256


@pytest.mark.parametrize("how", ["reset", "death"])
def test_what_is_forgotten_is_not_found(how):
    h = engine()
    assert found(h, tokens(1, 300)) == 0
    if how == "reset":
        h.scheduler.kv.forget_all()
    else:
        h.die()
    h.scheduler.check()
    assert found(h, tokens(1, 300)) == 0
    assert found(h, tokens(1, 300)) == 256


def test_a_checkpoint_goes_with_its_block():
    h = engine(num_blocks=60)  # of 16 tokens
    assert found(h, tokens(1, 300)) == 0
    assert found(h, tokens(2, 800)) == 0  # takes the blocks
    assert found(h, tokens(1, 300)) == 0


@pytest.mark.parametrize("speculation", [None, DRAFTS])
def test_a_preempted_sequence_goes_on_from_its_newest_checkpoint(speculation):
    h = engine(num_blocks=21, look_ahead=False, max_num_seqs=2, speculation=speculation)
    first, second = h.add(tokens(1, 100), 150), h.add(tokens(2, 100), 150)
    h.run()
    h.assert_right()
    assert h.scheduler.counters.preemptions > 0
    starts = [row[1] for plan in h.plans for row in plan.prefill_rows.tolist()]
    assert any(start >= 64 and start % 64 == 0 for start in starts[2:]) and {first, second} == set(h.finished)


@pytest.mark.parametrize("budget", [7, 32, 48])
def test_small_budgets_leave_nothing_and_end_all(budget):
    h = engine(budget=budget)
    assert [found(h, tokens(1, 300), max_tokens=2) for _ in range(2)] == [0, 0]


def test_chunks_end_at_places_and_strangers_share_a_step():
    h = engine(budget=150, max_num_seqs=3)
    for i in range(3):
        h.add(tokens(i, 500))
    h.run()
    h.assert_right()
    for plan in h.plans:
        for _, start, length, flags, *_ in plan.prefill_rows.tolist():
            assert flags & 1 or (start + length) % 64 == 0


def test_a_chain_keeps_its_ends_and_forks_when_states_are_short():
    """Conversations of one system prompt with four states for all: the shared part and the newest ends stay."""
    h = engine(num_states=7, max_num_seqs=1)
    system = tokens(1, 512)
    for i in range(2, 6):
        found(h, system + tokens(i, 600))
    assert found(h, system + tokens(9, 100)) == 512


def test_a_pool_too_small_is_refused():
    with pytest.raises(ValueError, match="at least 3 states"):
        States(2, 16)


def test_admission_waits_for_states():
    h = engine(num_states=3, max_num_seqs=6)
    names = [h.add(tokens(i, 70), 20) for i in range(6)]
    h.run()
    assert max(len(plan.decode_rows) + len(plan.prefill_rows) for plan in h.plans) <= 2
    assert all(h.outputs[n] == solo_output(h.sequences[n].prompt.tolist(), 90, set(), VOCAB) for n in names)


def test_children_of_a_request_begin_with_its_prompts_state():
    h = engine(enable_prefix_caching=False)
    name = h.add(tokens(1, 300), 4, n=3)
    h.run()
    h.assert_right()
    assert [h.sequences[name + i].num_cached_tokens for i in range(3)] == [0, 256, 256]


def test_a_checkpoint_of_one_block_later_is_seen():
    h = engine(budget=1000)
    keep_late(h.scheduler.kv.states, 16)
    assert found(h, tokens(1, 300)) == 0
    with pytest.raises(AssertionError, match="reads another state"):
        found(h, tokens(1, 300))
