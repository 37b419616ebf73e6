"""A test run in several calls: results of earlier calls are kept in a file, and each call runs what is left for a while.

`Kept` is that file: one JSON object a line, first the state of the code, then each finished test. It is written while tests
run, so a call that is killed loses only the tests that were running. The hooks below are a pytest plugin (`-p kept_tests`),
which gpu_tests.py loads into pytest and its xdist workers, and which three environment variables configure.

A test that was cut off by the end of a call comes first in the next one, and counts as failed when that cuts it off, too.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

KEPT = "QUIRE_TESTS_KEPT"  # the file of results, which the controlling process of pytest appends to
SELECTED = (
    "QUIRE_TESTS_SELECTED"  # a file: node ids to run, in this order; if it is absent, the collected ones are written to it
)
DEADLINE = "QUIRE_TESTS_DEADLINE"  # seconds of time.time(): no test starts later


def code_state(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Path -> digest of every file that may change what a test finds."""
    files = [root / "pyproject.toml", *(path for folder in folders for path in (root / folder).rglob("*") if path.is_file())]
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted(files)
        if path.is_file() and "__pycache__" not in path.parts
    }


@dataclass
class Kept:
    """Outcomes of earlier calls by node id: passed, skipped, failed, or cut (off by the end of a call).

    `machine` is the device and the versions, `code` what `code_state` says.
    """

    path: Path
    machine: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    cut_twice: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> "Kept":
        """An absent file is an empty run; a last line that was cut off is left out."""
        kept = cls(path)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "test" in entry:
                kept.note(entry["test"], entry["outcome"])
            else:
                kept.machine, kept.code = entry["machine"], entry["code"]
        return kept

    def note(self, test: str, outcome: str) -> None:
        if outcome == "cut" and self.outcomes.get(test) == "cut":
            self.cut_twice.add(test)
            outcome = "failed"
        self.outcomes[test] = outcome

    def add(self, test: str, outcome: str) -> None:
        self.note(test, outcome)
        with self.path.open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome}) + "\n")

    def begin(self, machine: dict[str, str], code: dict[str, str], anyway: bool = False) -> str:
        """Drop what no longer holds, and write the rest. Returns a sentence on what was dropped and why, or ""."""
        changed = sorted(path for path in self.code.keys() | code.keys() if self.code.get(path) != code.get(path))
        said = ""
        if not self.outcomes:
            pass
        elif self.machine != machine:
            said = f"Another machine or other versions than before ({_values(self.machine)}): every test is run anew."
            self.outcomes.clear()
        elif changed and anyway:
            said = f"{_names(changed)} changed since; results from before the change are kept, as --anyway asks."
        elif any(not _is_test(path) for path in changed):
            said = f"{_names([p for p in changed if not _is_test(p)])} changed since: every test is run anew."
            self.outcomes.clear()
        elif changed:
            said = f"{_names(changed)} changed since: the tests in it are run anew."
            self.outcomes = {test: outcome for test, outcome in self.outcomes.items() if test.split("::")[0] not in changed}
        self.machine, self.code = machine, code
        lines = [{"machine": machine, "code": code}]
        for test, outcome in self.outcomes.items():
            lines.append({"test": test, "outcome": outcome})
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fresh.replace(self.path)
        return said

    def to_run(self, collected: list[str]) -> list[str]:
        """The tests that were cut off, then those not yet run, then those that failed. Passed and skipped ones are done."""
        ranks = {"cut": 0, None: 1, "failed": 2}
        left = [test for test in collected if self.outcomes.get(test) in ranks]
        return sorted(left, key=lambda test: ranks[self.outcomes.get(test)])


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_")


def _names(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else "")


def _values(machine: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())


# ------------------------------------------------------------------------------------------------------------- the plugin
class Recorder:
    """In the process that the user started: writes a test's outcome when its teardown is over."""

    def __init__(self, path: Path) -> None:
        self.kept = Kept(path)
        self.running: dict[str, set[str]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = set()
        self.kept.path.with_name(self.kept.path.name + ".running").write_text("\n".join(self.running))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.running.setdefault(report.nodeid, set()).add(report.outcome)
        if report.when not in ("setup", "call"):  # its teardown, or xdist's report of a worker that died in it
            found = self.running.pop(report.nodeid)
            self.kept.add(report.nodeid, next(name for name in ("failed", "skipped", "passed") if name in found))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and KEPT in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ[KEPT])))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = Path(os.environ[SELECTED])
    if not selected.exists():
        return
    places = {test: place for place, test in enumerate(selected.read_text().splitlines())}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
    items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])


def pytest_collection_finish(session: pytest.Session) -> None:
    selected = Path(os.environ[SELECTED])
    if not selected.exists() and session.config.option.collectonly:
        selected.write_text("".join(item.nodeid + "\n" for item in session.items))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """After the deadline a test is passed over without a report, so it stays among those that are left."""
    return True if time.time() > float(os.environ[DEADLINE]) else None
