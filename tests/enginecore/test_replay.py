"""Requests that outlive their workers, and requests that go on after the loss of another engine."""

import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from core_by_hand import CoreByHand, add, kill
from core_with_model import CoreWithModel
from replay_cases import REQUESTS, Outputs, alone, unkilled

from quire.enginecore.core import EngineCore
from quire.ipc.messages.frontend import Candidates, Heartbeat
from quire.ipc.step.plan import StepPlan

PROMPT = [0, 1, 2, 3]


def arrive(core: EngineCore, count: int) -> None:
    """Wait until so many requests wait, so that one step begins with all of them."""
    while len(core.scheduler.waiting) < count:
        core._take_messages()


def have_new_tokens(core: EngineCore) -> bool:
    """Whether every sequence has a token since the workers died."""
    slots, waiting = core.scheduler.slots, core.scheduler.waiting
    known = [(seq, slots.known(seq)) for seq in slots.sequences if seq is not None] + [(seq, seq.known) for seq in waiting]
    return all(len(ids) > seq.died_at for seq, ids in known)


def when_it_runs(by_hand: CoreByHand, is_poison: Callable[[StepPlan], bool]) -> None:
    """Kill the workers when they run such a plan, now and after each restart."""
    workers, start = by_hand.workers, by_hand.workers.start

    def poisoned() -> None:
        run = workers.worker.run

        def run_or_die(plan: StepPlan) -> np.ndarray:
            if is_poison(plan):
                raise RuntimeError("the worker dies")
            return run(plan)

        workers.worker.run = run_or_die

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
    frontend.send(add(1, n=2, max_tokens=60))
    outputs.take()
    kill(by_hand.core)
    assert by_hand.core.scheduler.counters.replays == 1  # a request, not a sequence
    while by_hand.answer(frontend, Heartbeat).replays != 1:
        pass


def test_a_request_that_runs_at_two_deaths_without_a_token_between_ends_with_an_error(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    when_it_runs(by_hand, lambda plan: b"\x0c\0\0\0\x0d\0\0\0" in plan.prefill_tokens.tobytes())  # 12, 13: of no answer
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


@pytest.mark.parametrize(("from_outside", "num_deaths"), [(False, 2), (True, 4)])
def test_a_request_that_had_tokens_and_company_takes_no_other_with_it(
    by_hand: CoreByHand, from_outside: bool, num_deaths: int
) -> None:
    def is_poison(plan: StepPlan) -> bool:
        """The fourth token of request 2 kills the workers."""
        slots = by_hand.core.scheduler.slots
        seq = next((seq for seq in slots.sequences if seq is not None and seq.request_id == 2), None)
        if seq is None or len(slots.known(seq)) < 4 + 3:
            return False
        by_hand.workers.from_outside = from_outside
        return seq.slot in (*plan.decode_rows.tolist(), *plan.prefill_rows["slot"].tolist())

    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    when_it_runs(by_hand, is_poison)
    for n in range(1, 5):
        frontend.send(add(n, max_tokens=40))
    arrive(by_hand.core, 4)
    outputs.until_ended(1, 2, 3, 4)
    assert {n: error.code for n, error in outputs.failed.items()} == {2: "engine_error"}
    assert "twice" in outputs.failed[2].message and len(outputs.tokens[2 << 8]) == 3
    assert all(outputs.tokens[n << 8] == alone(4, 40) for n in (1, 3, 4))
    assert by_hand.core.supervisor.num_restarts == num_deaths
    assert by_hand.core.scheduler.counters.replays_given_up == 1


def test_workers_that_are_killed_from_outside_twice_before_any_token_take_no_request_with_them(by_hand: CoreByHand) -> None:
    frontend, core = by_hand.frontend(), by_hand.core
    outputs = Outputs(by_hand, frontend)
    for n in range(1, 5):
        frontend.send(add(n, max_tokens=12))
    arrive(core, 4)
    while len(outputs.tokens) < 4:
        outputs.take()
    for _ in range(2):
        by_hand.until(lambda: core.scheduler.num_running == 4)
        by_hand.begin()
        by_hand.workers.from_outside = True
        kill(core)
    outputs.until_ended(1, 2, 3, 4)
    assert all(outputs.tokens[n << 8] == alone(4, 12) for n in range(1, 5)) and not outputs.failed


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


@pytest.mark.parametrize("from_outside", [True, False])
def test_sequences_without_any_token_start_one_by_one_after_those_that_have_some(
    by_hand: CoreByHand, from_outside: bool
) -> None:
    frontend, core = by_hand.frontend(), by_hand.core
    outputs = Outputs(by_hand, frontend)
    frontend.send(add(1, max_tokens=60))  # it must not end while the others arrive
    outputs.take()
    for n in (2, 3):
        frontend.send(add(n, num_tokens=6))
    arrive(core, 2)
    by_hand.until(lambda: core.scheduler.num_running == 3)  # they have slots, and no results
    assert not {2 << 8, 3 << 8} & outputs.tokens.keys()
    by_hand.workers.from_outside = from_outside
    kill(core)
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
    arrive(core, 3)
    by_hand.begin()
    assert core.scheduler.num_running == 3
    kill(core)
    held = [seq for seq in core.scheduler.waiting if seq.is_deferred]
    for seq in held[:1]:
        core.scheduler.abort(seq.owner, seq.request_id)
    by_hand.begin()
    core.check()
    core.replay.turn(0.0)
    core.replay.turn(1e12)
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
    while not core.scheduler.num_running:
        by_hand.begin()
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


# ------------------------------------------------------------------------------------------------------------ with a model
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
