"""PlanBuilder: what the scheduler has decided, as the sections of a plan that comes back from its words."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.scheduling.plan_builder import PlanBuilder, logits_processors_of, slot_words
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.tasks.generate import GenerateTask
from quire.enginecore.tasks.task import Chunk, SideTarget
from quire.ipc.messages.frontend import sequence_key
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.plan import StepPlan, decode_logits_processors, decode_plan
from quire.ipc.step.sections import (
    MAX_BAD_WORD_TOKENS,
    PREFILL_PROMPT_LOGPROBS,
    PREFILL_SAMPLE,
    SAMPLING_LOGPROBS,
    SAMPLING_RANDOM,
)

NO_ROWS = np.zeros(0, np.int32)
PROMPT = np.arange(20, 30, dtype=np.int32)


def sequence(request_id: int = 1, slot: int = 0, ends: tuple[int, ...] = (), **params: Any) -> Sequence:
    """One with a slot, of PROMPT; ends: every id that ends it."""
    return Sequence(
        owner=7,
        key=sequence_key(request_id, 0),
        request_id=request_id,
        child=0,
        task=GenerateTask(SamplingParams(**params), min_tokens_stop_ids=list(ends)),
        prompt=PROMPT,
        final_len=40,
        seed=5,
        order=(0, request_id),
        arrival_time=0.0,
        blocks=SequenceBlocks(b"", True, may_hit=True),
        slot=slot,
    )


def chunk(
    build: PlanBuilder, seq: Sequence, start: int, end: int, flags: int = 0, next_token: int = -1, num_top: int = 0
) -> None:
    ids = seq.prompt[start:end]
    states = {"first_state": 0, "last_state": 0}
    build.add_prefill(seq, ids, start, Chunk(flags, next_token, num_top), **states)


def sent(plan: StepPlan, last_decode_rows: np.ndarray = NO_ROWS) -> StepPlan:
    """As a worker reads it."""
    return decode_plan(plan.encode(), last_decode_rows)


def finished(
    build: PlanBuilder, decode: Iterable[int] = (), lengths: Iterable[int] = (), kinds: Iterable[int] = ()
) -> StepPlan:
    """lengths: of all rows, as the scheduler gives them; kinds: of those that sample."""
    rows, kinds_of, lengths_of = (np.fromiter(x, np.int32) for x in (decode, kinds, lengths))
    return build.finish(rows, False, kinds_of, lengths_of)


def test_a_step_of_decode_rows_holds_nothing_else():
    plan = sent(finished(PlanBuilder(9, 0.0), [3, 1], [12, 17], [SAMPLING_RANDOM, SAMPLING_LOGPROBS]))
    assert plan.sections.keys() == {"decode_rows"} and plan.decode_rows.tolist() == [3, 1]
    assert (plan.step, plan.max_seq_len, plan.sampling_kind) == (9, 17, SAMPLING_RANDOM | SAMPLING_LOGPROBS)
    assert (plan.num_rows, plan.num_tokens, plan.has_mask_rows, plan.wants_prompt_logprobs) == (2, 2, False, False)


def test_decode_rows_that_the_workers_hold_are_only_counted():
    rows = np.asarray([3, 1], np.int32)
    build = PlanBuilder(9, 0.0)
    plan = build.finish(rows, True, np.zeros(2, np.int32), np.asarray([4, 5], np.int32))
    assert len(plan.encode()) == len(sent(plan, rows).encode()) < len(finished(build, [3, 1], [4, 5]).encode())
    assert sent(plan, rows).decode_rows is rows


def test_chunks_are_rows_with_their_tokens_one_after_the_other():
    build, first, second = PlanBuilder(2, 0.0), sequence(1, slot=4), sequence(2, slot=0)
    chunk(build, first, 2, 7, next_token=27, num_top=3)
    chunk(build, second, 8, 10, PREFILL_SAMPLE)
    plan = sent(finished(build, [1], [30, 11, 12], [SAMPLING_RANDOM]))
    rows = plan.prefill_rows
    assert plan.prefill_tokens.tolist() == [22, 23, 24, 25, 26, 28, 29]
    assert [rows[name].tolist() for name in ("slot", "start", "length")] == [[4, 0], [2, 8], [5, 2]]
    assert [rows[name].tolist() for name in ("flags", "next_token", "num_prompt_logprobs")] == [
        [0, PREFILL_SAMPLE],
        [27, -1],
        [3, 0],
    ]
    assert build.samples == [False, True] and build.prefills == [(first, 7), (second, 10)]
    assert (plan.num_rows, plan.num_tokens) == (3, 8)


def test_the_longest_row_is_a_decode_rows_length_or_a_chunks_end():
    for decode_length in (3, 30):
        build = PlanBuilder(1, 0.0)
        chunk(build, sequence(slot=2), 0, 7)
        plan = finished(build, [1], [decode_length, 99])  # a prompt is not computed whole: its row's length does not count
        assert plan.max_seq_len == max(decode_length, 7)


def test_rows_with_prompt_logprobs_are_remembered_by_their_row_of_the_step():
    build = PlanBuilder(1, 0.0)
    chunk(build, sequence(1, slot=0), 0, 4)
    chunk(build, sequence(2, slot=1), 4, 10, PREFILL_SAMPLE | PREFILL_PROMPT_LOGPROBS)
    assert build.side_rows(first_prefill_row=5) == {6: SideTarget(7, 2, 5)}  # the chunk's first logprob is its second token's
    assert sent(finished(build)).wants_prompt_logprobs


def test_slots_and_blocks_come_by_name():
    build = PlanBuilder(1, 0.0)
    build.slot_updates += [slot_words(sequence(1, slot=6, temperature=0.5)), slot_words(sequence(2, slot=2, top_k=9))]
    build.block_updates += [(6, 0, 11), (2, 3, 12)]
    plan = sent(finished(build, [0], [1]))
    slots, blocks = plan.section("slot_updates"), plan.section("block_updates")
    assert slots["slot"].tolist() == [6, 2] and slots["top_k"].tolist() == [0, 9] and slots["temperature"][0] == 0.5
    assert [blocks[name].tolist() for name in ("table", "index", "block")] == [[6, 2], [0, 3], [11, 12]]


def test_processors_come_one_after_the_other_and_their_words_are_counted():
    build = PlanBuilder(1, 0.0)
    some = [sequence(1, slot=3, logit_bias={5: 1.5, 9: -2.0}), sequence(2, slot=1, bad_words_token_ids=[[4], [1, 2, 3]])]
    for seq in some:
        build.add_processors(logits_processors_of(seq, PROMPT))
    words = sent(finished(build, [0], [1])).section("logits_processors")
    first, second = decode_logits_processors(words)
    assert len(words) == build.processor_words
    assert (first.slot, second.slot) == (3, 1)
    assert list(first.bias_ids) == [5, 9] and list(first.bias_values) == [1.5, -2.0] and second.bad_words == [[4], [1, 2, 3]]
    assert not len(first.bad_words) and not len(second.bias_ids)


def test_a_sequence_brings_along_as_much_of_its_past_as_its_processors_look_at():
    outputs = np.arange(100, 100 + 2 * MAX_BAD_WORD_TOKENS, dtype=np.int32)
    known = np.concatenate([PROMPT, outputs])
    with_penalties = logits_processors_of(sequence(presence_penalty=1.0), known)
    assert list(with_penalties.prompt_ids) == PROMPT.tolist() and list(with_penalties.output_ids) == outputs.tolist()
    without = logits_processors_of(sequence(bad_words_token_ids=[[1]]), known)
    assert not len(without.prompt_ids) and list(without.output_ids) == outputs[-MAX_BAD_WORD_TOKENS:].tolist()


def test_stop_ids_are_sent_if_they_are_kept_away_for_a_while():
    assert logits_processors_of(sequence(ends=(2, 8), min_tokens=3), PROMPT).stop_ids == [2, 8]
    assert logits_processors_of(sequence(ends=(2, 8), logit_bias={1: 1.0}), PROMPT).stop_ids == []
