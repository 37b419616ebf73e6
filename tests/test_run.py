"""A test that passes alone is named and fails no run; one that fails again, and many that fail, do."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")

UNSTEADY = """
def test_unsteady():
    from pathlib import Path
    mark = Path(__file__).with_suffix(".ran")
    had, _ = mark.exists(), mark.touch()
    assert had
"""
WRONG = "def test_wrong(): assert False\n"
MANY = "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_wrong(n): assert False\n"


@pytest.mark.parametrize(
    ("text", "status", "said", "not_said"),
    [
        (UNSTEADY, 0, "UNSTEADY, failed at first and passed alone: test_it.py::test_unsteady", ""),
        (WRONG, 1, "Once more, alone: test_it.py::test_wrong", "UNSTEADY"),
        (
            WRONG + UNSTEADY,
            1,
            "UNSTEADY, failed at first and passed alone: test_it.py::test_unsteady",
            "alone: test_it.py::test_wrong\n",
        ),
        (MANY, 1, "5 failed", "Once more"),
        ("def test_right(): pass\n", 0, "1 passed", "Once more"),
        ("import no_such_module\n", 2, "no_such_module", "UNSTEADY"),
    ],
)
def test_what_fails_runs_once_more(text, status, said, not_said, tmp_path):
    (tmp_path / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, RUN, "-p", "no:xdist", "-c", "/dev/null", "--rootdir", tmp_path, "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == status and said in done.stdout
    assert not not_said or not_said not in done.stdout
