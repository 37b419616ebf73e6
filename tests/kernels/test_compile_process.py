"""Kernels compiled in other processes: what is found in Triton's cache afterwards, and what happens if a process cannot."""

import ast
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S
from serving import command_of

from quire.kernels.triton_support.compile_process import COMMAND, FEW, CompileProcesses, Job, _Process

NOWHERE = Job("no_such_module", "kernel", {}, {}, {}, {}, ("cuda", 90, 32))
ROOT = Path(__file__).parents[2]

# Without the turn of this process, so that all is compiled by the other; a listener tells what we found in Triton's cache.
PROGRAM = """
import sys
import hopper_offline
from hopper_offline import meta
import torch, triton
from quire.kernels.elementwise import activation
from quire.kernels.triton_support import compile_ahead
from quire.kernels.linear import linear_hopper
from quire.kernels.elementwise import norm
from quire.kernels.triton_support.compile_process import CompileProcesses

class Others(CompileProcesses):
    def __init__(self, count):
        started.append(count)
        super().__init__(count)
        self._free.remove(None)
        self._are_many = True

    def compile(self, job, compile_here):
        asked.append(job.name)
        return super().compile(job, compile_here)

started, asked, found = [], [], []
before, run = compile_ahead.JITFunction._do_compile, compile_ahead.JITFunction.run
compile_ahead.CompileProcesses = Others
torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
triton.knobs.compilation.listener = lambda src, cache_hit, **_: found.append((src.fn.__module__, cache_hit))
with compile_ahead.compile_only(2):
    config = linear_hopper.choose(16, 4096, 4096, 132)
    linear_hopper.launch(meta(16, 4096), meta(4096, 4096), None, meta(16, 4096), config, pdl=1)
    norm.rms_norm(meta(4, 4096), meta(4096), 1e-6, meta(4, 4096))
    activation.silu_mul(meta(4, 8192), meta(4, 4096))
assert compile_ahead.JITFunction._do_compile is before and compile_ahead.JITFunction.run is run
print(started, len(asked), sorted(found))
"""


@pytest.mark.slow
def test_what_another_process_has_compiled_is_found(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    found = str(
        [(f"quire.kernels.{name}", True) for name in ("elementwise.activation", "elementwise.norm", "linear.linear_hopper")]
    )
    for asked in (3, 0):
        child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
        assert child.returncode == 0, child.stderr[-3000:]
        assert child.stdout.strip() == f"[1] {asked} {found}"


def compile_all(processes, jobs, work=lambda: None):
    """In as many threads."""
    for _ in jobs:
        processes.announce()
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(processes.compile, job, work) for job in jobs]]


def helpers():
    return [
        child for child in psutil.Process().children() if "quire.kernels.triton_support.compile_process" in command_of(child)
    ]


@pytest.mark.parametrize("job", [NOWHERE, NOWHERE._replace(options={"a": len})], ids=["no module", "no literal"])
def test_a_job_that_a_process_cannot_do_is_done_here(job):
    with CompileProcesses(2) as processes:
        assert compile_all(processes, [job] * (FEW + 4), lambda: 7) == [7] * (FEW + 4)


def test_few_are_compiled_by_this_process_alone_one_at_a_time():
    begun, go_on, alone = threading.Event(), threading.Event(), threading.Lock()

    def work():
        assert alone.acquire(blocking=False)
        begun.set()
        assert go_on.wait(DEADLINE_S)
        alone.release()
        return 7

    with CompileProcesses(3) as processes, ThreadPoolExecutor(1) as pool:
        results = pool.submit(compile_all, processes, [NOWHERE] * FEW, work)
        assert begun.wait(DEADLINE_S) and len(processes._free) == 3 and None not in processes._free
        go_on.set()
        assert results.result(DEADLINE_S) == [7] * FEW
        assert compile_all(processes, [NOWHERE] * FEW, work) == [7] * FEW
        assert helpers() == []


def test_a_description_is_a_line():
    job = NOWHERE._replace(constexprs={(3,): 128, (4,): None}, attrs={(0,): [["tt.divisibility", 16]]}, options={"a": "b\nc"})
    assert job.line().count(b"\n") == 1 and Job(*ast.literal_eval(job.line().decode())) == job


def test_every_module_that_launches_kernels_is_loaded():
    paths = (ROOT / "kernels").rglob("*.py")
    launching = {f"quire.kernels.{path.parent.name}.{path.stem}" for path in paths if "kernel[" in path.read_text()}
    tree = ast.parse((ROOT / "kernels/compile_list.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("quire.kernels.")]
    assert {f"{node.module}.{alias.name}" for node in imports for alias in node.names} == launching and len(launching) > 10


def test_an_error_is_told_and_the_turn_given_back():
    def fail():
        raise ValueError("wrong")

    with CompileProcesses(0) as processes:
        for _ in range(3):
            processes.announce()
            with pytest.raises(ValueError, match="wrong"):
                processes.compile(NOWHERE, fail)


def test_processes_are_started_for_many_and_done_without_when_they_die():
    barrier = threading.Barrier(3)  # two processes and this one are at work at once
    with CompileProcesses(2) as processes:
        compile_all(processes, [NOWHERE] * 12, lambda: barrier.wait(DEADLINE_S))
        assert len(helpers()) == 2
        for child in helpers():
            child.kill()
        assert compile_all(processes, [NOWHERE] * 12, lambda: 7) == [7] * 12
    assert helpers() == []


@pytest.mark.parametrize(
    "program",
    ["import threading; threading.Event().wait()", "print('no answer', flush=True); input()", "raise SystemExit", "input()"],
)
def test_a_process_that_does_not_answer_is_asked_once(program, monkeypatch):
    monkeypatch.setattr("quire.kernels.triton_support.compile_process.COMMAND", [sys.executable, "-S", "-c", program])
    monkeypatch.setattr("quire.kernels.triton_support.compile_process.JOB_TIMEOUT_S", 0.5)
    process = _Process()
    try:
        process.compile(NOWHERE)
        assert process._is_lost
        monkeypatch.setattr(process, "_answer", pytest.fail)
        process.compile(NOWHERE)
    finally:
        process.end()


def test_what_a_compiler_prints_is_no_answer():
    load = "from quire.kernels.triton_support import compile_process as p"
    program = f"{load}; p._compile = lambda job: print('noise', flush=True); p.main()"
    lines = NOWHERE.line() * 3
    child = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, timeout=200, check=True)
    assert child.stdout == b"..." and child.stderr.split() == [b"noise"] * 3


def test_a_process_ends_with_its_input():
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.communicate(timeout=200)[0] == b"" and process.returncode == 0
