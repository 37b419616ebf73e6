"""How prompts are spread over the steps of others' tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import Harness

from quire.enginecore.scheduling.prefill_budget import MIXED_STEP_TOKENS, mixed_step_tokens, prefill_budget
from quire.ipc.sampling import RequestOutputKind

BILLION = 10**9


def test_the_smaller_the_model_the_more_of_a_prompt_a_step_takes():
    assert mixed_step_tokens(16 * BILLION, "cuda") == mixed_step_tokens(140 * BILLION, "cuda") == MIXED_STEP_TOKENS
    assert mixed_step_tokens(BILLION, "cuda") == 16 * MIXED_STEP_TOKENS
    assert mixed_step_tokens(BILLION, "cpu") == MIXED_STEP_TOKENS


@pytest.mark.parametrize(
    ("num_decode", "new_streams", "num_tokens", "most", "expected"),
    [
        (12, 1, 200, 8000, 200),
        (12, 1, 268, 8000, 268),  # a tenth more than 244
        (12, 1, 270, 8000, 135),  # two equal steps
        (12, 2, 700, 8000, 350),  # half of much
        (12, 2, 700, 100, 100),
        (12, 13, 700, 8000, 8000),
        (200, 1, 130, 8000, 130),  # half of a step at least
        (1000, 1, 300, 8000, 150),
        (12, 0, 0, 8000, 244),  # nothing that could start: what may start after all has room
    ],
)
def test_how_much_goes_into_a_step_beside_decode_rows(num_decode, new_streams, num_tokens, most, expected):
    assert prefill_budget(num_decode, num_decode, new_streams, num_tokens, most, 256) == expected
    assert prefill_budget(num_decode, 0, new_streams, num_tokens, most, 256) == most  # nobody waits for a next token
    least = prefill_budget(num_decode, num_decode, new_streams, num_tokens, most, 256, 160)
    assert least == min(most, max(expected, 160)) or num_tokens == 0  # tokens that go together
    if 0 < new_streams <= num_decode:
        assert prefill_budget(num_decode, new_streams - 1, new_streams, num_tokens, most, 256) == most
        assert prefill_budget(num_decode, new_streams, new_streams, num_tokens, most, 256) == expected


@given(*(st.integers(low, high) for low, high in ((1, 2000), (0, 2000), (0, 2000), (0, 10**6), (1, 10**5), (0, 10**5))))
def test_a_step_takes_something_and_no_more_than_it_has_room_for(num_decode, streams, new_streams, num_tokens, most, target):
    assert 1 <= prefill_budget(num_decode, min(streams, num_decode), new_streams, num_tokens, most, target) <= most


def test_a_prompt_beside_decode_rows_is_spread_over_steps():
    h = Harness(num_blocks=200, budget=64, max_model_len=200, max_num_seqs=8, mixed_step_tokens=12)
    prompts = [[p] * length for p, length in enumerate((60, 100, 5, 30))]

    def chunks():
        return [n for n in [plan.num_tokens - len(plan.decode_rows) for plan in h.plans] if n]

    h.add(prompts[0], 40)
    while not h.outputs[1]:
        h.turn(depth=1)
    assert chunks() == [60]  # nobody waits for it
    h.add(prompts[1], 30)
    while not h.outputs[2]:
        h.turn(depth=1)
    # half of what waits, then about 12 less the decode row; all while the first decodes
    assert chunks()[1:] == [50, 25, 12, 7, 6]
    h.plans.clear()
    h.add(prompts[2], 30)
    h.add(prompts[3], 30)
    while not h.outputs[4]:
        h.turn(depth=1)
    assert chunks() == [17, 9, 9]  # of both together; then a third row decodes
    h.run()
    h.assert_right()


def test_only_what_can_start_counts_as_waiting():
    def first_chunk(max_num_seqs=8, more=(), **params):
        """Prefill tokens of the step after a prompt of 60, and `more` behind it, came beside one decode row."""
        h = Harness(num_blocks=400, budget=64, max_model_len=200, max_num_seqs=max_num_seqs, mixed_step_tokens=12)
        h.add([1], 40)
        while not h.outputs[1]:
            h.turn(depth=1)
        h.add([2] * 60, 5, **params)
        for prompt in more:
            h.add(prompt, 5)
        plan, _ = h.schedule()
        h.run()
        h.assert_right()
        return plan.num_tokens - len(plan.decode_rows)

    others = [[3 + n] * 60 for n in range(4)]
    assert first_chunk() == 30
    assert first_chunk(more=others[:1]) == 63  # more than there are decode rows: all that the step has room for
    assert first_chunk(more=others, max_num_seqs=2) == 30  # they have no slot
    assert first_chunk(n=4) == 30  # one computes the prompt for all


@pytest.mark.parametrize(("length", "expected"), [(9, [9]), (12, [12]), (13, [7, 6]), (22, [11, 11])])
def test_a_prompt_takes_equal_steps_and_none_for_a_rest(length, expected):
    h = Harness(num_blocks=200, budget=64, max_model_len=200, max_num_seqs=8, mixed_step_tokens=12)
    h.add([1], 40)
    while not h.outputs[1]:
        h.turn(depth=1)
    h.plans.clear()
    h.add([2] * length, 5)
    while not h.outputs[2]:
        h.turn(depth=1)
    assert [n for n in [plan.num_tokens - len(plan.decode_rows) for plan in h.plans] if n] == expected


@pytest.mark.parametrize(("num_prompts", "expected"), [(1, 20), (3, 60), (4, 125)])
def test_where_more_wait_for_their_first_token_than_for_their_next_all_goes_at_once(num_prompts, expected):
    h = Harness(num_blocks=400, budget=128, max_model_len=200, max_num_seqs=8, mixed_step_tokens=12)
    for n in range(3):
        h.add([n], 40)
    while not all(h.outputs[n] for n in (1, 2, 3)):
        h.turn(depth=1)
    for n in range(num_prompts):
        h.add([10 + n] * 40, 5)
    plan, _ = h.schedule()
    assert (plan.num_tokens - len(plan.decode_rows), len(plan.decode_rows)) == (expected, 3)
    h.run()
    h.assert_right()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("num_streams", "new_streams", "expected"),
    [(0, 0, 60), (0, 2, 60), (1, 2, 60), (1, 1, 30), (1, 0, 30), (2, 2, 30), (3, 2, 30)],
)
def test_only_whose_tokens_are_read_as_they_come_wait_for_them(num_streams, new_streams, expected, stages):
    kinds = [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]
    kinds[num_streams:] = [RequestOutputKind.FINAL_ONLY] * (3 - num_streams)
    h = Harness(num_blocks=400, budget=128, max_model_len=200, max_num_seqs=8, mixed_step_tokens=12, num_micro_batches=stages)
    for n, kind in enumerate(kinds):
        h.add([n], 40, output_kind=kind)
    while not all(h.outputs[n] for n in (1, 2, 3)):
        h.turn(depth=1)
    for n in range(2):
        h.add([10 + n] * 30, 5, output_kind=RequestOutputKind.DELTA if n < new_streams else RequestOutputKind.FINAL_ONLY)
    plan, _ = h.schedule()
    assert plan.num_tokens - len(plan.decode_rows) == expected
    h.run()
    h.assert_right()


def test_an_aborted_prompt_that_had_no_room_hides_nobody():
    h = Harness(num_blocks=60, budget=64, max_model_len=200, max_num_seqs=8, mixed_step_tokens=12)
    h.add([1] * 60, 100)
    while not h.outputs[1]:
        h.turn(depth=1)
    big = h.add([2] * 150, 20)
    h.turn(depth=1)
    assert not h.outputs[big]
    h.scheduler.abort(0, h.sequences[big].request_id)
    for n in range(3):
        h.add([3 + n] * 20, 4)
    plan, _ = h.schedule()
    assert plan.num_tokens - len(plan.decode_rows) == 60  # three prompts, more than there are decode rows


def test_many_decode_rows_leave_a_prompt_its_least():
    h = Harness(num_blocks=200, budget=64, max_model_len=200, max_num_seqs=16, mixed_step_tokens=12)
    for n in range(10):
        h.add([n], 50)
    for _ in range(4):
        h.turn(depth=1)
    h.plans.clear()
    h.add([11] * 20, 5)
    while not h.outputs[11]:
        h.turn(depth=1)
    assert [plan.num_tokens - len(plan.decode_rows) for plan in h.plans] == [10, 5, 5]
    assert all(len(plan.decode_rows) == 10 for plan in h.plans)
    h.run()
    h.assert_right()


@pytest.mark.parametrize("threshold", [1, 7, 16, 40])
def test_no_step_takes_more_of_one_prompt_than_the_threshold(threshold):
    h = Harness(num_blocks=200, budget=40, max_model_len=200, max_num_seqs=8, long_prefill_token_threshold=threshold)
    for name, length in enumerate((100, 3, 60)):
        h.add([name] * length, 5)
    h.run()
    chunks = [length for plan in h.plans for length in plan.prefill_rows["length"].tolist()]
    assert max(chunks) == threshold and sum(chunks) == 163
    assert len(h.plans[0].prefill_rows) == (3 if threshold <= 16 else 1)  # what one may not have is the others'
