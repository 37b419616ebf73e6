"""Run the tests marked `gpu` and print a machine-readable summary: `python benchmarks/gpu_tests.py [pytest arguments]`.

With `--minutes 10` (`make test-gpu`) the call ends within that time. Results are kept in a file (`.gpu_tests.jsonl`, or
`--kept FILE`), and the next call goes on with the tests that are left, then runs those that failed once more. If a test's file
has changed, its tests are run anew; if other code, the GPU or a version has changed, all are. The call says so. `--anyway`
keeps the results in spite of changed code, `--anew` drops all of them. pytest's arguments choose among the tests as usual.

The last line is `RESULT {json}`: the device, versions, counts (and seconds by file of a call without --minutes), failed tests.
Exits 0 if all have passed, 1 if one failed or none ran, 3 if none failed and some are left, 2 if there is no GPU.
With pytest-xdist installed the tests share the GPU in four processes.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = str(ROOT / "tests" / "support")
sys.path[:0] = [SUPPORT]
from kept_tests import DEADLINE, KEPT, SELECTED, Kept, code_state  # noqa: E402

CODE = ("ipc", "kernels", "frontend", "enginecore", "workers", "tests", "benchmarks/tuning")
PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "ignore", "-p", "no:cacheprovider"]
LAST_START = 0.9  # of the time: no test is started later, so that most that run can end
ENDING_S = 10.0  # before the end of the time, in which pytest is killed and the summary printed


def environment(**more: str) -> dict[str, str]:
    # several test processes with a thread for every core each would only wait for one another
    path = os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH", ""))))  # of the plugin
    return {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONPATH": path, **more}


def processes() -> list[str]:
    return ["-n", "4"] if importlib.util.find_spec("xdist") else []


def device() -> dict[str, str]:
    import torch
    import triton

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}


# ------------------------------------------------------------------------------------------------------------- all at once
def run_tests(report: Path, arguments: list[str]) -> None:
    command = [*PYTEST, f"--junit-xml={report}", *processes(), *(arguments or ["tests"])]
    subprocess.run(command, cwd=ROOT, env=environment(), check=False)


def summary(report: Path) -> dict[str, Any]:
    """Counts from pytest's JUnit report."""
    files: dict[str, dict[str, float]] = defaultdict(lambda: {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "").removeprefix("tests.")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        files[name][outcome] += 1
        files[name]["seconds"] = round(files[name]["seconds"] + float(case.get("time", 0)), 2)
        if outcome == "failed":
            failed.append(f"{name}::{case.get('name')}")
    totals = {k: sum(f[k] for f in files.values()) for k in ("passed", "failed", "skipped")}
    return {**totals, "failures": failed, "files": dict(files)}


def run_at_once(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run_tests(report, arguments)
        result = {**device(), **summary(report)}
    print("RESULT " + json.dumps(result))
    return 1 if result["failed"] or not result["passed"] else 0


# ------------------------------------------------------------------------------------------------------------- part by part
def collected(selected: Path, arguments: list[str]) -> list[str]:
    """Node ids of the tests that the arguments choose. Exits with pytest's words if a file cannot be imported."""
    command = [*PYTEST, "-p", "kept_tests", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(**{SELECTED: str(selected)}), capture_output=True, text=True)
    if done.returncode not in (0, 5):
        sys.exit(f"{done.stdout}{done.stderr}\nThe tests cannot be collected, so none was run.")
    return selected.read_text().splitlines() if selected.exists() else []


def run_part(kept: Kept, selected: Path, arguments: list[str], begin: float, limit_s: float) -> int:
    """Run the selected tests, and kill them before the time is over. Returns pytest's status, 0 if it was killed."""
    running = kept.path.with_name(kept.path.name + ".running")
    running.unlink(missing_ok=True)
    command = [*PYTEST, "-p", "kept_tests", *processes(), *arguments]
    settings = {KEPT: str(kept.path), SELECTED: str(selected), DEADLINE: str(begin + LAST_START * limit_s)}
    child = subprocess.Popen(command, cwd=ROOT, env=environment(**settings), start_new_session=True)
    try:
        return child.wait(max(1.0, begin + limit_s - min(ENDING_S, 0.05 * limit_s) - time.time()))
    except KeyboardInterrupt:
        print("\nInterrupted.")
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        cut = _cut_off(kept.path, running)
        print("\nThe time is over." + (f" Cut off: {', '.join(cut)}." if cut else ""))
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        running.unlink(missing_ok=True)
    return 0


def _cut_off(path: Path, running: Path) -> list[str]:
    """Write to the file which tests had begun and have no outcome of this call."""
    kept = Kept.read(path)
    begun = running.read_text().splitlines() if running.exists() else []
    cut = [test for test in begun if kept.outcomes.get(test) in (None, "cut")]
    for test in cut:
        kept.add(test, "cut")
    return cut


def part_summary(kept: Kept, tests: list[str]) -> tuple[dict[str, Any], int]:
    """Counts and failed tests of all calls so far, and the exit status."""
    counts = Counter(kept.outcomes.get(test, "left") for test in tests)
    left = counts["left"] + counts["cut"]
    failed = [test for test in tests if kept.outcomes.get(test) == "failed"]
    totals = {"passed": counts["passed"], "failed": len(failed), "skipped": counts["skipped"], "left": left}
    status = 1 if failed or not (counts["passed"] or left) else 3 if left else 0
    return {**totals, "failures": failed}, status


def print_summary(result: dict[str, Any], kept: Kept, minutes: float) -> None:
    for test in result["failures"]:
        print(f"FAILED {test}" + (" (did not end in two calls)" if test in kept.cut_twice else ""))
    total = sum(result[name] for name in ("passed", "failed", "skipped", "left"))
    counts = ", ".join(f"{result[name]} {name}" for name in ("passed", "failed", "skipped", "left"))
    print(f"GPU tests: {counts} of {total}, after {minutes:.1f} minutes of this call.")
    if result["left"]:
        print(f"Call it again: it goes on with the {result['left']} that are left ({kept.path.name} has the others).")
    elif result["failed"]:
        print("All were run. The next call runs the failed ones again.")
    else:
        print("All have passed. --anew runs them again.")


def run_by_parts(options: argparse.Namespace, arguments: list[str]) -> int:
    begin, limit_s = time.time(), 60 * options.minutes
    machine = device()
    if machine["device"] == "none":
        print("There is no CUDA device here: tests/ without a GPU are `make test`.", file=sys.stderr)
        return 2
    if options.anew:
        options.kept.unlink(missing_ok=True)
    kept = Kept.read(options.kept)
    if said := kept.begin(machine, code_state(ROOT, CODE), options.anyway):
        print(said)
    pytest_status = 0
    with tempfile.TemporaryDirectory() as folder:
        selected = Path(folder) / "selected"
        tests = collected(selected, arguments)
        if to_run := kept.to_run(tests):
            print(f"{len(to_run)} of {len(tests)} GPU tests are to be run.", flush=True)
            selected.write_text("".join(test + "\n" for test in to_run))
            pytest_status = run_part(kept, selected, arguments, begin, limit_s)
    kept = Kept.read(options.kept)
    result, status = part_summary(kept, tests)
    print_summary(result, kept, (time.time() - begin) / 60)
    if is_broken := pytest_status not in (0, 1, 5):
        print(f"pytest itself ended with status {pytest_status}, see above.")
    print("RESULT " + json.dumps({**machine, **result}))
    return 1 if is_broken else status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--kept", type=Path, default=ROOT / ".gpu_tests.jsonl")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--anyway", action="store_true")
    options, arguments = parser.parse_known_args()
    if options.minutes is None:
        sys.exit(run_at_once(arguments))
    options.kept = options.kept.resolve()
    sys.exit(run_by_parts(options, arguments or ["tests"]))


if __name__ == "__main__":
    main()
