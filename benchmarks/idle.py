"""The CPU of an idle server: each process's over a minute without requests. Every one should be under 2 % of a core.

    python benchmarks/idle.py [--seconds 60] [--limit 2.0] [-- MODEL --any-flag-of-quire-serve]

Starts `quire serve` (the bundled model, unless told otherwise), sends one request so that nothing remains to be initialized,
waits --settle seconds and then measures. CPU is user and system time from /proc, in per cent of one core; switches are
voluntary context switches a second, that is, how often a process wakes. Other load on the machine adds little to either.
Prints a table and a last line `RESULT {json}`; exits 1 if a process is over the limit.
"""

import argparse
import contextlib
import json
import platform
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil

START_TIMEOUT_S = 600.0
NAMES = {
    "quire.frontend.cli.main": "serve",
    "quire.frontend.http": "frontend",
    "quire.enginecore": "core",
    "quire.workers": "worker",
}


class Sample(NamedTuple):
    cpu_s: float
    switches: int


@contextlib.contextmanager
def server(arguments: list[str]) -> Iterator[psutil.Process]:
    """`quire serve` on a free port, ready, with one request answered."""
    command = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        complete(ready_url(process))
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate()


def ready_url(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"^Quire serves .* at (http://\S+)", line):
            return found[1]
    raise SystemExit("the server did not start; its messages are above")


def complete(url: str) -> None:
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 16}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
        answer.read()


def sample(processes: list[psutil.Process]) -> list[Sample]:
    samples = []
    for process in processes:
        times = process.cpu_times()
        samples.append(Sample(times.user + times.system, process.num_ctx_switches().voluntary))
    return samples


def name_of(process: psutil.Process) -> str:
    command = process.cmdline()
    return next((NAMES[word] for word in command if word in NAMES), command[0])


def measure(arguments: list[str], settle_s: float, seconds: float) -> list[dict[str, Any]]:
    with server(arguments) as parent:
        processes = [parent, *parent.children(recursive=True)]
        time.sleep(settle_s)
        begin, before = time.monotonic(), sample(processes)
        time.sleep(seconds)
        elapsed, after = time.monotonic() - begin, sample(processes)
        return [
            {
                "process": name_of(process),
                "cpu_percent": round(100 * (b.cpu_s - a.cpu_s) / elapsed, 3),
                "switches_per_s": round((b.switches - a.switches) / elapsed, 1),
                "threads": process.num_threads(),
                "rss_mib": round(process.memory_info().rss / 2**20, 1),
            }
            for process, a, b in zip(processes, before, after, strict=True)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure for (default: %(default)s)")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds between the request and that (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=2.0, help="per cent of a core for each process (default: %(default)s)")
    parser.add_argument("arguments", nargs="*", help="of `quire serve`, after --")
    args = parser.parse_args()
    rows = measure(args.arguments, args.settle, args.seconds)
    columns = list(rows[0])
    print("".join(f"{name:>16}" for name in columns))
    for row in rows:
        print("".join(f"{row[name]!s:>16}" for name in columns))
    passed = all(row["cpu_percent"] < args.limit for row in rows)
    machine = {"cpu_count": psutil.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}
    result = {"seconds": args.seconds, "limit_percent": args.limit, "passed": passed, "machine": machine, "processes": rows}
    print("RESULT " + json.dumps({"arguments": args.arguments, **result}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
