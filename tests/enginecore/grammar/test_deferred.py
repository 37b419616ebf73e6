"""A grammar with slow masks delays only its own sequence: others run on beside it, and its output is the same."""

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from core_by_hand import EPOCH
from core_with_model import CoreWithModel, Output

from quire.enginecore.grammar import deferred, mask_threads, masks
from quire.enginecore.scheduling.step import ScheduledStep, StepOutput
from quire.ipc.messages.frontend import Abort, Finish, Finished, RequestError
from quire.ipc.process.loop_clock import LoopClock
from quire.ipc.sampling import SamplingParams
from quire.ipc.structured_outputs import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = StructuredOutputs("json", json.dumps(SCHEMA))
AMBIGUOUS = StructuredOutputs("grammar", 'start: s\ns: s s | "a" | "b" s')
PROMPT = "Who is it? Tell me the name and the age, and nothing else that you may know of that person."


def params(wanted: StructuredOutputs | None = PERSON, **fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "temperature": 0.0, "structured_outputs": wanted, **fields})


CACHES = ({}, {"enable_prefix_caching": False})


@pytest.fixture(scope="module", params=CACHES, ids=["cached", "uncached"])
def engine(request) -> Iterator[CoreWithModel]:
    made = CoreWithModel(**request.param)
    yield made
    made.close()


class Withheld:
    """Works of one request, which its threads are not given; it does not end for that, however long others take beside it."""

    def __init__(self, engine: CoreWithModel, request_id: int, monkeypatch) -> None:
        self.threads = engine.core._grammar._threads
        self.works: list = []
        self.request_id, self._submit = request_id, self.threads.submit
        monkeypatch.setattr(self.threads, "submit", self._sort)
        monkeypatch.setattr(deferred, "MASK_TIMEOUT_S", 3600.0)

    def _sort(self, works) -> None:
        self.works += [w for w in works if w.seq.request_id == self.request_id]
        if others := [w for w in works if w.seq.request_id != self.request_id]:
            self._submit(others)

    def let_go(self) -> None:
        self.request_id = -1
        self._submit(self.works)


def plain(engine: CoreWithModel, **fields) -> list[int]:
    return ids_of(engine.run(PROMPT, params(**fields)))


def ids_of(result: list[Output] | RequestError) -> list[int]:
    assert isinstance(result, list), result
    return result[0].ids


def num_tokens(engine: CoreWithModel, request_id: int) -> int:
    return len(engine.outputs.get(request_id << 8, Output()).ids)


def begun(engine: CoreWithModel, at: int, **fields) -> int:
    """A request's id, which has so many tokens."""
    request_id = engine.submit(PROMPT, params(**fields))
    engine.until(lambda: num_tokens(engine, request_id) >= at)
    return request_id


FIELDS = [
    {},
    {"temperature": 1.3, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 10},
    {"bad_words": ["a"], "bad_words_token_ids": [[5], [900, 901]], "temperature": 1.0, "seed": 9},
]


# in each run every two of the cache's use, the place of the late mask and the fields meet, in the full matrix all three
@pytest.mark.parametrize(
    ("engine", "at", "fields"),
    [
        pytest.param(cache, at, fields, marks=[] if (i + j + k) % 2 == 0 else pytest.mark.slow)
        for (i, cache), (j, at), (k, fields) in itertools.product(enumerate(CACHES), enumerate((0, 3)), enumerate(FIELDS))
    ],
    indirect=["engine"],
    ids=lambda value: next(iter(value), "cached") if value in CACHES else None,
)
def test_a_late_mask_is_waited_for_by_its_own_sequence_alone(engine, monkeypatch, at, fields):
    alone, other_alone = plain(engine, **fields), ids_of(engine.run("Say yes", params(None)))
    other = engine.submit("Say yes", params(None, max_tokens=60))
    late = begun(engine, at, **fields)
    withheld = Withheld(engine, late, monkeypatch)
    monkeypatch.setattr(masks, "MASKS_LATE_S", 0.0)
    third = engine.submit(PROMPT, params(**fields))
    engine.until(lambda: engine.has_ended(other) and engine.has_ended(third))
    had = num_tokens(engine, late)
    assert had < len(alone) and not engine.has_ended(late) and engine.core._grammar._deferred
    assert engine.outputs[other << 8].ids == other_alone and engine.outputs[third << 8].ids == alone
    withheld.let_go()
    engine.until(lambda: engine.has_ended(late))
    assert engine.outputs[late << 8].ids == alone
    engine.until(lambda: engine.core.scheduler.is_idle and not engine.core._grammar._deferred)


def test_masks_are_not_late_because_the_step_before_took_long(engine, monkeypatch):
    """They are requested when it returns, and are made a turn later."""
    alone, preemptions, clock = plain(engine), engine.core.scheduler.counters.preemptions, [0.0]
    run, threads, asked = engine.workers._run, engine.core._grammar._threads, []
    monkeypatch.setattr(engine.core.supervisor, "_clock", LoopClock(lambda: clock[0]))
    monkeypatch.setattr(engine.workers, "_run", lambda: (run(), clock.append(clock.pop() + 5 * masks.MASKS_LATE_S)))
    request_id, submit = engine.submit(PROMPT, params()), threads.submit
    monkeypatch.setattr(threads, "submit", asked.extend)
    while not engine.has_ended(request_id):
        before, asked[:] = asked[:], []
        engine.turn()
        assert not engine.core._grammar._deferred
        submit(before)
    assert engine.outputs[request_id << 8].ids == alone and engine.core.scheduler.counters.preemptions == preemptions


@pytest.mark.parametrize("fields", FIELDS)
def test_a_slow_grammars_tokens_are_scheduled_when_their_masks_are_there(engine, monkeypatch, fields):
    """Except the first two: the first shows that the grammar is slow, and the second is scheduled by then."""
    alone, grammar = plain(engine, **fields), engine.core._grammar
    monkeypatch.setattr(mask_threads, "SLOW_S", -1.0)  # every mask is slow
    waited, scheduled, expect = [], [], grammar.expect

    def watched(step: ScheduledStep, now: float) -> None:
        expect(step, now)
        scheduled.extend(step.mask_rows)
        waited.extend(engine.core._masks.due(step.step))

    monkeypatch.setattr(grammar, "expect", watched)
    requests = [(PROMPT, params(**fields))] * 3
    assert [ids_of(result) for result in engine.run_all(requests)] == [alone] * 3
    assert 3 <= len(waited) <= 6 < 3 * len(alone) <= len(scheduled)
    engine.until(lambda: not grammar._deferred)
    engine.run(PROMPT, params(None, max_tokens=2))
    assert not grammar._deferred._slow, "sequences are kept, with their grammars, as long as no other has one"


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_grammar_counts_as_slow_until_it_is_quick_again_or_has_ended(engine, monkeypatch, is_aborted):
    """From then on no sequence is looked at in each step."""
    monkeypatch.setattr(mask_threads, "SLOW_S", 60.0)
    alone, deferred_ones = plain(engine), engine.core._grammar._deferred
    assert not deferred_ones._slow
    monkeypatch.setattr(mask_threads, "SLOW_FOR", 3)
    monkeypatch.setattr(mask_threads, "SLOW_S", -1.0)
    slow = begun(engine, 2)
    assert [seq.request_id for seq in deferred_ones._slow] == [slow]
    monkeypatch.setattr(mask_threads, "SLOW_S", 60.0)
    if is_aborted:
        engine.frontend.send(Abort(EPOCH, [slow]))
        assert plain(engine) == alone
    else:
        engine.until(lambda: not deferred_ones._slow)
        assert not engine.has_ended(slow)
        engine.until(lambda: engine.has_ended(slow))
        assert engine.outputs[slow << 8].ids == alone
    assert not deferred_ones._slow


def test_a_mask_that_never_comes_ends_its_request_and_no_other(engine, monkeypatch):
    alone = plain(engine)
    late = begun(engine, 2)
    withheld = Withheld(engine, late, monkeypatch)
    monkeypatch.setattr(masks, "MASKS_LATE_S", 0.0)
    engine.until(lambda: engine.core._grammar._deferred)
    assert ids_of(engine.run(PROMPT, params())) == alone and late not in engine.errors
    with monkeypatch.context() as at_once:
        at_once.setattr(deferred, "MASK_TIMEOUT_S", 0.0)
        engine.until(lambda: late in engine.errors)
    assert engine.errors[late].code == "engine_error" and "in time" in engine.errors[late].message
    withheld.let_go()
    engine.until(lambda: engine.core.scheduler.is_idle and not withheld.threads.num_outstanding)
    assert plain(engine) == alone


@pytest.mark.parametrize("leave", ["abort", "finish"])
def test_a_request_that_ends_while_it_is_deferred_leaves_nothing(engine, monkeypatch, leave):
    alone, late = plain(engine), begun(engine, 2)
    withheld = Withheld(engine, late, monkeypatch)
    monkeypatch.setattr(masks, "MASKS_LATE_S", 0.0)
    engine.until(lambda: engine.core._grammar._deferred)
    engine.frontend.send(Abort(EPOCH, [late]) if leave == "abort" else Finish(EPOCH, late << 8))
    engine.until(lambda: engine.core.scheduler.is_idle)
    withheld.let_go()
    assert plain(engine) == alone and late not in engine.errors
    engine.until(lambda: not engine.core._grammar._deferred)


def test_deferred_sequences_give_their_blocks_to_others(monkeypatch):
    """A cache for less than two of four sequences: one that is preempted while it is deferred goes on, too."""
    engine = CoreWithModel(num_blocks=12, max_model_len=160, look_ahead=False)
    try:
        wide = {"max_tokens": 70, "ignore_eos": True}
        asked = [params(wanted, **wide) for wanted in (AMBIGUOUS, PERSON, AMBIGUOUS, None)]
        prompts = [f"{i} {PROMPT}" for i in range(len(asked))]  # that share no block
        expected = [ids_of(engine.run(*request)) for request in zip(prompts, asked, strict=True)]
        monkeypatch.setattr(mask_threads, "SLOW_S", -1.0)
        results = engine.run_all(list(zip(prompts, asked, strict=True)))
        assert [ids_of(result) for result in results] == expected
        assert engine.core.scheduler.counters.preemptions
    finally:
        engine.close()


def test_an_end_that_is_found_late_is_told_to_its_own_frontend(engine):
    """By then a step's tokens are for another frontend, or there are none."""
    for owners in ([99], []):
        late = begun(engine, 2)
        none = np.zeros(len(owners), np.int32)
        columns = none.astype(np.int64), none, none, none.astype(bool), none.astype(float), none
        out = StepOutput(np.asarray(owners, np.int32), *columns)
        seq = next(s for s in engine.core.scheduler.slots.sequences if s is not None and s.request_id == late)
        engine.core._grammar._complete(seq, out)
        assert not out.finished
        engine.until(lambda late=late: engine.has_ended(late) and engine.core.scheduler.is_idle)
        assert engine.outputs[late << 8].finished == Finished(late << 8, "stop")


def test_a_grammar_that_becomes_slow_is_found_out(engine, monkeypatch):
    """Others go on beside it, and it gets as many tokens as it may have."""
    monkeypatch.setattr(mask_threads, "SLOW_S", 5e-4)
    slow = engine.submit("aaaa", params(AMBIGUOUS, max_tokens=150, ignore_eos=True))
    engine.until(lambda: engine.core._grammar._deferred)
    assert not engine.has_ended(slow)
    assert len(ids_of(engine.run("Say yes", params(None, max_tokens=30, ignore_eos=True)))) == 30
    engine.until(lambda: engine.has_ended(slow))
    assert len(engine.outputs[slow << 8].ids) == 150
