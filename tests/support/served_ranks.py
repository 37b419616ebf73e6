"""Worker processes of a served model: their ranks, a stream in progress, and a check that all have been replaced."""

import math

import psutil
from serving import EventStream, Served, command_of, ends_well, until

PROMPT = "Once upon a time there was a little dog"
LONG = {"max_tokens": 1500, "min_tokens": 1500}
WORKER = "quire.workers"


def rank_of(pid: int) -> int:
    """Workers' rank, in the order in which they were started."""
    parent = psutil.Process(pid).parent()
    assert parent is not None
    workers = [p for p in parent.children() if WORKER in command_of(p)]
    return [p.pid for p in sorted(workers, key=lambda p: (p.create_time(), p.pid))].index(pid)


def worker(served: Served, rank: int, size: int = 2) -> psutil.Process:
    until(lambda: len(served.pids(WORKER)) == size)
    return next(psutil.Process(pid) for pid in served.pids(WORKER) if rank_of(pid) == rank)


def running(served: Served) -> EventStream:
    stream = served.stream(PROMPT, **LONG)
    stream.wait_for_text()
    return stream


def restarts_of(served: Served) -> float:
    """How often all ranks have been replaced, known from the engine's first Heartbeat on."""
    until(lambda: not math.isnan(served.metric("worker_restarts_total")))
    return served.metric("worker_restarts_total")


def assert_replaced(served: Served, before: list[int], text: str, restarts: float) -> None:
    until(lambda: served.metric("worker_restarts_total") == restarts + 1 and served.health() == 200)
    assert not set(served.pids(WORKER)) & set(before) and len(served.pids(WORKER)) == len(before)
    assert served.text(PROMPT, max_tokens=10) == text


def assert_lost_and_replaced(served: Served, rank: int, how: str, said: str, size: int = 2) -> None:
    """how: "kill" or "suspend" it amid a stream. The engine says `said`, a regular expression; all ranks are new then."""
    text, restarts, before = served.text(PROMPT, max_tokens=10), restarts_of(served), served.pids(WORKER)
    stream, lost = running(served), worker(served, rank, size)
    getattr(lost, how)()
    assert ends_well(stream)
    served.line(said)
    assert_replaced(served, before, text, restarts)
    assert not lost.is_running()


def killed(rank: int) -> str:
    return rf"worker {rank} ended unexpectedly \(signal SIGKILL\); 1 sequences in flight run again"


def stopped(rank: int) -> str:
    """Which of the two is noticed first is chance."""
    how = r"; the others waited in an exchange|, and a step has taken \S+ s"
    return f"worker {rank} was stopped by a signal({how}); 1 sequences in flight run again"
