"""Decode rows of a model in stages: dealt into cohorts whose steps go around, beside prompts that follow each other."""

import numpy as np
from scheduler_harness import Harness

from quire.enginecore.core import STEPS_OF_STAGE
from quire.enginecore.scheduling.cohorts import STEPS_OF_COHORT, Cohorts


def decoding(rows: int, cohorts: int = 2, **more) -> Harness:
    """A harness in which so many sequences have all their first token."""
    h = Harness(num_cohorts=cohorts, max_num_seqs=rows, num_blocks=40 * rows, budget=64, **{"max_model_len": 64, **more})
    for i in range(rows):
        h.add([i, i + 1, i + 2], 50, ignore_eos=True)
    while len(h.scheduler._decode) < rows:
        assert h.turn()
    while h.in_flight:
        h.collect()
    h.plans.clear()
    return h


def test_all_stages_have_two_steps_each():
    assert STEPS_OF_COHORT == STEPS_OF_STAGE


def test_steps_go_around_with_a_part_of_the_rows_each():
    h = decoding(8, cohorts=4)
    while h.schedule() is not None:
        pass
    assert len(h.in_flight) == 8 and sorted(plan.cohort for plan in h.plans[:4]) == [0, 1, 2, 3]
    assert [plan.cohort for plan in h.plans[4:]] == [plan.cohort for plan in h.plans[:4]]
    assert [len(plan.decode_rows) for plan in h.plans] == [2] * 8
    slots = [slot for plan in h.plans[:4] for slot in plan.decode_rows.tolist()]
    assert sorted(slots) == list(range(8)) and [plan.lag for plan in h.plans[4:]] == [4] * 4
    h.run()
    h.assert_right()


def test_a_cohorts_rows_are_sent_once():
    h = decoding(4)
    while not all(plan.same_decode_rows for plan in h.plans[-2:]) or len(h.plans) < 4:
        h.turn()
    assert {plan.cohort for plan in h.plans[-2:]} == {0, 1}  # neither was forgotten for the other
    h.scheduler.finish(0, h.sequences[1].key)
    h.plans.clear()
    while len(h.plans) < 2:
        h.turn()
    assert sorted(plan.same_decode_rows for plan in h.plans[:2]) == [False, True]


def test_one_row_has_two_steps_in_flight_and_no_more():
    """An end-of-sequence would cost all others."""
    h = decoding(1, cohorts=4)
    while h.schedule() is not None:
        pass
    assert len(h.in_flight) == 2 and [plan.lag for plan in h.plans][1] == 1
    h.run()
    h.assert_right()


def test_many_prompts_of_one_step_are_dealt_out():
    h = decoding(32, cohorts=4)
    for _ in range(4):
        h.schedule()
    sizes = [len(plan.decode_rows) for plan in h.plans]
    assert sum(sizes) == 32 and max(sizes) - min(sizes) <= 2


def test_rows_stay_where_they_came_from_while_cohorts_are_about_equal():
    """Who goes to another one has to wait once."""
    cohorts = Cohorts(2)

    def deal(rows: int) -> int:
        """-> how many of them stayed"""
        next(iter(cohorts.turns(returned=0)))
        before, first = len(cohorts.now.rows), 1000 * len(cohorts)
        cohorts.deal(np.arange(first, first + rows, dtype=np.int32))
        cohorts.check()
        return len(cohorts.now.rows) - before

    assert deal(4) == 2 and deal(60) in range(29, 33)
    assert [deal(3) for _ in range(4)] == [3, 3, 3, 3]
    assert deal(1) == 1 and len(cohorts) == 4 + 60 + 12 + 1


def test_chunks_of_a_prompt_follow_each_other_while_others_decode():
    """None of them waits for a token, so a step of prompts takes the turn of each cohort, though it be empty."""
    h = Harness(num_cohorts=2, max_num_seqs=4, num_blocks=400, budget=16, max_model_len=256)
    h.add([1, 2, 3], 200, ignore_eos=True)
    while not len(h.scheduler._decode):
        h.turn()
    while h.in_flight:
        h.collect()
    h.plans.clear()
    h.add(list(range(100)), 3)
    while len(h.in_flight) < 4:
        assert h.schedule() is not None
    assert [len(plan.decode_rows) for plan in h.plans] in ([1, 0, 1, 0], [0, 1, 0, 1])
    assert all(len(plan.prefill_tokens) for plan in h.plans)
    starts = [int(plan.prefill_rows["start"][0]) for plan in h.plans]
    assert starts == sorted(set(starts))
    h.run()
    h.assert_right()


def test_who_leaves_is_found_in_any_cohort():
    h = decoding(6, cohorts=3)
    for request in (1, 4):
        h.scheduler.finish(0, h.sequences[request].key)
        h.scheduler.check()
    assert sum(len(cohort.rows) for cohort in h.scheduler._decode.cohorts._all) == 4
    h.run()
    for name in h.finished:
        assert h.outputs[name] == h.expected(name)


def test_after_a_loss_of_workers_all_cohorts_send_their_rows_again():
    h = decoding(4)
    h.turn()
    h.in_flight.clear()
    h.scheduler.reset()
    assert all(cohort.sent is None for cohort in h.scheduler._decode.cohorts._all)
    assert len(h.scheduler._decode) == 0 and h.scheduler.is_idle
