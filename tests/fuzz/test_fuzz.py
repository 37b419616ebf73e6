"""Half a minute of the fuzzer, with the same cases in every run, and that it finds what is wrong, and a case again by its file.

`make fuzz` tries others, for longer (run.py). A red test prints the finding and the command that tries it again.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz.case import Case, Target
from fuzz.run import TARGETS
from fuzz.worker import ROOT, Note, kept_cases, made, target_of, tried

SECONDS = 30.0  # of all targets together, beside their kept cases
RUN = Path(__file__).parent / "run.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *words], cwd=ROOT, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("seconds", [SECONDS, pytest.param(4 * SECONDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(name: str, seconds: float) -> None:
    done = run("--seed", "38", "--minutes", str(seconds / 60 / len(TARGETS)), "--target", name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ("http_reader", "parsers", "batches"))
def test_a_seed_makes_the_same_cases_again(name: str) -> None:
    target = target_of(name)
    pool = [*target.seeds(), *kept_cases(target).values()]
    cases = [made(target, pool, 7, number) for number in range(50)]
    assert cases == [made(target, pool, 7, number) for number in range(50)]
    assert cases != [made(target, pool, 8, number) for number in range(50)]
    assert [Case.decode(case.encode()) for case in cases] == cases


def test_a_finding_is_told_apart_from_others() -> None:
    def check(case: Case) -> None:
        if b"x" in case.payload:
            raise KeyError("x")
        if b"slow" in case.payload:
            end = time.process_time() + 0.05
            while time.process_time() < end:
                pass

    target = Target("none", list, lambda draw, case, others: case, check, most_s=0.02)
    assert tried(target, Case({}, b"a")) is None
    kind, text = tried(target, Case({}, b"x"))
    assert kind.startswith("KeyError at test_fuzz.py:") and "Traceback" in text
    assert tried(target, Case({}, b"slow"))[0] == "slow at none"


def test_a_case_that_ends_or_stops_its_process_is_known(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"\0" * (1 << 20))
    note = Note(str(path))
    assert note.read() == (-1, b"")
    note.write(5, b"abc")
    assert Note(str(path)).read() == (5, b"abc")


def test_a_file_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "batches-0"
    path.write_bytes(Case({"kind": "line"}, b"{").encode())
    done = run("--case", str(path))
    assert (done.returncode, done.stdout) == (0, "batches: nothing is wrong\n")
