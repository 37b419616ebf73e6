"""Kernels compiled in other processes: what is found in Triton's cache afterwards, and what happens if a process cannot."""

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from quire.kernels.compile_process import CompileProcesses, Job, _modules

COMMAND = [sys.executable, "-P", "-m", "quire.kernels.compile_process"]
NOWHERE = Job("no_such_module", "kernel", {}, {}, {}, {}, ("cuda", 90, 32))
ROOT = Path(__file__).parents[2]

# Without the turn of this process, so that all is compiled by the other; a listener tells what we found in Triton's cache.
PROGRAM = """
import sys
import hopper_offline
from hopper_offline import meta
import torch, triton
from quire.kernels import activation, compile_ahead, linear_hopper, norm
from quire.kernels.compile_process import CompileProcesses

class Others(CompileProcesses):
    def __init__(self, count):
        started.append(count)
        super().__init__(count)
        for turn in [self._turns.get() for _ in range(count + 1)][:count]:
            self._turns.put(turn)

    def compile(self, job, compile_here):
        asked.append(job.name)
        return super().compile(job, compile_here)

started, asked, found = [], [], []
compile_ahead.CompileProcesses = Others
torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
triton.knobs.compilation.listener = lambda src, cache_hit, **_: found.append((src.fn.__module__, cache_hit))
with compile_ahead.compile_only(2):
    config = linear_hopper.choose(16, 4096, 4096, 132)
    linear_hopper.launch(meta(16, 4096), meta(4096, 4096), None, meta(16, 4096), config, pdl=1)
    norm.rms_norm(meta(4, 4096), meta(4096), 1e-6, meta(4, 4096))
    activation.silu_mul(meta(4, 8192), meta(4, 4096))
print(started, len(asked), sorted(found))
"""


def test_what_another_process_has_compiled_is_found(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    found = str([(f"quire.kernels.{name}", True) for name in ("activation", "linear_hopper", "norm")])
    for asked in (3, 0):
        child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
        assert child.returncode == 0, child.stderr[-3000:]
        assert child.stdout.strip() == f"[1] {asked} {found}"


@pytest.mark.parametrize("job", [NOWHERE, NOWHERE._replace(options={"a": len})], ids=["no module", "no literal"])
def test_a_job_that_a_process_cannot_do_is_done_here(job):
    with CompileProcesses(1) as processes:
        assert [processes.compile(job, lambda n=n: n) for n in range(4)] == [0, 1, 2, 3]


def test_a_description_is_a_line():
    job = NOWHERE._replace(constexprs={(3,): 128, (4,): None}, attrs={(0,): [["tt.divisibility", 16]]}, options={"a": "b\nc"})
    assert job.line().count(b"\n") == 1 and Job(*ast.literal_eval(job.line().decode())) == job


def test_every_module_that_launches_kernels_is_known():
    pytest.importorskip("triton")
    launching = {f"quire.kernels.{path.stem}" for path in (ROOT / "kernels").glob("*.py") if "_kernel[" in path.read_text()}
    assert set(_modules()) == launching and len(launching) > 10


def test_an_error_is_told_and_the_turn_given_back():
    def fail():
        raise ValueError("wrong")

    with CompileProcesses(0) as processes:
        for _ in range(3):
            with pytest.raises(ValueError, match="wrong"):
                processes.compile(NOWHERE, fail)


def test_a_process_that_dies_is_done_without():
    with CompileProcesses(2) as processes:
        for _ in range(3):
            processes.compile(NOWHERE, lambda: None)
        started = [child for child in psutil.Process().children() if "quire.kernels.compile_process" in child.cmdline()]
        assert len(started) == 2
        for child in started:
            child.kill()
        assert [processes.compile(NOWHERE, lambda n=n: n) for n in range(6)] == list(range(6))


def test_nothing_is_started_before_it_is_wanted_and_nothing_is_left():
    def children():
        return [child for child in psutil.Process().children() if "quire.kernels.compile_process" in child.cmdline()]

    with CompileProcesses(3) as processes:
        assert children() == []
        threads = [threading.Thread(target=processes.compile, args=(NOWHERE, lambda: None)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(children()) == 3
    assert children() == []


def test_a_process_ends_with_its_input():
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.communicate(timeout=60)[0] == b"" and process.returncode == 0
