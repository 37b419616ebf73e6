"""Requests that must be prepared before they run: awaited alone, dropped everywhere, bounded in time."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from core_by_hand import MAX_NUM_SEQS, CoreByHand, add
from ipc_cores import RawFrontend

from quire.enginecore.preparation import PreparationFailed, PreparingRequests
from quire.ipc.messages.frontend import Abort, AddRequest, Finish, Heartbeat, RequestError, StepOutputs


class SlowPreparer:
    """Requests with an id below 100 have to wait, each until the test says so."""

    def __init__(self) -> None:
        self.futures: dict[int, Future[None]] = {}

    def __call__(self, request: AddRequest, sequences: list) -> Future[None] | None:
        if request.id >= 100:
            return None
        self.futures[request.id] = Future()
        return self.futures[request.id]

    def finish(self, *ids: int) -> None:
        for i in ids:
            self.futures[i].set_result(None)


@pytest.fixture
def slow() -> SlowPreparer:
    return SlowPreparer()


@pytest.fixture
def by_hand(slow) -> Iterator[CoreByHand]:
    by_hand = CoreByHand(preparers=[slow])
    yield by_hand
    by_hand.close()


def prepares(by_hand: CoreByHand, frontend: RawFrontend, *messages: AddRequest) -> None:
    """Send requests and wait until all of them prepare."""
    before = len(by_hand.core.preparing)
    for message in messages:
        frontend.send(message)
    by_hand.until(lambda: len(by_hand.core.preparing) == before + len(messages))


def ends(by_hand: CoreByHand, frontend: RawFrontend, request_id: int) -> None:
    """Wait until the request has said its last token."""
    while not any(f.key >> 8 == request_id for f in by_hand.answer(frontend, StepOutputs).finished):
        pass


def waiting_ids(by_hand: CoreByHand) -> list[int]:
    """In the order in which they are to start."""
    return [seq.request_id for seq in by_hand.core.scheduler.waiting.could_start()]


def test_only_the_request_that_must_be_prepared_waits(by_hand, slow):
    frontend = by_hand.frontend()
    prepares(by_hand, frontend, add(1, max_tokens=5))
    frontend.send(add(100, max_tokens=20))
    ends(by_hand, frontend, 100)
    assert by_hand.core.scheduler.is_idle and by_hand.core.preparing.has_request(
        by_hand.core.owners.number(frontend.identity), 1
    )
    slow.finish(1)
    ends(by_hand, frontend, 1)
    assert by_hand.core.scheduler.counters.generation_tokens == 25 and not by_hand.core.preparing


def test_what_is_ready_together_goes_on_by_arrival_and_what_is_ready_first_does_not_wait(by_hand, slow):
    frontend, core = by_hand.frontend(), by_hand.core
    prepares(by_hand, frontend, *(add(i, max_tokens=2) for i in (1, 2, 3)))
    slow.finish(2, 1)
    core._take_messages()
    assert waiting_ids(by_hand) == [1, 2]
    slow.finish(3)
    core._take_messages()
    assert waiting_ids(by_hand) == [1, 2, 3]


def test_a_request_waits_for_all_that_it_needs():
    preparers = [SlowPreparer(), SlowPreparer()]
    by_hand = CoreByHand(preparers=preparers)
    frontend = by_hand.frontend()
    prepares(by_hand, frontend, add(1, max_tokens=2))
    preparers[1].finish(1)
    by_hand.turn()
    assert len(by_hand.core.preparing) == 1
    preparers[0].finish(1)
    ends(by_hand, frontend, 1)
    by_hand.close()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PreparationFailed("the grammar has no rule named root"), "invalid", "the grammar has no rule named root"),
        (RuntimeError("a secret"), "engine_error", "the engine failed to prepare this request"),
    ],
)
def test_a_failure_is_the_requests_own(by_hand, slow, error, code, text):
    frontend = by_hand.frontend()
    prepares(by_hand, frontend, add(1, max_tokens=5), add(2, max_tokens=5))
    slow.futures[1].set_exception(error)
    answer = by_hand.answer(frontend, RequestError)
    assert (answer.id, answer.code, answer.message) == (1, code, text)
    slow.finish(2)
    ends(by_hand, frontend, 2)
    assert not by_hand.core.preparing


@pytest.mark.parametrize("error", [PreparationFailed("no such adapter"), ZeroDivisionError()])
def test_a_preparer_that_raises_at_once_fails_the_request_and_not_the_core(error):
    def refuse(request: AddRequest, sequences: list) -> None:
        if request.id == 1:
            raise error

    other = SlowPreparer()
    by_hand = CoreByHand(preparers=[other, refuse])
    frontend = by_hand.frontend()
    frontend.send(add(1))
    answer = by_hand.answer(frontend, RequestError)
    assert answer.code == ("invalid" if isinstance(error, PreparationFailed) else "engine_error")
    assert other.futures[1].cancelled()  # nobody waits for it any more
    frontend.send(add(100, max_tokens=3))
    ends(by_hand, frontend, 100)
    by_hand.close()


def test_work_that_was_cancelled_by_its_executor_fails_the_request(by_hand, slow):
    frontend = by_hand.frontend()
    prepares(by_hand, frontend, add(1))
    slow.futures[1].cancel()
    assert by_hand.answer(frontend, RequestError).code == "engine_error"


def test_an_aborted_request_is_gone_and_its_id_free(by_hand, slow):
    frontend, core = by_hand.frontend(), by_hand.core
    prepares(by_hand, frontend, add(1, max_tokens=5, n=2))
    first = slow.futures[1]
    assert first.set_running_or_notify_cancel()  # a thread is at work, and goes on
    frontend.send(add(1))
    assert by_hand.answer(frontend, RequestError).message == "request id 1 is in use"
    frontend.send(Abort(core.link.epoch, [1]))
    by_hand.until(lambda: not core.preparing)
    prepares(by_hand, frontend, add(1, max_tokens=3))
    first.set_result(None)
    by_hand.turn()
    assert len(core.preparing) == 1 and core.scheduler.is_idle
    slow.finish(1)
    ends(by_hand, frontend, 1)
    assert core.scheduler.counters.generation_tokens == 3


def test_a_finished_child_is_not_run(by_hand, slow):
    frontend, core = by_hand.frontend(), by_hand.core
    prepares(by_hand, frontend, add(1, max_tokens=5, n=2), add(2, max_tokens=5))
    for key in (1 << 8 | 1, 1 << 8 | 7, 2 << 8, 9 << 8):
        frontend.send(Finish(core.link.epoch, key))
    by_hand.until(lambda: core.preparing.num_sequences == 1)
    assert slow.futures[2].cancelled()
    slow.finish(1)
    ends(by_hand, frontend, 1)
    assert core.scheduler.counters.generation_tokens == 5


def test_a_lost_frontends_requests_are_gone(by_hand, slow):
    frontend, other, core = by_hand.frontend(), by_hand.frontend(), by_hand.core
    prepares(by_hand, frontend, add(1), add(2))
    prepares(by_hand, other, add(3, max_tokens=4))
    slow.futures[2].set_running_or_notify_cancel()
    frontend.send(b"no message")
    by_hand.until(lambda: len(core.preparing) == 1)
    assert slow.futures[1].cancelled()
    slow.finish(2, 3)
    ends(by_hand, other, 3)
    assert core.scheduler.counters.generation_tokens == 4


def test_who_has_a_seat_does_not_count_among_those_that_wait(by_hand):
    """A burst is counted before any of it was scheduled."""
    frontend = by_hand.frontend()
    prepares(by_hand, frontend, add(1, n=60), add(2, n=40), add(3, n=MAX_NUM_SEQS))
    frontend.send(add(4, n=1))
    refused = by_hand.answer(frontend, RequestError)
    assert (refused.id, refused.code) == (4, "overloaded")


def test_it_counts_among_those_that_wait(by_hand):
    frontend = by_hand.frontend()
    prepares(by_hand, frontend, add(1, n=60))
    frontend.send(add(2, n=60))
    assert by_hand.answer(frontend, RequestError).code == "overloaded"  # 100 may wait
    while by_hand.answer(frontend, Heartbeat).num_waiting != 60:
        pass


def test_a_stop_waits_for_it_within_the_grace_period(by_hand, slow):
    frontend, core = by_hand.frontend(), by_hand.core
    prepares(by_hand, frontend, add(1, max_tokens=3), add(2))
    core.stop(grace_s=60.0)
    assert not core._may_end()
    slow.finish(1)
    ends(by_hand, frontend, 1)
    assert core.scheduler.is_idle and not core._may_end()
    core.stop(grace_s=0.0)
    by_hand.until(core._may_end)
    core.close()
    assert slow.futures[2].cancelled() and not core.preparing
    core.close()


def test_it_goes_on_over_a_restart_of_the_workers(by_hand, slow):
    frontend, core = by_hand.frontend(), by_hand.core
    prepares(by_hand, frontend, add(1, max_tokens=3))
    frontend.send(add(100, max_tokens=50))
    by_hand.until(lambda: core.scheduler.num_running)
    core._replace_workers("the test wants it")
    slow.finish(1)
    by_hand.until(lambda: core.scheduler.num_running == 2)  # and what ran before runs again
    ends(by_hand, frontend, 1)


def test_the_loop_sleeps_until_it_is_ready():
    release = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        by_hand = CoreByHand(preparers=[lambda request, sequences: executor.submit(release.wait)])
        core, frontend = by_hand.core, by_hand.frontend()
        prepares(by_hand, frontend, add(1, max_tokens=2))
        core._next_heartbeat = time.monotonic() + 0.2
        core._wait()
        assert time.monotonic() >= core._next_heartbeat - 0.01  # nothing wakes it
        core._next_heartbeat = time.monotonic() + 60.0
        release.set()
        began = time.monotonic()
        core._wait()
        assert time.monotonic() - began < 30.0
        ends(by_hand, frontend, 1)
        core._next_heartbeat = time.monotonic() + 0.2
        core._wait()
        assert time.monotonic() >= core._next_heartbeat - 0.01  # and asleep again
        by_hand.close()


# ------------------------------------------------------------------------------------------------- without a core
class Seq:
    """What PreparingRequests reads of a sequence."""

    def __init__(self, owner: int, request_id: int) -> None:
        self.owner, self.request_id, self.key, self.slot = owner, request_id, request_id << 8, -1
        self.tenant = None


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_request_that_is_not_ready_in_time_fails_and_a_process_that_stood_still_fails_nobody(slow):
    clock = Clock()
    preparing = PreparingRequests([slow], timeout_s=5.0, clock=clock)
    assert preparing.start(1, add(1), [Seq(1, 1)])
    clock.now += 1000.0
    assert preparing.take_ended() == []  # a second has passed, as far as this process was there
    assert preparing.start(1, add(2), [Seq(1, 2)])
    for _ in range(3):
        clock.now += 1.0
        assert preparing.take_ended() == []
    clock.now += 1.0
    (late,) = preparing.take_ended()
    assert late.id == 1 and late.failure == ("overloaded", "what the request needs was not ready within 5 s")
    assert slow.futures[1].cancelled() and not slow.futures[2].cancelled()
    preparing.check()
    preparing.close()


def test_without_anything_to_prepare_nothing_is_kept(slow):
    for preparing, request_id in ((PreparingRequests([slow]), 100), (PreparingRequests(), 1)):
        assert not preparing.start(1, add(request_id), [Seq(1, request_id)])
        assert not preparing and preparing.num_sequences == 0
        preparing.close()


def test_check_sees_what_is_wrong(slow):
    preparing = PreparingRequests([slow])
    preparing.start(1, add(1), [Seq(1, 1)])
    preparing.check()
    preparing.num_sequences += 1
    with pytest.raises(AssertionError):
        preparing.check()
    preparing.num_sequences -= 1
    next(iter(preparing._requests.values())).sequences[0].slot = 3
    with pytest.raises(AssertionError):
        preparing.check()
    preparing.close()
