"""N minutes of many kinds of requests to a server, then checks that it has lost, leaked or kept nothing.

    soak.py --url http://127.0.0.1:8000 --pid PID --minutes 10 --concurrency 64
    soak.py --start "quire serve MODEL --port 8000" --url http://127.0.0.1:8000 --minutes 10
    soak.py --kill --start "quire serve --port 8000 --frontends 2 --trust-request-chat-template" --seconds 480

Requests are drawn at random: short and long prompts, shared prefixes, n > 1, logprobs, penalties, filters, stop strings, chat,
streams and whole answers, clients that leave before or during the answer, and requests that must be refused. Meanwhile the
resident memory of the server's processes, their GPU memory and /metrics are sampled. At the end, no request may have failed
that was not aborted; no request may run, wait or hold KV blocks; no process may have grown by more than --max-growth-mib after
the warm-up; and a server that we started must end with code 0 and leave no process behind.
The last line is `RESULT {json}`; the exit code is 1 if a check failed. `--pid`: the server's process, for its memory.

--kill does something else: it kills and stops processes of the server at random moments, and keeps a ledger in which every
request ends once, with the right answer or with an error that a kill explains (soak_kill.py, soak_ledger.py).
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent))
import soak_kill
import soak_vectors
from servers import Command, Server, alive, end_by_signal, gpu_memory_mib, machine, tree
from sse_client import Answer, Connection, Target, ask

IDLE_S = 20.0  # for running requests to end, after the last one was sent
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
METRIC = re.compile(r"^(?:quire|vllm):(\w+?)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
SHARED_PREFIXES = 8


@dataclass(frozen=True)
class Plan:
    """One request: its route, its body, the expected status, and after how many chunks its client leaves (None: it stays)."""

    kind: str
    path: str
    body: dict[str, Any]
    leaves_after: int | None = None
    status: int = 200


class Mix:
    """Draws requests, which depend only on the seed."""

    def __init__(self, model: str, max_model_len: int, vocab_size: int, seed: int, vectors: bool = False) -> None:
        self.random = random.Random(seed)
        self.model, self.max_model_len, self.vocab_size = model, max_model_len, vocab_size
        self.prefixes = [self.ids(min(512, max_model_len // 4)) for _ in range(SHARED_PREFIXES)]
        self.kinds: dict[str, tuple[int, Callable[[], Plan]]] = {
            "plain": (30, lambda: self.plan("plain", self.ids(self.short()))),
            "long": (4, lambda: self.plan("long", self.ids(self.random.randint(max_model_len // 4, max_model_len // 2)))),
            "shared_prefix": (12, lambda: self.plan("shared_prefix", [*self.random.choice(self.prefixes), *self.ids(20)])),
            "several": (8, lambda: self.plan("several", self.ids(self.short()), n=self.random.randint(2, 4))),
            "logprobs": (8, lambda: self.plan("logprobs", self.ids(self.short()), logprobs=self.random.randint(0, 5))),
            "penalties": (8, lambda: self.plan("penalties", self.ids(self.short()), presence_penalty=0.5,
                                               frequency_penalty=0.2, repetition_penalty=1.1)),
            "filters": (8, lambda: self.plan("filters", self.ids(self.short()), top_k=20, top_p=0.9, min_p=0.01,
                                             seed=self.random.randint(0, 10**6))),
            "stop": (8, lambda: self.plan("stop", self.ids(self.short()), stop=["e", " the", "\n"])),
            "whole": (6, lambda: self.plan("whole", self.ids(self.short()), stream=False)),
            "prompt_logprobs": (2, lambda: self.plan("prompt_logprobs", self.ids(self.short()), stream=False,
                                                     prompt_logprobs=1)),
            "chat": (8, self.chat),
            "left_amid": (10, lambda: self.plan("left_amid", self.ids(self.short()), leaves_after=self.random.randint(1, 20))),
            "left_early": (5, lambda: self.plan("left_early", self.ids(self.short()), leaves_after=0)),
            "refused": (3, self.refused),
        }  # fmt: skip
        if vectors:
            self.kinds["vectors"] = 20, lambda: self.pooled("vectors", soak_vectors.VECTORS)
            self.kinds["ranking"] = 10, lambda: self.pooled("ranking", soak_vectors.RANKING)

    def draw(self) -> Plan:
        names = list(self.kinds)
        (name,) = self.random.choices(names, [self.kinds[n][0] for n in names])
        return self.kinds[name][1]()

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(10, self.vocab_size) for _ in range(count)]

    def short(self) -> int:
        return min(int(self.random.lognormvariate(4.0, 1.0)) + 1, self.max_model_len // 4)

    def output(self) -> int:
        return min(int(self.random.lognormvariate(3.5, 0.8)) + 1, self.max_model_len // 4)

    def plan(self, kind: str, prompt: list[int], *, leaves_after: int | None = None, stream: bool = True, **more: Any) -> Plan:
        tokens = self.output() if leaves_after is None else self.max_model_len // 4
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": stream,
            "temperature": self.random.choice([0.0, 1.0]),
            "ignore_eos": leaves_after is not None or self.random.random() < 0.5,
        }
        return Plan(kind, "/v1/completions", body | more, leaves_after)  # fmt: skip

    def chat(self) -> Plan:
        messages = [{"role": "user", "content": " ".join(str(self.random.random()) for _ in range(self.random.randint(1, 20)))}]
        body = {"model": self.model, "messages": messages, "max_tokens": self.output(), "stream": self.random.random() < 0.7}
        return Plan("chat", "/v1/chat/completions", body)

    def pooled(self, kind: str, path: str) -> Plan:
        return Plan(kind, path, soak_vectors.body(path, self.model, self.random))

    def refused(self) -> Plan:
        prompt, bad = (
            self.ids(5),
            self.random.choice([{"temperature": -1.0}, {"n": 0}, {"prompt": self.ids(self.max_model_len)}]),
        )
        return Plan("refused", "/v1/completions", {"model": self.model, "prompt": prompt, "max_tokens": 5, **bad}, status=400)


@dataclass
class Soak:
    """The state and the results so far."""

    target: Target
    mix: Mix
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    chunks: int = 0
    failures: list[str] = field(default_factory=list)
    num_failures: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)

    async def client(self, deadline: float) -> None:
        """One client: sends requests one after the other, on one connection while it stays usable."""
        connection: Connection | None = None
        while time.monotonic() < deadline:
            plan = self.mix.draw()
            try:
                if connection is None or not connection.usable:
                    connection = await Connection.open(self.target)
                async with asyncio.timeout(300):
                    await self.request(connection, plan)
            except (OSError, TimeoutError) as error:
                self.fail(plan, f"{type(error).__name__}: {error}")
                connection = None
        if connection is not None:
            connection.abort()

    async def request(self, connection: Connection, plan: Plan) -> None:
        answer, done = connection.send(self.target.request(json.dumps(plan.body).encode(), plan.path))
        if plan.leaves_after == 0:
            await asyncio.sleep(self.mix.random.random() * 0.05)
            connection.abort()
        elif plan.leaves_after is not None:
            answer.on_chunk = lambda: connection.abort() if len(answer.gaps) + 1 >= (plan.leaves_after or 0) else None
        await done
        self.done[plan.kind] += 1
        self.chunks += len(answer.gaps) + bool(answer.first)
        if problem := self.problem(plan, answer):
            self.fail(plan, problem)

    def problem(self, plan: Plan, answer: Answer) -> str:
        """An answer's error, or ""."""
        if plan.leaves_after is not None and answer.error == "aborted":
            return ""
        if plan.status != 200:
            return "" if answer.status == plan.status else f"status {answer.status} where {plan.status} was due"
        if answer.error:
            return answer.error
        if plan.path in (soak_vectors.VECTORS, soak_vectors.RANKING):
            return soak_vectors.problem(plan.body, answer.body)
        if plan.body["stream"]:
            wanted = plan.body.get("n", 1)
            return "" if answer.finished == wanted else f"{answer.finished} of {wanted} choices finished"
        choices = json.loads(answer.body)["choices"]
        return (
            "" if len(choices) == plan.body.get("n", 1) and all(c["finish_reason"] for c in choices) else "a choice is missing"
        )

    def fail(self, plan: Plan, why: str) -> None:
        self.num_failures += 1
        if len(self.failures) < 20:
            self.failures.append(f"{plan.kind}: {why}")
            print(f"FAILED {self.failures[-1]}", flush=True)

    # ------------------------------------------------------------------------------------------------------ watching
    async def metrics(self) -> dict[str, float]:
        """/metrics, summed over labels; {} if it did not answer."""
        answer = await ask(self.target, self.target.request(path="/metrics"), timeout_s=10.0)
        found: dict[str, float] = collections.defaultdict(float)
        for name, value in METRIC.findall(answer.body.decode(errors="replace")):
            if not name.endswith("_bucket"):
                found[name] += float(value)
        return dict(found)

    async def sample(self, pid: int | None, begin: float) -> None:
        pids = tree(pid) if pid else []
        rss = {f"{p} {name_of(p)}": mib for p in pids if (mib := rss_mib(p))}
        gpu, metrics = await asyncio.to_thread(gpu_memory_mib, pids), await self.metrics()
        found = {"at_s": round(time.monotonic() - begin, 1), "rss_mib": rss, "gpu_mib": gpu}
        self.samples.append(found | {name: metrics.get(name, float("nan")) for name in GAUGES})
        print(
            f"{found['at_s']:8.1f} s {sum(self.done.values()):8} requests {self.chunks:9} chunks {self.num_failures:3} failed  "
            f"rss {sum(rss.values()):8.1f} MiB  gpu {gpu or 0:.0f} MiB  "
            + "  ".join(f"{metrics.get(name, float('nan')):.3g} {name.split('_')[-1]}" for name in GAUGES),
            flush=True,
        )

    async def watch(self, pid: int | None, begin: float, interval_s: float) -> None:
        while True:
            await self.sample(pid, begin)
            await asyncio.sleep(interval_s)

    async def becomes_idle(self) -> dict[str, float]:
        """The gauges, as soon as all are zero or after IDLE_S."""
        deadline = time.monotonic() + IDLE_S
        while True:
            metrics = await self.metrics()
            gauges = {name: metrics.get(name, float("nan")) for name in GAUGES}
            if not any(gauges.values()) or time.monotonic() > deadline:
                return gauges
            await asyncio.sleep(0.5)


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        modules = [b for a, b in itertools.pairwise(words) if a == "-m"]
        return (modules or [Path(w).name for w in words if not w.startswith("-")] or [""])[0]
    return ""


def rss_mib(pid: int) -> float:
    """Resident memory; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def growth(samples: list[dict[str, Any]], warm_up_s: float) -> dict[str, dict[str, float]]:
    """Per process: MiB after the warm-up, MiB at the end, and the difference, with medians over a tenth of the time."""
    after = [s for s in samples if s["at_s"] >= warm_up_s] or samples[-1:]
    part = max(len(after) // 10, 1)
    found = {}
    for name in after[-1]["rss_mib"]:
        series = [s["rss_mib"][name] for s in after if name in s["rss_mib"]]
        early, late = sorted(series[:part])[part // 2 if len(series) >= part else 0], sorted(series[-part:])[part // 2]
        found[name] = {"early": early, "late": late, "growth": round(late - early, 1)}
    return found


async def vocabulary(target: Target, model: str) -> int:
    """A number up to the vocabulary's size: the first of 30,000, 15,000 and so on that the server accepts."""
    size = 30_000
    while size > 64:
        body = {"model": model, "prompt": [size - 1], "max_tokens": 1}
        answer = await ask(target, target.request(json.dumps(body).encode()), timeout_s=120.0)
        if answer.status == 200:
            return size
        size //= 2
    raise RuntimeError(f"the server takes no prompt of token ids: {answer.error}")


async def soak(args: argparse.Namespace, pid: int | None) -> tuple[dict[str, Any], list[str]]:
    """Run the soak. Returns the results, and the failed checks."""
    target = Target.of(args.url, "/v1/completions", args.api_key)
    card = json.loads((await ask(target, target.request(path="/v1/models"))).body)["data"][0]
    state = Soak(target, Mix(card["id"], card["max_model_len"], await vocabulary(target, card["id"]), args.seed, args.vectors))
    begin = time.monotonic()
    watcher = asyncio.create_task(state.watch(pid, begin, args.sample_s))
    await asyncio.gather(*(state.client(begin + 60 * args.minutes) for _ in range(args.concurrency)))
    watcher.cancel()
    idle = await state.becomes_idle()
    await state.sample(pid, begin)
    grown = growth(state.samples, args.warm_up * 60 * args.minutes)
    failed = []
    if state.num_failures:
        failed.append(f"{state.num_failures} requests failed")
    failed += [f"{name} is {value:g} with nothing to do" for name, value in idle.items() if value != 0]
    failed += [f"{name} grew by {g['growth']} MiB" for name, g in grown.items() if g["growth"] > args.max_growth_mib]
    gpu = [s["gpu_mib"] for s in state.samples if s["gpu_mib"] is not None and s["at_s"] >= args.warm_up * 60 * args.minutes]
    if gpu and gpu[-1] - gpu[0] > args.max_gpu_growth_mib:
        failed.append(f"the GPU's used memory grew by {gpu[-1] - gpu[0]:.0f} MiB")
    if pid and state.samples[0]["rss_mib"].keys() != state.samples[-1]["rss_mib"].keys():
        failed.append("the server's processes are not those of the beginning")
    result = {
        "minutes": args.minutes, "concurrency": args.concurrency, "requests": dict(state.done), "chunks": state.chunks,
        "failures": state.num_failures, "failed": state.failures, "idle": idle, "rss_mib": grown,
        "gpu_mib": gpu[:: max(len(gpu) - 1, 1)], "metrics": await state.metrics(),
    }  # fmt: skip
    return result, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="(default: http://127.0.0.1:8000, or the --port of --start)")
    parser.add_argument("--api-key")
    parser.add_argument("--start", metavar="COMMAND", help="start the server with this command, and stop it at the end")
    parser.add_argument("--pid", type=int, help="of a server that runs already")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--sample-s", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=0.4, help="part of the time after which memory should be steady")
    parser.add_argument("--max-growth-mib", type=float, default=64.0, help="of one process after the warm-up")
    parser.add_argument(
        "--max-gpu-growth-mib", type=float, default=256.0, help="after the warm-up; graphs come as they are met"
    )
    parser.add_argument("--vectors", action="store_true", help="also ask for vectors and rankings: --convert embed")
    parser.add_argument("--seed", type=int, default=0)
    soak_kill.add_arguments(parser)
    args = parser.parse_args()
    where = machine()
    end_by_signal()
    command = Command.of_text(args.start or "", args.url, "")
    args.url = command.url
    if args.kill:
        if not args.start:
            parser.error("--kill needs --start: it kills processes of a server that it has started")
        result, failed = soak_kill.run(args, command)
    elif not args.start:
        result, failed = uvloop.run(soak(args, args.pid))
    else:
        log = Path(tempfile.mkdtemp(prefix="soak-")) / "server.log"
        server = Server(command, log)
        try:
            print(server.wait_until_healthy(600.0), flush=True)
            result, failed = uvloop.run(soak(args, server.pid))
            members = tree(server.pid)
        finally:
            stop_s = server.stop()
        result |= {"stop_s": stop_s, "exit_code": server.process.returncode}
        if server.process.returncode != 0:
            failed.append(f"the server ended with code {server.process.returncode}\n{server.tail()}")
        failed += [f"process {pid} was left behind" for pid in members if alive(pid)]
        failed += [f"the log says: {line}" for line in log.read_text(errors="replace").splitlines() if "Traceback" in line][:3]
    print(*(f"CHECK FAILED: {what}" for what in failed), sep="\n")
    print("RESULT " + json.dumps({"ok": not failed, "checks_failed": failed, "machine": where, **result}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
