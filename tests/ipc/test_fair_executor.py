"""FairExecutor: whose turn it is, and that nothing that may run is left waiting."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from deadlines import DEADLINE_S

from quire.ipc.process.fair_executor import LARGE_BYTES, FairExecutor, Job, Turns


def job(owner, num_bytes=0):
    return Job(owner, num_bytes, lambda: None, Future())


def test_owners_take_turns_and_one_never_has_all_threads():
    turns = Turns(4)
    for when in range(10):
        turns.add(job("a"), when)
    assert [turns.take().owner for _ in range(3)] == ["a"] * 3 and turns.take() is None
    turns.add(job("b"), 20)
    turns.add(job("b"), 21)
    b = turns.take()
    assert b.owner == "b"
    turns.ended(b)
    assert turns.take().owner == "b" and len(turns) == 7


def test_a_large_job_is_overtaken_but_not_for_ever():
    turns = Turns(1)
    turns.add(job("a", 200_000), 0.0)
    turns.add(job("a", 100), 4.0)
    turns.add(job("a", 100), 6.0)
    sizes = []
    while (taken := turns.take()) is not None:
        sizes.append(taken.num_bytes)
        turns.ended(taken)
    assert sizes == [100, 200_000, 100]


def test_large_jobs_of_one_owner_leave_threads_to_its_small_ones():
    turns = Turns(4)
    for _ in range(5):
        turns.add(job("a", LARGE_BYTES), 0.0)
    first, second = turns.take(), turns.take()
    assert turns.take() is None
    turns.add(job("a", 1), 0.0)
    assert turns.take().num_bytes == 1 and turns.take() is None
    turns.ended(first)
    turns.ended(second)
    assert turns.take().is_large and turns.take().is_large


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_every_job_is_run_once_and_a_failure_is_its_own(num_threads):
    threads = ThreadPoolExecutor(num_threads)
    executor, gate = FairExecutor(threads, num_threads), threading.Event()

    def work(number):
        assert gate.wait(DEADLINE_S)
        if number % 7 == 0:
            raise ValueError(number)
        return number

    futures = [executor.submit(lambda n=n: work(n), owner=str(n % 3), num_bytes=n * 1000) for n in range(60)]
    cancelled = futures[-1].cancel()
    gate.set()
    for number, future in enumerate(futures[:-1]):
        if number % 7 == 0:
            assert isinstance(future.exception(DEADLINE_S), ValueError)
        else:
            assert future.result(DEADLINE_S) == number
    assert cancelled
    threads.shutdown()


def test_another_owners_work_does_not_wait_for_many_slow_ones():
    threads = ThreadPoolExecutor(2)
    executor, gate = FairExecutor(threads, 2), threading.Event()
    slow = [executor.submit(lambda: gate.wait(DEADLINE_S), owner="a") for _ in range(20)]
    assert executor.submit(lambda: "done", owner="b").result(DEADLINE_S) == "done"
    assert not any(future.done() for future in slow)
    gate.set()
    assert all(future.result(DEADLINE_S) for future in slow)
    threads.shutdown()
