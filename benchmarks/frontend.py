"""Cost and latency of a frontend, on the real server: an engine that replays tokens, real tokenizers, clients on other cores.

    python benchmarks/frontend.py                                        all parts, Quire and the peer (frontend_peer.py)
    python benchmarks/frontend.py --parts token gaps --servers quire     some of them
    python benchmarks/frontend.py --quick                                seconds, to see that it runs

token:     CPU of the frontend's process per streamed token, ZeroMQ included, at 256 streams, and the rate that was measured at
requests:  non-streamed answers per second (16 tokens), and CPU of each
late:      2,000 streams at half of what one process can do with as many: delay of tokens after the engine sent them
processes: requests a second, and streamed chunks, of --frontends 4 beside 1
gaps:      the worst gap of another stream while each of nasty_requests.py runs

The replay engine (replay_engine.py) is a process of its own and speaks the real protocol; `--vocabulary 128k` is generated. CPU
is user and system time of the server's processes from /proc. With 8 or more cores, server, engine and clients each have cores
of their own; with fewer they share them, and rates and gaps say little. `late` is measured with all sequences in one step
(2,000 tokens at one instant, the worst that an engine can do) and with 16 steps of a sixteenth each, evenly in time, as engines
in parallel do. Goals: <= 11 us a token, 2,000 requests/s, P99 < 10 ms, 4 processes >= 3.4 times one, gaps <= 50 ms.
Prints tables and a last line `RESULT {json}`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import nasty_requests
from frontend_load import lateness, stamp_tokens, whole_answers
from load_generator import Load, Options, run_load
from replay_engine import FILES, NAME
from sse_client import Target, ask
from tokenizers import Tokenizer

HERE = Path(__file__).parent
PARTS = ("token", "requests", "late", "processes", "gaps")
US_PER_TOKEN = 11.0  # the goal
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "What is a quire?"}]}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
START_S = 60.0


def threads_of_cores() -> list[list[int]]:
    """The CPUs that may be used, by physical core: two threads of one core slow each other down."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), []).append(cpu)
    return list(cores.values())


class Cores:
    """The placement: the server and the engine have cores of their own, clients the rest; if cores are few, all share all.

    If a core has two threads, the server and the engine use one of them, and the other stays idle.
    """

    def __init__(self, server: int) -> None:
        cores = threads_of_cores()
        everywhere = {cpu for core in cores for cpu in core}
        self.apart = len(cores) >= server + 3 and len(everywhere) >= server + 4
        self.server = {core[0] for core in cores[:server]} if self.apart else everywhere
        self.engine = {cores[server][0]} if self.apart else everywhere
        self.clients = {cpu for core in cores[server + 1 :] for cpu in core} if self.apart else everywhere


@contextlib.contextmanager
def process(arguments: list[str], cores: set[int]) -> Iterator[subprocess.Popen]:
    """A Python process on these cores."""
    command = [sys.executable, *arguments]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(20.0)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        assert started.stdout is not None
        started.stdout.close()


class Cpu(NamedTuple):
    """Seconds of a server's processes, in their own code and in the kernel's (sockets, mostly)."""

    user: float
    system: float

    def since(self, before: "Cpu") -> "Cpu":
        return Cpu(self.user - before.user, self.system - before.system)

    def us(self, count: int) -> dict[str, float]:
        """Microseconds for each of `count` items: the total, and the kernel's part of it."""
        return {"us": round(sum(self) / count * 1e6, 2), "of_system": round(self.system / count * 1e6, 2)}


class Served:
    """A server in front of a replay engine."""

    def __init__(self, url: str, pid: int, address: str) -> None:
        self.url, self.pid, self.address = url, pid, address

    def target(self, path: str = "/v1/chat/completions") -> Target:
        return Target.of(self.url, path)

    def cpu(self) -> Cpu:
        """CPU of all its processes so far."""
        ticks = [_cpu_ticks(pid) for pid in [self.pid, *_children(self.pid)]]
        return Cpu(sum(user for user, _ in ticks) * TICK_S, sum(system for _, system in ticks) * TICK_S)

    def lag(self) -> dict[str, float]:
        """How late its event loop's timer was so far, as counts by bound in seconds, empty ones left out."""
        target = self.target("/metrics")
        text = asyncio.run(ask(target, target.request(), 5.0)).body.decode()
        found = re.findall(r'^quire:frontend_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)$', text, re.MULTILINE)
        counts, before = {}, 0.0
        for bound, upto in found:
            if float(upto) > before:
                counts[bound] = float(upto) - before
            before = float(upto)
        return counts


def _cpu_ticks(pid: int) -> tuple[int, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[11]), int(fields[12])


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def serving(name: str, cores: Cores, step_ms: float, vocabulary: str, frontends: int = 1, **engine: Any) -> Iterator[Served]:
    """`quire` or `peer`, ready. engine: more flags of replay_engine.py."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        address = f"ipc://{folder}/engine.sock"
        flags = ["--address", address, "--step-ms", str(step_ms), "--vocabulary", vocabulary]
        flags += [word for flag, value in engine.items() for word in (f"--{flag}", str(value))]
        replay = stack.enter_context(process([str(HERE / "replay_engine.py"), *flags], cores.engine))
        assert replay.stdout is not None and replay.stdout.readline() == "ready\n"
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        if name == "peer":
            command = [str(HERE / "frontend_peer.py"), "--engine", address, "--port", str(port)]
        else:
            command = ["-P", "-m", "quire.frontend.cli.main", "serve", "--engine", address, "--port", str(port)]
            command += ["--frontends", str(frontends), "--max-connections", "16384"]
        server = stack.enter_context(process(command, cores.server))
        served = Served(url, server.pid, address)
        deadline = time.monotonic() + START_S
        while (answer := asyncio.run(ask(served.target("/health"), served.target("/health").request(), 5.0))).status != 200:
            assert time.monotonic() < deadline and server.poll() is None, answer.error
            time.sleep(0.05)
        yield served


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Bench:
    """The benchmark's parts; each returns its figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.quick: bool = args.quick
        self.vocabulary: str = args.vocabulary
        self.step_ms: float = args.step_ms
        self.cores = Cores(1)
        self.clients: int = args.clients or max(1, len(self.cores.clients) - 1)

    def token(self, name: str) -> dict[str, Any]:
        streams, tokens = (64, 200) if self.quick else (256, 4000)
        return {endpoint: self._token(name, endpoint, streams, tokens, self.step_ms) for endpoint in ("chat", "completions")}

    def _token(self, name: str, endpoint: str, streams: int, tokens: int, step_ms: float) -> dict[str, float]:
        """The cost of a token with so many streams of so many tokens, a token each every step_ms."""
        with serving(name, self.cores, step_ms, self.vocabulary) as served:
            options = Options(served.url, NAME, endpoint, vocab_size=2000, processes=self.clients)
            run_load(Load("closed", streams, 0.0, streams, 16, 20), options)
            before = served.cpu()
            summary = run_load(Load("closed", streams, 0.0, streams, 16, tokens), options)
            cpu = served.cpu().since(before)
        assert summary["failures"] == 0, summary["errors"]
        rate = streams * tokens / summary["duration_s"]
        busy = sum(cpu) / summary["duration_s"]
        return {**cpu.us(streams * tokens), "tok_s": round(rate), "busy": round(busy, 2)}

    def requests(self, name: str, frontends: int = 1) -> dict[str, Any]:
        seconds, connections = (2.0, 16) if self.quick else (15.0, 64 * frontends)
        cores = Cores(frontends)
        with serving(name, cores, 1.0, self.vocabulary, frontends) as served:
            body = {**CHAT, "max_tokens": 16}
            whole_answers(served.target(), body, connections, 1.0, self.clients)
            before = served.cpu()
            whole = whole_answers(served.target(), body, connections, seconds, self.clients)
            cpu = served.cpu().since(before)
        return {"requests_s": round(whole.count / whole.seconds), **cpu.us(whole.count)}

    def late(self, name: str) -> dict[str, Any]:
        streams, seconds = (100, 2.0) if self.quick else (2000, 20.0)
        cost = self._token(name, "chat", streams, 50 if self.quick else 200, streams * US_PER_TOKEN / 0.5 / 1e3)
        step_ms = streams * cost["us"] / 0.5 / 1e3
        words = list(stamp_tokens(Tokenizer.from_str(FILES[self.vocabulary]()["tokenizer.json"].decode())))
        found: dict[str, Any] = {"token": cost, "step_ms": round(step_ms, 1), "tok_s": round(streams / step_ms * 1e3)}
        body = {**CHAT, "max_tokens": 100_000, "stream": True, "ignore_eos": True}
        for phases in (1, 16):
            with (
                tempfile.NamedTemporaryFile() as stamps,
                serving(name, self.cores, step_ms, self.vocabulary, phases=phases, stamps=stamps.name) as served,
            ):
                before, begin = served.cpu(), time.monotonic()
                late = lateness(served.target(), body, streams, seconds, self.clients, words, stamps.name)
                busy = sum(served.cpu().since(before)) / (time.monotonic() - begin)
                lag = served.lag() if name == "quire" else {}
            at = {f"p{p}_ms": round(float(np.percentile(late * 1e3, p)), 2) for p in (50, 90, 99, 100)}
            key = "one step" if phases == 1 else f"{phases} steps"
            found[key] = {**at, "busy": round(busy, 2), "loop_lag_s": lag}
        return found

    def processes(self, name: str) -> dict[str, Any]:
        if name == "peer":
            return {}
        one, four = self.requests(name), self.requests(name, 4)
        return {"one": one, "four": four, "times": round(four["requests_s"] / one["requests_s"], 2)}

    def gaps(self, name: str) -> dict[str, Any]:
        cases = nasty_requests.CASES
        if self.quick:
            cases = {case: cases[case] for case in ("3 M empty lists", "detokenize 1 M ids")}
        with serving(name, self.cores, self.step_ms, self.vocabulary) as served:
            return asyncio.run(self._gaps(served, cases))

    async def _gaps(self, served: Served, cases: dict[str, nasty_requests.Nasty]) -> dict[str, Any]:
        witness = nasty_requests.Witness(served.target("/v1/completions"), NAME)
        await witness.start()
        found: dict[str, Any] = {"quiet": {"gap_ms": round(1e3 * await nasty_requests.quiet(witness, 2.0), 1)}}
        for case, nasty in cases.items():
            try:
                gaps = await nasty_requests.run_case(witness, served.target(), nasty)
            except ConnectionError as error:  # the server has ended, or refuses all connections
                found[case] = {"error": str(error)}
                break
            found[case] = {
                "gap_ms": round(1e3 * gaps.worst_s, 1),
                "took_s": round(gaps.took_s, 2),
                "status": gaps.status,
                "mb": round(gaps.num_bytes / 1e6, 1),
            }
            print(f"   {case:40s} gap {1e3 * gaps.worst_s:8.1f} ms, took {gaps.took_s:6.2f} s, {gaps.status}", flush=True)
        witness.stop()
        return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--servers", nargs="+", choices=("quire", "peer"), default=["quire", "peer"])
    parser.add_argument("--vocabulary", choices=sorted(FILES), default="128k")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the engine, for `token` and `gaps`")
    parser.add_argument("--clients", type=int, help="client processes (default: a core each)")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    bench = Bench(args)
    os.sched_setaffinity(0, bench.cores.clients)
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "cores": len(threads_of_cores()),
        "apart": bench.cores.apart,
        "vocabulary": args.vocabulary,
    }
    for part in PARTS:
        for name in args.servers if part in args.parts else ():
            print(f"== {part}, {name}", flush=True)
            found = getattr(bench, part)(name)
            result.setdefault(part, {})[name] = found
            if part != "gaps":
                print(f"   {json.dumps(found)}", flush=True)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
