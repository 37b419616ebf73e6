"""GPU tests in several calls: what is kept of earlier ones, what a change of the code drops, what is run and said."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import gpu_tests
import pytest
from kept_tests import Kept, code_state
from serving import until

GPU = {"device": "a GPU", "torch": "2.11", "triton": "3.6", "python": "3.11"}
CODE = {"kernels/norm.py": "1", "tests/kernels/test_a.py": "2", "tests/gpu/test_b.py": "3", "tests/support/s.py": "4"}
A, B, C = "tests/kernels/test_a.py::test_1", "tests/kernels/test_a.py::test_2[x]", "tests/gpu/test_b.py::test_3"


@pytest.fixture
def kept(tmp_path) -> Kept:
    kept = Kept(tmp_path / "kept.jsonl")
    assert kept.begin(GPU, CODE) == ""
    kept.add(A, "passed")
    kept.add(B, "failed")
    kept.add(C, "skipped")
    return Kept.read(kept.path)


def test_what_is_written_is_read(kept):
    assert (kept.machine, kept.code, kept.outcomes) == (GPU, CODE, {A: "passed", B: "failed", C: "skipped"})
    with kept.path.open("a") as file:
        file.write('{"test": "half a li')  # killed while it wrote
    assert Kept.read(kept.path) == kept
    assert Kept.read(kept.path.with_name("none")).outcomes == {}


def test_the_same_code_keeps_everything(kept):
    assert kept.begin(GPU, CODE) == "" and Kept.read(kept.path).outcomes == {A: "passed", B: "failed", C: "skipped"}


@pytest.mark.parametrize(
    ("change", "left", "said"),
    [
        ({"tests/kernels/test_a.py": "9"}, {C}, "tests/kernels/test_a.py changed since: the tests in it are run anew."),
        ({"kernels/norm.py": "9"}, set(), "kernels/norm.py changed since: every test is run anew."),
        ({"kernels/new.py": "9", "tests/gpu/test_b.py": "9"}, set(), "kernels/new.py changed since: every test is run anew."),
        ({"tests/support/s.py": "9"}, set(), "tests/support/s.py changed since: every test is run anew."),
        ({f"ipc/{n}.py": "1" for n in range(9)}, set(), "ipc/0.py, ipc/1.py, ipc/2.py and 6 more files changed since: every"),
    ],
)
def test_a_change_of_the_code_drops_what_no_longer_holds_and_says_so(kept, change, left, said):
    assert kept.begin(GPU, CODE | change).startswith(said)
    again = Kept.read(kept.path)
    assert (again.outcomes.keys(), again.code) == (left, CODE | change)


def test_a_file_that_is_gone_is_a_change(kept):
    assert "kernels/norm.py changed" in kept.begin(GPU, {path: digest for path, digest in CODE.items() if path[0] != "k"})


def test_another_machine_starts_anew(kept):
    assert "Another machine" in kept.begin({**GPU, "torch": "2.12"}, CODE, anyway=True) and kept.outcomes == {}


def test_results_are_kept_anyway_if_the_user_says_so(kept):
    assert "are kept, as --anyway asks" in kept.begin(GPU, CODE | {"kernels/norm.py": "9"}, anyway=True)
    assert len(Kept.read(kept.path).outcomes) == 3


def test_what_was_cut_off_comes_first_and_what_failed_last(kept):
    kept.add("cut", "cut")
    assert kept.to_run([B, "new", A, C, "cut"]) == ["cut", "new", B]


def test_a_test_that_is_cut_off_twice_has_failed(kept):
    kept.add("slow", "cut")
    assert (kept.outcomes["slow"], kept.cut_twice) == ("cut", set())
    kept = Kept.read(kept.path)
    kept.begin(GPU, CODE)
    kept.add("slow", "cut")
    again = Kept.read(kept.path)
    assert (again.outcomes["slow"], again.cut_twice) == ("failed", {"slow"})
    again.add("slow", "passed")
    assert again.outcomes["slow"] == "passed"


def test_the_state_of_the_code_is_that_of_its_files(tmp_path):
    for path in ("pyproject.toml", "kernels/a.py", "kernels/table.json", "kernels/__pycache__/a.pyc", "docs/a.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    before = code_state(tmp_path, ["kernels", "tests"])
    assert before.keys() == {"pyproject.toml", "kernels/a.py", "kernels/table.json"}
    (tmp_path / "kernels/a.py").write_text("other")
    after = code_state(tmp_path, ["kernels", "tests"])
    assert {path for path in before if before[path] != after[path]} == {"kernels/a.py"}
    assert all((gpu_tests.ROOT / folder).is_dir() for folder in gpu_tests.CODE)


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ({A: "passed", B: "skipped"}, 0), ({A: "passed"}, 3), ({A: "failed"}, 1), ({A: "passed", B: "cut"}, 3), ({}, 3),
        ({A: "skipped", B: "skipped"}, 1),
    ],
)  # fmt: skip
def test_the_status_says_what_to_do(outcomes, status):
    result, found = gpu_tests.part_summary(Kept(Path("x"), outcomes=outcomes), [A, B])
    assert found == status and sum(result[name] for name in ("passed", "failed", "skipped", "left")) == 2


# ------------------------------------------------------------------------------------------------------------ whole calls
SUITE = """
import pathlib, time
import pytest

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", range(4))
def test_quick(n):
    with (HERE / "ran").open("a") as file:
        file.write(f"{n}\\n")

def test_skipped():
    pytest.skip("no second GPU")

def test_fails_until_mended():
    assert (HERE / "mended").exists()

def test_slow():
    (HERE / "slow").touch()
    while not (HERE / "quick").exists():
        time.sleep(0.01)
"""


# In place of time: wait until all that can end has ended and the slow test has begun, then say that the time is over.
CUT = """
def is_over():
    running = path.with_name(path.name + ".running")
    begun = running.read_text() if running.exists() else ""
    return len(kept_tests.Kept.read(path).outcomes) == 5 and "test_slow" in begun

class Popen(subprocess.Popen):
    def wait(self, timeout=None):
        while timeout and not is_over():
            time.sleep(0.01)
        if timeout:
            raise subprocess.TimeoutExpired("pytest", timeout)
        return super().wait()
gpu_tests.subprocess.Popen = Popen
"""
QUICKLY = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


class Suite:
    """A suite of its own, and calls of gpu_tests.py that take the CPU for a GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "kept.jsonl"
        (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
        (folder / "test_it.py").write_text(SUITE)

    def command(self, *words: str, patches: str = "") -> list[str]:
        program = f"""import pathlib, subprocess, sys, time
sys.path.insert(0, "benchmarks")
import gpu_tests, kept_tests
path, gpu_tests.device, gpu_tests.processes = pathlib.Path({str(self.kept)!r}), lambda: {GPU}, list
{patches}
gpu_tests.main()"""
        pytest_words = ["-c", str(self.folder / "pytest.ini"), "--rootdir", str(self.folder), str(self.folder)]
        return [sys.executable, "-c", program, "--minutes", "60", "--kept", str(self.kept), *pytest_words, *words]

    def call(self, *words: str, patches: str = "") -> tuple[int, dict, str]:
        command = self.command(*words, patches=patches)
        done = subprocess.run(command, cwd=gpu_tests.ROOT, env=QUICKLY, capture_output=True, text=True)
        last = done.stdout.splitlines()[-1] if done.stdout else ""
        return done.returncode, json.loads(last.removeprefix("RESULT ") or "{}"), done.stdout + done.stderr

    def ran(self) -> list[str]:
        return sorted((self.folder / "ran").read_text().split())


@pytest.fixture
def suite(tmp_path) -> Suite:
    return Suite(tmp_path)


@pytest.mark.slow
def test_a_second_call_runs_only_what_failed(suite):
    (suite.folder / "quick").touch()
    status, result, text = suite.call()
    counts = {name: result[name] for name in ("passed", "failed", "skipped", "left")}
    assert (status, counts) == (1, {"passed": 5, "failed": 1, "skipped": 1, "left": 0}), text
    assert "FAILED test_it.py::test_fails_until_mended" in text and "The next call runs the failed ones again" in text
    (suite.folder / "mended").touch()
    status, result, text = suite.call()
    assert (status, result["passed"], suite.ran()) == (0, 6, ["0", "1", "2", "3"]), text
    status, result, text = suite.call()
    assert (status, result["passed"]) == (0, 6) and "All have passed" in text and "are to be run" not in text
    assert suite.call("--anew", "-k", "quick")[1]["passed"] == 4 and len(suite.ran()) == 8


@pytest.mark.slow
def test_what_is_cut_off_is_run_by_the_next_call(suite):
    words = ["-p", "xdist", "-n", "2", "--deselect", "test_it.py::test_fails_until_mended"]
    status, result, text = suite.call(*words, patches=CUT)
    assert (status, result["left"]) == (3, 1), text
    assert "Cut off: test_it.py::test_slow" in text and "goes on with the 1 that are left" in text
    (suite.folder / "quick").touch()
    status, result, text = suite.call(*words)
    assert (status, result["passed"], suite.ran()) == (0, 5, ["0", "1", "2", "3"]), text


def test_no_test_starts_after_the_deadline(suite):
    status, result, text = suite.call(patches="gpu_tests.LAST_START = 0.0")
    assert (status, result["left"]) == (3, 7) and not (suite.folder / "ran").exists(), text


def test_what_is_interrupted_has_kept_what_passed(suite):
    child = subprocess.Popen(suite.command("-k", "quick or slow"), cwd=gpu_tests.ROOT, env=QUICKLY)
    until(lambda: (suite.folder / "slow").exists() or child.poll() is not None)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait() == 3
    assert list(Kept.read(suite.kept).outcomes.values()) == ["passed"] * 4


def test_a_suite_that_cannot_be_collected_says_why(suite):
    (suite.folder / "test_it.py").write_text("import nothing_of_this_name")
    status, _, text = suite.call()
    assert status == 1 and "nothing_of_this_name" in text and "none was run" in text


def test_without_a_gpu_it_says_so(suite):
    status, _, text = suite.call(patches='gpu_tests.device = lambda: {"device": "none"}')
    assert status == 2 and "no CUDA device" in text
