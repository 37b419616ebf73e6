"""A small soak of adapters: loads, reloads, unloads, kills and broken folders beside streams, all of which stay right."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_small_soak_of_adapters_finds_nothing():
    command = [sys.executable, "benchmarks/soak_adapters.py", "--operations", "24", "--broken", "40", "--streams", "8"]
    command += ["--adapters", "6", "--kills", "2", "--quiet-s", "1", "--answer-s", "30", "--max-growth-mib", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert done.returncode == 0 and result["ok"], (result["failures"], done.stderr)
    assert result["answers"].keys() == {"right"} and result["kills"] == {"worker": 1, "core": 1}
    assert result["calls"]["load 400"] >= 40
