"""A model on a CPU of little memory: it serves as many requests as ever, or the start says what does not fit."""

import re
import subprocess
import sys

import pytest
from deadlines import DEADLINE_S

from quire import LLM
from quire.frontend.cli import main as cli
from quire.frontend.launcher import EngineStartError
from quire.ipc.memory_plan import GIB, MIB
from quire.ipc.sampling import SamplingParams


def test_the_bundled_model_serves_64_requests_in_2_gib():
    with LLM(device="cpu", host_memory_bytes=2 * GIB) as llm:
        found = llm.generate([f"{n} once" for n in range(64)], SamplingParams(max_tokens=8, ignore_eos=True))
    assert [len(one.outputs[0].token_ids) for one in found] == [8] * 64


def test_a_start_that_does_not_fit_says_so():
    with pytest.raises(EngineStartError, match=r"^weights and activations .* are needed .* 0.50 GiB are avail"):
        LLM(device="cpu", host_memory_bytes=512 * MIB)


def test_a_server_that_does_not_fit_ends_with_1_and_both_numbers():
    """A KV cache that no machine has: what is available is this machine's own."""
    command = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "serve", "--device", "cpu", "--port", "0"]
    flags = ["--kv-cache-memory-bytes", "9000G", "--log-level", "error"]
    ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 1 and ended.stdout == ""
    refused = (
        r"quire serve: the KV cache does not fit .*: 9000\.\d\d GiB are needed \(.*, and (\d+\.\d\d) GiB are available by "
    )
    found = re.search(refused, ended.stderr)
    assert found and 0 < float(found[1]) < 9000, ended.stderr


def test_an_estimate_that_does_not_fit_ends_with_1(capsys):
    assert cli.main(["estimate", "--device", "cpu", "--kv-cache-memory-bytes", "9000G"]) == 1
    assert "It does not fit: the KV cache does not fit into this machine's memory: 9000." in capsys.readouterr().out
