"""What frontends ask of the engine beside requests: each call is answered once, whatever becomes of the workers."""

import pytest
from core_by_hand import EPOCH, add

from quire.enginecore.worker_profiles import WorkersFailed
from quire.ipc.messages.frontend import StepOutputs, Utility, UtilityResult
from quire.ipc.messages.utilities import (
    GetServerInfo,
    ProfileDone,
    ResetDone,
    ResetPrefixCache,
    ServerInfo,
    StartProfile,
    StopProfile,
    UtilityFailed,
)
from quire.ipc.messages.workers import ControlReply


def ask(by_hand, frontend, call, number=1):
    frontend.send(Utility(EPOCH, number, call))
    result = by_hand.answer(frontend, UtilityResult)
    assert result.id == number and result.epoch == EPOCH
    return result.answer


def test_the_prefix_cache_forgets(by_hand):
    frontend, pool = by_hand.frontend(), by_hand.core.scheduler.kv.pool
    frontend.send(add(1, num_tokens=16, max_tokens=1))
    by_hand.until(lambda: pool._hash_of and by_hand.core.scheduler.is_idle)
    assert ask(by_hand, frontend, ResetPrefixCache()) == ResetDone(True) and not pool._hash_of
    frontend.send(add(2, num_tokens=16, max_tokens=40))
    by_hand.answer(frontend, StepOutputs)
    assert pool._hash_of and ask(by_hand, frontend, ResetPrefixCache(), 2) == ResetDone(False)
    by_hand.until(lambda: by_hand.core.scheduler.is_idle)
    assert ask(by_hand, frontend, ResetPrefixCache(), 3) == ResetDone(True)


def test_the_configuration_is_told(by_hand):
    assert isinstance(ask(by_hand, by_hand.frontend(), GetServerInfo()), ServerInfo)


def test_profiling_needs_its_flag_and_workers(by_hand):
    frontend, utilities = by_hand.frontend(), by_hand.core.utilities
    for call in (StartProfile(), StopProfile()):
        answer = ask(by_hand, frontend, call)
        assert isinstance(answer, UtilityFailed) and answer.code == "invalid" and "--profile-dir" in answer.message
    utilities._has_profiler = True
    by_hand.workers.is_ready = False
    answer = ask(by_hand, frontend, StartProfile())
    assert isinstance(answer, UtilityFailed) and answer.code == "engine_error"
    by_hand.workers.is_ready = True


@pytest.mark.parametrize("outcome", ["done", "refused", "dead", "full"])
def test_what_workers_do_is_answered_however_it_ends(by_hand, monkeypatch, outcome):
    """The record itself is the worker's business; here its reply is made by hand."""
    frontend, workers = by_hand.frontend(), by_hand.workers
    by_hand.core.utilities._has_profiler = True

    def written(kind, *parts):
        if outcome == "full":
            raise WorkersFailed("a worker does not take its plans")

    monkeypatch.setattr(workers, "_write", written)
    frontend.send(Utility(EPOCH, 5, StopProfile()))
    if outcome == "full":
        with pytest.raises(WorkersFailed):
            by_hand.until(lambda: False)
    else:
        by_hand.until(lambda: workers._unanswered)
    if outcome in ("dead", "full"):
        workers._give_up_control()
    else:
        error, payload = ("", b"trace.json.gz") if outcome == "done" else ("no profiling is under way", b"")
        workers._replied(ControlReply(0, workers._last_control, error, payload))
    answer = by_hand.answer(frontend, UtilityResult).answer
    if outcome == "done":
        assert answer == ProfileDone(["trace.json.gz"])
    else:
        assert isinstance(answer, UtilityFailed) and answer.message
