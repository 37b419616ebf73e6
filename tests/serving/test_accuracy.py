"""The bundled model over HTTP still answers what it was trained to: caching, chunking, batching and 8 bits cost no quality.

A few questions of each task; benchmarks/accuracy.py asks 200 of each.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import SMALL, Served

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy.py"


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-num-batched-tokens", "32"),
        ("--quantization", "fp8"),
        ("--quantization", "int8"),
        ("--quantization", "int4"),
        ("--kv-cache-dtype", "fp8"),
    ],
)
def test_the_bundled_model_answers_in_small_chunks_and_a_crowd(flags: tuple[str, str]) -> None:
    with Served(*SMALL, *flags) as served:
        served.ready()
        command = [sys.executable, str(SCRIPT), "--url", served.url, "--items", "12", "--concurrency", "8", "--at-least", "0.9"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert served.end() == 0
    found = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert "add" in json.dumps(found) and "call" in json.dumps(found)
