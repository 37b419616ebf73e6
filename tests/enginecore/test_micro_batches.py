"""Decode rows of a model in stages: divided into micro-batches that take turns, beside prompts that follow each other."""

import numpy as np
from scheduler_harness import Harness

from quire.enginecore.core import STEPS_OF_STAGE
from quire.enginecore.scheduling.micro_batches import STEPS_OF_MICRO_BATCH, MicroBatches


def decoding(rows: int, micro_batches: int = 2, **more) -> Harness:
    """A harness in which so many sequences have all their first token."""
    h = Harness(
        num_micro_batches=micro_batches, max_num_seqs=rows, num_blocks=40 * rows, budget=64, **{"max_model_len": 64, **more}
    )
    for i in range(rows):
        h.add([i, i + 1, i + 2], 50, ignore_eos=True)
    while len(h.scheduler._decode) < rows:
        assert h.turn()
    while h.in_flight:
        h.collect()
    h.plans.clear()
    return h


def test_all_stages_have_two_steps_each():
    assert STEPS_OF_MICRO_BATCH == STEPS_OF_STAGE


def test_steps_go_around_with_a_part_of_the_rows_each():
    h = decoding(8, micro_batches=4)
    while h.schedule() is not None:
        pass
    assert len(h.in_flight) == 8 and sorted(plan.micro_batch for plan in h.plans[:4]) == [0, 1, 2, 3]
    assert [plan.micro_batch for plan in h.plans[4:]] == [plan.micro_batch for plan in h.plans[:4]]
    assert [len(plan.decode_rows) for plan in h.plans] == [2] * 8
    slots = [slot for plan in h.plans[:4] for slot in plan.decode_rows.tolist()]
    assert sorted(slots) == list(range(8)) and [plan.lag for plan in h.plans[4:]] == [4] * 4
    h.run()
    h.assert_right()


def test_the_rows_of_a_micro_batch_are_sent_once():
    h = decoding(4)
    while not all(plan.same_decode_rows for plan in h.plans[-2:]) or len(h.plans) < 4:
        h.turn()
    assert {plan.micro_batch for plan in h.plans[-2:]} == {0, 1}  # neither was forgotten for the other
    h.scheduler.finish(0, h.sequences[1].key)
    h.plans.clear()
    while len(h.plans) < 2:
        h.turn()
    assert sorted(plan.same_decode_rows for plan in h.plans[:2]) == [False, True]


def test_one_row_has_two_steps_in_flight_and_no_more():
    """An end-of-sequence would cost all others."""
    h = decoding(1, micro_batches=4)
    while h.schedule() is not None:
        pass
    assert len(h.in_flight) == 2 and [plan.lag for plan in h.plans][1] == 1
    h.run()
    h.assert_right()


def test_many_prompts_of_one_step_are_distributed():
    h = decoding(32, micro_batches=4)
    for _ in range(4):
        h.schedule()
    sizes = [len(plan.decode_rows) for plan in h.plans]
    assert sum(sizes) == 32 and max(sizes) - min(sizes) <= 2


def test_rows_stay_where_they_came_from_while_micro_batches_are_about_equal():
    """Who goes to another one has to wait once."""
    micro_batches = MicroBatches(2)

    def assign(rows: int) -> int:
        """-> how many of them stayed"""
        next(iter(micro_batches.turns(returned=0)))
        before, first = len(micro_batches.now.rows), 1000 * len(micro_batches)
        micro_batches.assign(np.arange(first, first + rows, dtype=np.int32))
        micro_batches.check()
        return len(micro_batches.now.rows) - before

    assert assign(4) == 2 and assign(60) in range(29, 33)
    assert [assign(3) for _ in range(4)] == [3, 3, 3, 3]
    assert assign(1) == 1 and len(micro_batches) == 4 + 60 + 12 + 1


def test_chunks_of_a_prompt_follow_each_other_while_others_decode():
    """None of them waits for a token, so a step of prompts takes the turn of each micro-batch, though it be empty."""
    h = Harness(num_micro_batches=2, max_num_seqs=4, num_blocks=400, budget=16, max_model_len=256)
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


def test_who_leaves_is_found_in_any_micro_batch():
    h = decoding(6, micro_batches=3)
    for request in (1, 4):
        h.scheduler.finish(0, h.sequences[request].key)
        h.scheduler.check()
    assert sum(len(micro_batch.rows) for micro_batch in h.scheduler._decode.micro_batches._all) == 4
    h.run()
    for name in h.finished:
        assert h.outputs[name] == h.expected(name)


def test_after_a_loss_of_workers_all_micro_batches_send_their_rows_again():
    h = decoding(4)
    h.turn()
    h.die()
    assert all(micro_batch.sent is None for micro_batch in h.scheduler._decode.micro_batches._all)
    assert len(h.scheduler._decode) == 0
    h.run()
    h.assert_right()
