"""The line of statistics: every ten seconds while steps are run, never when it is turned off, with rates and not totals."""

import logging
import re

import msgspec
import numpy as np
import pytest
from metrics_cases import engine_stats

from quire.enginecore.stats import INTERVAL_S, Counted, StatsLine
from quire.ipc.messages.frontend import Heartbeat
from quire.ipc.messages.stats import SpeculationStats


def heartbeat(tokens: int) -> Heartbeat:
    return Heartbeat(1, 0.0, 3, 4, 0.25, 2 * tokens, tokens, tokens, tokens // 100, 0, True)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire.enginecore")
    return caplog


def test_rates_since_the_last_line(lines: pytest.LogCaptureFixture) -> None:
    stats = StatsLine(True)
    stats.heartbeat(heartbeat(1000), 100.0)
    for _ in range(20):
        stats.step(8, 16)
    stats.heartbeat(heartbeat(1500), 100.0 + INTERVAL_S - 0.1)
    assert lines.messages == []
    stats.heartbeat(heartbeat(2000), 100.0 + INTERVAL_S)
    (line,) = lines.messages
    for part in (
        "prompt 200.0 tok/s", "generation 100.0 tok/s", "running 3", "waiting 4", "KV cache 25.0%", "prefix hits 50.0%",
        "2.0 steps/s of 8.0 rows", "preempted 10",
    ):  # fmt: skip
        assert re.search(rf"\b{part}(,|$)", line), line


@pytest.mark.parametrize("speculates", [False, True])
def test_drafts_are_named_where_there_are_any(lines: pytest.LogCaptureFixture, speculates: bool) -> None:
    stats = StatsLine(True)
    for i in range(2):
        of = {"speculation": SpeculationStats(10 * i, 20 * i, [9 * i, 4 * i])} if speculates else {}
        beat = msgspec.structs.replace(heartbeat(1000), stats=engine_stats(**{"speculation": None, **of}))
        stats.heartbeat(beat, 100.0 + INTERVAL_S * i)
        stats.step(1, 3)
    (line,) = lines.messages
    assert line.endswith(", accepted length 2.30, drafts accepted by place 90% 40%") == speculates
    assert ("accepted" in line) == speculates


def test_nothing_to_say_while_idle_or_turned_off(lines: pytest.LogCaptureFixture) -> None:
    for stats, num_steps in ((StatsLine(True), 0), (StatsLine(False), 5)):
        for i in range(5):
            stats.heartbeat(heartbeat(i), 100.0 + INTERVAL_S * i)
            for _ in range(num_steps):
                stats.step(1, 1)
    assert lines.messages == []


def test_distributions_are_totals_by_bucket() -> None:
    counted = Counted((1, 8, 16))
    before = counted.so_far()
    for value in (0, 1, 2, 8, 16, 17):
        counted.observe(value)
    assert (before.counts, before.sum) == ([0, 0, 0, 0], 0.0)
    assert (counted.so_far().counts, counted.so_far().sum) == ([2, 2, 1, 1], 44.0)
    before = counted.so_far()
    counted.observe_all(np.array([0, 1, 2, np.nan, 8, 16, 17.0]))
    assert (counted.so_far().counts, counted.so_far().sum) == ([4, 4, 2, 2], 88.0)
    for nothing in ([], [np.nan], [np.nan, np.nan]):
        counted.observe_all(np.array(nothing))
    assert (counted.so_far().counts, counted.so_far().sum) == ([4, 4, 2, 2], 88.0)
    counted.observe_all(np.array([8.0, 8.0, 8.0]))
    assert (counted.so_far().counts, counted.so_far().sum) == ([4, 7, 2, 2], 112.0)
    assert before.counts == [2, 2, 1, 1]
