"""Requests for vectors in the core: what they are refused for, how their sequences end, and the messages of their results."""

import msgspec
import numpy as np
import pytest
from scheduler_harness import Harness

from quire.enginecore.intake import Intake, IntakeConfig
from quire.enginecore.kv.pool import BlockHasher
from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.pooled import pooled_messages
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.sequence import Sequence, SequenceState
from quire.enginecore.tasks.pool import PoolTask
from quire.enginecore.tasks.task import SideTarget
from quire.enginecore.tenants.backlog import Room
from quire.ipc.messages.frontend import AddRequest, EngineLimits, Generate, Pool, Pooled, RequestError, TokenInputs
from quire.ipc.messages.workers import PooledRows
from quire.ipc.pooling import VECTOR, LateInteraction, PoolingInfo, PoolingParams, PoolRow
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.late_queries import MAX_QUERY_BYTES, decode_queries
from quire.ipc.step.sections import PREFILL_POOL, PREFILL_POOL_END

INFO = PoolingInfo(["embed", "token_embed"], "LAST", embedding_size=8)
ROW = PoolRow("embed", 0, True)


def intake(info: PoolingInfo | None = INFO) -> Intake:
    limits = EngineLimits(16, 100, 4, 20, pooling=info)
    return Intake(IntakeConfig(limits, (), True, False, 0, 1000), BlockHasher(4))


def accept(task, ids, info: PoolingInfo | None = INFO):
    return intake(info).accept(0, AddRequest(1, 1, TokenInputs(np.asarray(ids, np.int32).tobytes()), task), Room())


def test_each_prompt_of_a_request_is_a_sequence_that_ends_with_it():
    sequences = accept(Pool(PoolingParams(), [3, 1, 16]), range(20))
    assert [seq.prompt.tolist() for seq in sequences] == [[0, 1, 2], [3], [*range(4, 20)]]
    assert [seq.final_len for seq in sequences] == [3, 1, 16] and [seq.key & 255 for seq in sequences] == [0, 1, 2]
    assert all(seq.blocks.may_hit for seq in sequences) and all(seq.expected_output == 0 for seq in sequences)


@pytest.mark.parametrize(
    ("pooling_type", "params", "may_hit"),
    [
        ("LAST", {}, True),
        ("MEAN", {}, False),
        ("CLS", {}, False),
        ("LAST", {"task": "token_embed"}, False),
        ("LAST", {"skip_reading_prefix_cache": True}, False),
    ],
)
def test_only_a_last_token_stands_on_cached_blocks(pooling_type, params, may_hit):
    info = msgspec.structs.replace(INFO, pooling_type=pooling_type)
    (seq,) = accept(Pool(PoolingParams(**params)), range(8), info)
    assert seq.blocks.may_hit is may_hit


@pytest.mark.parametrize(
    ("task", "ids", "info", "text"),
    [
        (Pool(PoolingParams(), [2, 2]), range(5), INFO, "lengths"),
        (Pool(PoolingParams(), [0, 5]), range(5), INFO, "lengths"),
        (Pool(PoolingParams(), [1] * 129), [1] * 129, INFO, "lengths"),
        (Pool(PoolingParams(), [2, 3], seconds=[1]), range(5), INFO, "seconds"),
        (Pool(PoolingParams(), [2, 3], seconds=[1, 3]), range(5), INFO, "seconds"),
        (Pool(PoolingParams()), range(17), INFO, "at most 16 fit"),
        (Pool(PoolingParams()), [100], INFO, "outside the vocabulary"),
        (Pool(PoolingParams(task="classify")), range(5), INFO, "cannot classify; it can embed, token_embed"),
        (Pool(PoolingParams(dimensions=4)), range(5), INFO, "was not trained to be cut"),
        (Pool(PoolingParams()), range(5), None, "does not make vectors or scores; it can generate"),
        (Generate(SamplingParams()), range(5), INFO, "does not generate; it has the tasks embed, token_embed"),
    ],
)
def test_what_a_request_is_refused_for(task, ids, info, text):
    refused = accept(task, ids, info)
    assert isinstance(refused, RequestError) and text in refused.message


def test_a_row_travels_as_one_word():
    scored = PoolRow("token_embed", 0, True, is_scored=True)
    for row in (ROW, PoolRow("token_classify", 65535, False), PoolRow("classify", 1, True), scored):
        assert PoolRow.of_word(row.word()) == row


def test_each_prompt_has_its_own_second_text():
    sequences = accept(Pool(PoolingParams(), [2, 3], seconds=[1, 2]), range(5))
    assert [seq.task.chunk(seq, 0, 2, 2).next_token for seq in sequences] == [1, 2]


LATE = PoolingInfo(["token_embed"], "MEAN", token_size=2, late=LateInteraction(1, 2, 4, 0, 3, True, False), is_whole=True)
QUERIES = [np.ones(n, np.float32).tobytes() for n in (2, 6)]


def test_each_document_is_compared_with_its_query():
    sequences = accept(Pool(PoolingParams(), [2, 3, 1], queries=QUERIES, query_of=[1, 0, 1]), range(6), LATE)
    chunks = [seq.task.chunk(seq, 0, len(seq.prompt), len(seq.prompt)) for seq in sequences]
    assert [chunk.query for chunk in chunks] == [QUERIES[1], QUERIES[0], QUERIES[1]]
    assert all(PoolRow.of_word(chunk.num_prompt_logprobs).is_scored for chunk in chunks)
    build = PlanBuilder(1, 0.0)
    for seq, chunk in zip(sequences, chunks, strict=True):
        build.add_prefill(seq, seq.prompt, 0, chunk, first_state=0, last_state=0)
    assert build.processor_words == 8  # each query once: this bounds a plan
    none = np.zeros(0, np.int32)
    found = decode_queries(build.finish(none, False, none, none).section("late_queries"))
    assert [(query.rows.tolist(), query.vectors.tolist()) for query in found] == [([0, 2], [1.0] * 6), ([1], [1.0] * 2)]


@pytest.mark.parametrize(
    ("info", "more", "text"),
    [
        (INFO, {"queries": QUERIES, "query_of": [0, 0]}, "of a model that compares these"),
        (LATE, {"queries": [b"1234"], "query_of": [0, 0]}, "vectors of 8 bytes"),
        (LATE, {"queries": [b""], "query_of": [0, 0]}, "vectors of 8 bytes"),
        (LATE, {"queries": [bytes(MAX_QUERY_BYTES + 8)], "query_of": [0, 0]}, "at most 262144 bytes"),
        (LATE, {"queries": QUERIES, "query_of": [0]}, "for each prompt"),
        (LATE, {"queries": QUERIES, "query_of": [0, 2]}, "for each prompt"),
        (LATE, {"queries": QUERIES, "query_of": [0, -1]}, "for each prompt"),
        (LATE, {"query_of": [0, 0]}, "for each prompt"),
    ],
)
def test_queries_that_do_not_fit_are_refused(info, more, text):
    refused = accept(Pool(PoolingParams(), [2, 3], **more), range(5), info)
    assert isinstance(refused, RequestError) and text in refused.message


def add(harness: Harness, prompt, row: PoolRow = ROW) -> Sequence:
    harness.count += 1
    number = harness.count
    seq = Sequence(
        owner=0, key=number << 8, request_id=number, child=0, task=PoolTask(row, []), prompt=np.asarray(prompt, np.int32),
        final_len=len(prompt), seed=0, order=(0, number), arrival_time=0.0,
        blocks=SequenceBlocks(harness.scheduler.kv.hasher.root(b"", b""), True),
    )  # fmt: skip
    harness.scheduler.add(seq)
    return seq


def schedule(harness: Harness):
    plan, step = harness.scheduler.schedule(1.0)
    harness.scheduler.check()
    return plan, step


def returned(harness: Harness, step):
    from quire.ipc.step.samples import Samples

    out = harness.scheduler.update(step, Samples.one_a_row(np.zeros(len(step.slots), np.int32)), 0.0)
    harness.scheduler.check()
    return out


def test_a_sequence_ends_with_its_last_chunk_and_has_no_token():
    harness = Harness(budget=8, max_model_len=32)
    seq = add(harness, range(1, 21))
    flags, steps = [], []
    for _ in range(3):
        plan, step = schedule(harness)
        flags.append(int(plan.prefill_rows["flags"][0]))
        steps.append(step)
    assert flags == [PREFILL_POOL, PREFILL_POOL, PREFILL_POOL | PREFILL_POOL_END]
    assert [list(step.side_rows) for step in steps] == [[], [], [0]]
    assert steps[2].side_rows[0] == SideTarget(0, 1, 16, 256, 0, True)
    assert harness.scheduler.schedule(1.0) is None  # nothing is left to compute
    for step in steps:
        assert seq.state is not SequenceState.FINISHED
        assert len(returned(harness, step).tokens) == 0
    assert seq.state is SequenceState.FINISHED and harness.scheduler.is_idle and harness.scheduler.kv.pool.num_used == 0


def test_a_prompt_fills_the_context_and_one_that_is_aborted_gives_all_back():
    harness = Harness(budget=64, max_model_len=32, num_blocks=9)
    first = add(harness, range(1, 33))
    _, step = schedule(harness)
    harness.scheduler.abort(0, first.request_id)
    returned(harness, step)
    assert harness.scheduler.is_idle and harness.scheduler.kv.pool.num_used == 0
    again = add(harness, range(1, 33))
    plan, step = schedule(harness)
    assert plan.prefill_rows["start"].tolist() == [28]  # all blocks but that of the last token were cached
    returned(harness, step)
    assert again.state is SequenceState.FINISHED


def test_one_message_for_a_frontend_and_an_error_for_what_is_no_number():
    data = np.arange(12, dtype=np.float32)
    data[5] = np.nan
    shapes = np.array([[VECTOR, 3], [VECTOR, 3], [2, 3]], np.int32)
    rows = PooledRows(np.array([4, 6, 9], np.int32).tobytes(), shapes.tobytes(), data.tobytes())
    assert rows.rows == [4, 6, 9]
    targets = {4: SideTarget(1, 7, 0, 7 << 8, 2), 6: SideTarget(1, 8, 0, 8 << 8), 9: SideTarget(2, 9, 5, 9 << 8 | 1, 0, False)}
    messages = pooled_messages(rows, targets, 3)
    assert [(owner, type(message)) for owner, message in messages] == [(1, RequestError), (1, Pooled), (2, Pooled)]
    (_, failed), (_, first), (_, second) = messages
    assert failed.id == 8 and "not a number" in failed.message
    assert np.frombuffer(first.keys, np.int64).tolist() == [7 << 8] and np.frombuffer(first.cached, np.int32).tolist() == [2]
    assert np.frombuffer(first.data, np.float32).tolist() == [0, 1, 2]
    assert np.frombuffer(second.shapes, np.int32).tolist() == [2, 3, 5, 0]
    assert np.frombuffer(second.data, np.float32).tolist() == [*range(6, 12)]
    assert pooled_messages(rows, {}, 3) == []
