"""Run the tests marked `gpu` and print a machine-readable summary: `python benchmarks/gpu_tests.py [pytest arguments]`.

The last line is `RESULT {json}`: the device, versions, counts and seconds, in all and by file, the names of failed tests.
Exits 1 if one failed or none ran. With pytest-xdist installed the tests share the GPU in four processes.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_tests(report: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "ignore", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "4"]
    # several test processes with a thread for every core each would only wait for one another
    environment = {"OMP_NUM_THREADS": "2", **os.environ}
    subprocess.run([*command, *(arguments or ["tests"])], cwd=ROOT, env=environment, check=False)


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


def device() -> dict[str, str]:
    import torch
    import triton

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}


def main() -> None:
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run_tests(report, sys.argv[1:])
        result = {**device(), **summary(report)}
    print("RESULT " + json.dumps(result))
    sys.exit(1 if result["failed"] or not result["passed"] else 0)


if __name__ == "__main__":
    main()
