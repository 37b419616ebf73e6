"""Requests that outlive their workers, and requests that go on after the loss of another engine."""

import json
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from core_by_hand import EPOCH, MAX_MODEL_LEN, CoreByHand, add
from core_with_model import CoreWithModel
from fake_worker import VOCAB_SIZE, solo_output
from ipc_cores import RawFrontend

from quire.enginecore.core import EngineCore
from quire.enginecore.worker_supervisor import WorkerSupervisor
from quire.ipc.messages.frontend import Candidates, Heartbeat, RequestError, Resume, StepOutputs
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.plan import StepPlan
from quire.ipc.structured_outputs import StructuredOutputs

PROMPT = [0, 1, 2, 3]


class Outputs:
    """What a frontend is told: tokens by request, requests that have ended, and those that have failed."""

    def __init__(self, by_hand: CoreByHand, frontend: RawFrontend) -> None:
        self._by_hand, self._frontend = by_hand, frontend
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.failed: dict[int, RequestError] = {}
        self.seeds: dict[int, int] = {}

    def take(self) -> None:
        message = self._by_hand.answer(self._frontend, StepOutputs | RequestError)
        if isinstance(message, RequestError):
            self.failed[message.id] = message
            return
        keys, tokens = np.frombuffer(message.keys, np.int64).tolist(), np.frombuffer(message.tokens, np.int32).tolist()
        for key, token in zip(keys, tokens, strict=True):
            assert key not in self.ended, "a token after the end"
            self.tokens.setdefault(key, []).append(token)
        self.ended |= {end.key for end in message.finished}
        self.seeds |= {start.key: start.seed for start in message.started}

    def until_ended(self, *requests: int) -> None:
        """Of one child each, unless a key is given."""
        keys = {request if request > 1 << 8 else request << 8 for request in requests}
        while not all(key in self.ended or key >> 8 in self.failed for key in keys):
            self.take()


def alone(num_tokens: int = 4, max_tokens: int = 16) -> list[int]:
    """The output of `add` if nothing happens."""
    return solo_output([i % VOCAB_SIZE for i in range(num_tokens)], num_tokens + max_tokens, set(), VOCAB_SIZE)


def kill(core: EngineCore) -> None:
    """The workers die, and others start at once."""
    core.supervisor = WorkerSupervisor(core.workers, 60.0)  # a new one has no reason to pause
    core._replace_workers("the test kills them")


def have_new_tokens(core: EngineCore) -> bool:
    """Whether every sequence has a token since the workers died."""
    slots, waiting = core.scheduler.slots, core.scheduler.waiting
    known = [(seq, slots.known(seq)) for seq in slots.sequences if seq is not None] + [(seq, seq.known) for seq in waiting]
    return all(len(ids) > seq.died_at for seq, ids in known)


def when_it_runs(by_hand: CoreByHand, is_poison: Callable[[StepPlan], bool]) -> None:
    """Kill the workers when they run such a plan, now and after each restart."""
    workers, start = by_hand.workers, by_hand.workers.start

    def poisoned() -> None:
        run = workers._worker.run

        def run_or_die(plan: StepPlan) -> np.ndarray:
            if is_poison(plan):
                raise RuntimeError("the worker dies")
            return run(plan)

        workers._worker.run = run_or_die

    def start_again() -> None:
        start()
        poisoned()

    poisoned()
    workers.start = start_again
    answer = workers.answer

    def answer_or_die() -> None:
        try:
            answer()
        except RuntimeError as error:
            by_hand.core._replace_workers(str(error))

    workers.answer = answer_or_die


# ------------------------------------------------------------------------------------------------------- workers that die
def test_streams_get_their_own_tokens_whenever_the_workers_die(by_hand: CoreByHand) -> None:
    frontend, rng = by_hand.frontend(), random.Random(1)
    outputs = Outputs(by_hand, frontend)
    for n in range(1, 5):
        frontend.send(add(n, num_tokens=n, max_tokens=40))
    while len(outputs.tokens) < 4:
        outputs.take()
    for _ in range(10):
        by_hand.until(lambda: have_new_tokens(by_hand.core))
        for _ in range(rng.randint(0, 5)):
            by_hand.turn()
        kill(by_hand.core)
    outputs.until_ended(*range(1, 5))
    assert not outputs.failed
    for n in range(1, 5):
        assert outputs.tokens[n << 8] == alone(n, 40)
    counters = by_hand.core.scheduler.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (sum(range(1, 5)), 4 * 40)
    assert counters.replays > 8 and counters.replays_given_up == 0 == counters.preemptions


def test_a_heartbeat_counts_what_ran_again(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    frontend.send(add(1, n=2))
    outputs.take()
    kill(by_hand.core)
    assert by_hand.core.scheduler.counters.replays == 1  # a request, not a sequence
    by_hand.core._next_heartbeat = 0.0
    assert by_hand.answer(frontend, Heartbeat).replays == 1


def test_a_request_that_runs_at_two_deaths_without_a_token_between_ends_with_an_error(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    when_it_runs(by_hand, lambda plan: 13 in plan.prefill_tokens)
    frontend.send(add(1, max_tokens=40))
    while len(outputs.tokens.get(1 << 8, ())) < 5:
        outputs.take()
    frontend.send(add(2, num_tokens=14))
    frontend.send(add(3, num_tokens=3))
    outputs.until_ended(1, 2, 3)
    assert {n: error.code for n, error in outputs.failed.items()} == {2: "engine_error"}
    assert "twice" in outputs.failed[2].message and 2 << 8 not in outputs.tokens
    assert outputs.tokens[1 << 8] == alone(4, 40) and outputs.tokens[3 << 8] == alone(3)
    assert by_hand.core.supervisor.num_restarts == 2
    assert by_hand.core.scheduler.counters.replays_given_up == 1


def test_many_requests_that_kill_the_workers_do_not_end_the_engine(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    when_it_runs(by_hand, lambda plan: 7 in plan.prefill_tokens)
    for n in (1, 2, 3, 4):
        frontend.send(add(n, num_tokens=9 - n % 2))  # the budget of a step holds one, and a part of another
    outputs.until_ended(1, 2, 3, 4)
    assert outputs.failed.keys() == {1, 2, 3, 4}
    frontend.send(add(5, num_tokens=5))
    outputs.until_ended(5)
    assert outputs.tokens[5 << 8] == alone(5)


def test_a_token_between_two_deaths_clears_a_request(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    frontend.send(add(1, max_tokens=12))
    for _ in range(5):
        outputs.take()
        kill(by_hand.core)
    outputs.until_ended(1)
    assert outputs.tokens[1 << 8] == alone(4, 12) and not outputs.failed


def test_sequences_without_any_token_start_one_by_one_after_those_that_have_some(by_hand: CoreByHand) -> None:
    frontend, core = by_hand.frontend(), by_hand.core
    outputs = Outputs(by_hand, frontend)
    frontend.send(add(1))
    outputs.take()
    for n in (2, 3):
        frontend.send(add(n, num_tokens=6))
    while len(core.scheduler.slots.free) != 1:  # they have slots, and no results
        core._take_messages()
        core._fill()
        if len(core.scheduler.slots.free) != 1:
            by_hand.workers.answer()
            core._collect()
    assert not {2 << 8, 3 << 8} & outputs.tokens.keys()
    kill(core)
    by_hand.core._watch_workers()
    assert [seq.request_id for seq in core.scheduler.waiting if not seq.is_deferred] == [1]
    order: list[int] = []
    while len(outputs.ended) < 3:
        outputs.take()
        order += [key >> 8 for key in outputs.tokens if key >> 8 not in order]
    assert order == [1, 2, 3] and all(outputs.tokens[n << 8] == alone(6) for n in (2, 3))


def test_a_sequence_that_waits_for_others_may_be_aborted_and_does_not_wait_for_ever(by_hand: CoreByHand) -> None:
    frontend, core = by_hand.frontend(), by_hand.core
    for n in (1, 2, 3):
        frontend.send(add(n, num_tokens=5))
    while core.scheduler.num_running < 3:
        core._take_messages()
        core._fill()
        core.workers.drain_doorbell()
        if core.scheduler.num_running < 3:
            by_hand.workers.answer()
            core._collect()
            break
    kill(core)
    held = [seq for seq in core.scheduler.waiting if seq.is_deferred]
    for seq in held[:1]:
        core.scheduler.abort(seq.owner, seq.request_id)
    core.check()
    core._watch_workers()
    core.replay.turn(0.0)
    core.replay.turn(1e9)
    assert not any(seq.is_deferred for seq in core.scheduler.waiting)
    by_hand.until(lambda: core.scheduler.is_idle)


def test_without_replay_what_ran_ends_with_an_error_and_what_waited_runs() -> None:
    by_hand = CoreByHand(replay=False)
    try:
        frontend = by_hand.frontend()
        outputs = Outputs(by_hand, frontend)
        for n in range(1, 6):
            frontend.send(add(n))
        while len(outputs.tokens) < 4:
            outputs.take()
        kill(by_hand.core)
        outputs.until_ended(1, 2, 3, 4, 5)
        assert outputs.failed.keys() == {1, 2, 3, 4} and outputs.tokens[5 << 8] == alone()
        assert {error.code for error in outputs.failed.values()} == {"engine_error"}
        assert by_hand.core.scheduler.counters.replays == 0
    finally:
        by_hand.close()


def test_a_step_of_a_beam_search_ends_with_its_workers(by_hand: CoreByHand) -> None:
    frontend, core = by_hand.frontend(), by_hand.core
    outputs = Outputs(by_hand, frontend)
    request = add(1, max_tokens=1)
    frontend.send(msgspec.structs.replace(request, task=msgspec.structs.replace(request.task, candidates=Candidates(4, 1))))
    while not core._in_flight:
        core._take_messages()
        core._fill()
    kill(core)
    outputs.until_ended(1)
    assert outputs.failed[1].code == "engine_error"


def test_masks_that_the_workers_do_not_take_fail_them_later_and_lose_no_token(by_hand: CoreByHand) -> None:
    workers = by_hand.workers
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    frontend.send(add(1))
    outputs.take()
    workers.plan_ring.write_parts, kept = raises, workers.plan_ring.write_parts
    workers.send_no_masks(1, np.zeros(1, np.int32))
    workers.plan_ring.write_parts = kept
    with pytest.raises(Exception, match="does not take its plans"):
        workers.check_alive()
    kill(by_hand.core)
    outputs.until_ended(1)
    assert outputs.tokens[1 << 8] == alone()


def raises(*_: object) -> None:
    from quire.ipc.step.plan_ring import RingFull

    raise RingFull("full")


# -------------------------------------------------------------------------------------------------- engines that are lost
def resumed(request_id: int, outputs: list[list[int] | None], seed: int | None = None, num_tokens: int = 4, **params):
    request = add(request_id, num_tokens, **params)
    encoded = [None if ids is None else np.asarray(ids, np.int32).tobytes() for ids in outputs]
    task = msgspec.structs.replace(request.task, resume=Resume(encoded, seed))
    return msgspec.structs.replace(request, task=task)


@pytest.mark.parametrize("num_known", [0, 1, 7, 15])
def test_a_request_goes_on_after_the_output_that_it_had(by_hand: CoreByHand, num_known: int) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    frontend.send(resumed(1, [alone()[:num_known]], seed=5))
    outputs.until_ended(1)
    assert outputs.tokens[1 << 8] == alone()[num_known:]
    assert outputs.seeds == ({} if num_known else {1 << 8: 5})  # said once, with the first token
    counters = by_hand.core.scheduler.counters
    assert (counters.replays, counters.prompt_tokens) == (1, 0 if num_known else 4)


def test_children_that_have_ended_do_not_run_again_and_seeds_stay_theirs(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    frontend.send(resumed(1, [None, [], alone()[:4]], seed=2**64 - 2, n=3))
    by_hand.until(lambda: by_hand.core.scheduler.has_requests)
    seeds = {seq.child: seq.seed for seq in by_hand.core.scheduler.waiting}
    outputs.until_ended(1 << 8 | 1, 1 << 8 | 2)
    assert outputs.tokens == {1 << 8 | 1: alone(), 1 << 8 | 2: alone()[4:]}
    assert seeds in ({}, {1: 2**64 - 1, 2: 2**64}) and outputs.seeds == {1 << 8 | 1: 2**64 - 2}


def test_a_request_that_was_accepted_once_is_not_refused_by_a_full_queue(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    object.__setattr__(by_hand.core.intake.config, "max_num_waiting", 1)
    for n in range(1, 9):
        frontend.send(resumed(n, [alone()[:3]]))
    outputs.until_ended(*range(1, 9))
    assert not outputs.failed


@pytest.mark.parametrize(
    "resume",
    [
        Resume([], None),
        Resume([None], None),
        Resume([b"", b""], None),
        Resume([b"abc"], None),
        Resume([np.array([-1], np.int32).tobytes()], None),
        Resume([np.array([VOCAB_SIZE], np.int32).tobytes()], None),
        Resume([np.zeros(16, np.int32).tobytes()], None),
        Resume([np.zeros(MAX_MODEL_LEN, np.int32).tobytes()], None),
        Resume([b""], -1),
        Resume([b""], 1 << 64),
    ],
    ids=lambda resume: str(resume)[:40],
)
def test_a_resume_that_cannot_be_is_refused(by_hand: CoreByHand, resume: Resume) -> None:
    frontend = by_hand.frontend()
    request = add(1)
    task = msgspec.structs.replace(request.task, resume=resume)
    try:
        msgspec.msgpack.encode(task)
    except OverflowError:
        return  # no frontend can send it
    frontend.send(msgspec.structs.replace(request, task=task))
    assert by_hand.answer(frontend, RequestError).code in ("invalid", "engine_error")
    frontend.send(add(2))
    by_hand.answer(frontend, StepOutputs)


# ------------------------------------------------------------------------------------------------------------ with a model
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = StructuredOutputs("json", json.dumps(SCHEMA))
REQUESTS = [
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=24, temperature=1.0, seed=3, top_p=0.9),
    SamplingParams(max_tokens=24, temperature=0.7, seed=4, repetition_penalty=1.3, min_tokens=20),
    SamplingParams(max_tokens=48, temperature=0.0, structured_outputs=JSON),
    SamplingParams(max_tokens=48, temperature=1.0, seed=5, structured_outputs=JSON, n=2),
]


def unkilled(engine: CoreWithModel) -> list[list[list[int]]]:
    results = engine.run_all([("Once upon a time", params) for params in REQUESTS])
    return [[output.ids for output in result] for result in results]


def test_seeds_penalties_and_grammars_go_on_by_position_when_workers_die(engine: CoreWithModel) -> None:
    expected, rng = unkilled(engine), random.Random(2)
    ids = [engine.submit("Once upon a time", params) for params in REQUESTS]
    wanted = list(zip(ids, REQUESTS, strict=True))
    engine.until(lambda: all(i << 8 in engine.outputs for i in ids))
    for _ in range(12):
        engine.until(lambda: have_new_tokens(engine.core))
        for _ in range(rng.randint(0, 9)):
            engine.turn()
        kill(engine.core)
    engine.until(lambda: all(engine.has_ended(i, p.n) for i, p in wanted))
    got = [[engine.outputs[i << 8 | child].ids for child in range(p.n)] for i, p in wanted]
    assert got == expected and not engine.errors


@pytest.mark.parametrize("num_known", [1, 6, 11])
def test_seeds_penalties_and_grammars_go_on_on_another_engine(engine: CoreWithModel, num_known: int) -> None:
    expected = unkilled(engine)
    ids = []
    for params, outputs in zip(REQUESTS, expected, strict=True):
        ids.append(next(engine._ids))
        data = np.asarray(engine.encode("Once upon a time"), np.int32).tobytes()
        resume = Resume([np.asarray(output[:num_known], np.int32).tobytes() for output in outputs], None)
        request = add(ids[-1])
        request = msgspec.structs.replace(
            request,
            epoch=EPOCH,
            inputs=msgspec.structs.replace(request.inputs, token_ids=data),
            task=msgspec.structs.replace(request.task, params=params, resume=resume),
        )
        engine.frontend.send(request)
    engine.until(lambda: all(engine.has_ended(i, p.n) for i, p in zip(ids, REQUESTS, strict=True)))
    got = [[engine.outputs[i << 8 | child].ids for child in range(p.n)] for i, p in zip(ids, REQUESTS, strict=True)]
    assert got == [[output[num_known:] for output in outputs] for outputs in expected] and not engine.errors
