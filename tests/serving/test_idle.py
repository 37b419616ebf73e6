"""The measure of an idle server (benchmarks/idle.py) works; a minute of it is for the benchmark."""

import runpy
from pathlib import Path

import pytest
from serving import SMALL

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "idle.py"


def test_a_second_of_idleness(capfd: pytest.CaptureFixture[str]) -> None:
    rows = runpy.run_path(str(SCRIPT))["measure"]([*SMALL, "--disable-log-stats"], settle_s=0.2, seconds=1.0)
    assert [row["process"] for row in rows] == ["serve", "core", "worker"]
    for row in rows:  # a clock's tick is one per cent here; waking costs more on a busy machine
        assert row["cpu_percent"] < 5.0 and row["switches_per_s"] < 50, row
