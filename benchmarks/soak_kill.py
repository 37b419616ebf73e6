"""`soak.py --kill`: minutes of requests while processes of the server are killed and stopped, and a ledger of every request.

The server is started by --start. Every distinct request is asked before the first kill (soak_requests.py). Then clients send
them again and again, while Killer (soak_faults.py) sends signals. At the end the ledger (soak_ledger.py) is closed. The last
line is `RESULT {json}`. The exit code is 1 if a request was lost, doubled or wrong, if a process grew beyond its bound, if
requests or KV blocks are left with nothing to do, or if the server does not end by itself.
"""

import argparse
import asyncio
import json
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from servers import Command, Server, alive, machine, tree
from soak_faults import KINDS, SIGNALS, Killer, Memory, Processes, broken_bounds, parse_faults
from soak_ledger import Ledger
from soak_requests import Batcher, Client, Responder, World, catalogue
from sse_client import Target, ask

QUIET_S = 10.0  # without kills, before the clients stop
IDLE_S = 20.0
NAMES = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
GAUGES = re.compile(rf"^(?:quire|vllm):({NAMES})(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", re.M)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --kill")
    every = ",".join(f"{kind}:{name}" for kind in KINDS for name in SIGNALS)
    group.add_argument("--kill", action="store_true", help="kill and stop processes, and keep a ledger of all requests")
    group.add_argument("--seconds", type=float, help="instead of --minutes")
    group.add_argument("--faults", default=every, metavar="KIND:SIGNAL,...", help="(default: %(default)s)")
    group.add_argument("--every-s", type=float, default=8.0, help="between faults on average (default: 8); a fifth come sooner")
    group.add_argument(
        "--compare",
        choices=("auto", "text", "length"),
        default="auto",
        help="with the answers before the first kill; auto: text on a CPU or with --deterministic, else lengths "
        "and finish reasons, as sums in 16 bits are rounded differently in another batch",
    )
    group.add_argument("--answer-tokens", type=int, default=160, help="most tokens of an answer (default: 160)")
    group.add_argument("--each", type=int, default=5, help="distinct requests of each kind (default: 5)")
    group.add_argument(
        "--patience-s",
        type=float,
        default=150.0,
        help="a request is lost after so long (default: 150; the server lets one wait for an engine for 120)",
    )
    group.add_argument(
        "--kill-all",
        action="store_true",
        help="spare none; else one frontend and one engine of several live on, for their memory",
    )


def kept(processes: Processes) -> set[int]:
    """One of each kind of which there are several, with the processes under it."""
    by_kind = processes.by_kind()
    roots = [by_kind[kind][0] for kind in ("frontend", "core") if len(by_kind[kind]) > 1]
    return {pid for root in roots for pid in tree(root)}


class Run:
    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        self.args, self.server = args, server
        self.seconds = args.seconds or 60 * args.minutes
        self.target = Target.of(server.command.url, "/v1/completions", args.api_key)
        self.ledger = Ledger()
        self.begin = time.monotonic()
        self.processes = Processes(server.pid)
        self.memory = Memory(self.processes)

    def clock(self) -> float:
        return time.monotonic() - self.begin

    async def __call__(self) -> tuple[dict[str, Any], list[str]]:
        args = self.args
        card = json.loads((await ask(self.target, self.target.request(path="/v1/models"))).body)["data"][0]
        templates = "--trust-request-chat-template" in self.server.command.arguments
        tokens = min(args.answer_tokens, card["max_model_len"] // 4)
        requests = catalogue(card["id"], card["max_model_len"], tokens, args.each, args.seed, templates=templates)
        world = World(self.target, requests, self.ledger, self.clock, args.patience_s)
        differing = await world.learn(args.concurrency)
        by_text = args.compare == "text" or (args.compare == "auto" and self._is_exact())
        failed = [f"{differing} answers differ without any kill"] if differing and by_text else []
        self.ledger.by_text = by_text
        print(
            f"{len(requests)} distinct requests are known; compared by {'text' if by_text else 'length'} "
            f"({differing} differ between two batches)",
            flush=True,
        )
        await world.fill_caches(max(len(self.processes.by_kind()["core"]), 1), args.concurrency)
        self.begin = time.monotonic()
        world.until = self.seconds
        killer = await self._clients_and_kills(world)
        self.ledger.close(self.clock())
        left = await self._left()
        failed += [f"{name} is {value:g} with nothing to do" for name, value in left.items() if value]
        return self._result(world, killer), failed + self._failed()

    def _is_exact(self) -> bool:
        return machine()["gpu"] == "none" or "--deterministic" in self.server.command.arguments

    async def _clients_and_kills(self, world: World) -> Killer:
        args = self.args
        clients = [Client(world, number, args.seed).run() for number in range(args.concurrency)]
        tasks = [
            asyncio.create_task(task)
            for task in (*clients, *(Responder(world, args.seed + n).run() for n in range(2)), Batcher(world, args.seed).run())
        ]
        spared = set() if args.kill_all else kept(self.processes)
        killer = Killer(self.processes, parse_faults(args.faults), args.every_s, args.seed, spared)
        kills = asyncio.create_task(killer.run(self.ledger.faults, self.clock, self.seconds - QUIET_S))
        watcher = asyncio.create_task(self._watch(world))
        _, late = await asyncio.wait(tasks, timeout=self.seconds + args.patience_s)
        for task in (*late, kills, watcher):
            task.cancel()
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise RuntimeError("a client failed") from task.exception()
        return killer

    async def _watch(self, world: World) -> None:
        while True:
            await asyncio.to_thread(self.memory.sample, self.clock())
            ends = "  ".join(f"{count} {end}" for end, count in self.ledger.ends().items() if count)
            faults = self.ledger.faults
            last = f", last {faults[-1].kind}:{faults[-1].signal} at {faults[-1].at:.0f} s" if faults else ""
            worst, mib = world.stalls.worst_s(), self.memory.total_mib()
            print(
                f"{self.clock():7.0f} s  {ends}",
                f"{len(faults)} kills{last}  worst stall {worst:.1f} s  {mib:.0f} MiB",
                sep="  | ",
                flush=True,
            )
            await asyncio.sleep(self.args.sample_s)

    async def _left(self) -> dict[str, float]:
        """Requests and KV blocks that the engine still holds, after a while."""
        deadline, gauges = self.clock() + IDLE_S, {"/metrics": 1.0}
        while any(gauges.values()) and self.clock() < deadline:
            answer = await ask(self.target, self.target.request(path="/metrics"), 10.0)
            found = GAUGES.findall(answer.body.decode(errors="replace"))
            gauges = {name: sum(float(v) for n, v in found if n == name) for name, _ in found} or gauges
            await asyncio.sleep(0.5)
        return gauges

    def _warm_up_s(self) -> float:
        return self.args.warm_up * self.seconds

    def _growth(self) -> dict[str, dict[str, float]]:
        return self.memory.growth(self._warm_up_s(), {fault.pid for fault in self.ledger.faults})

    def _failed(self) -> list[str]:
        ends = self.ledger.ends()
        found = [f"{ends[end]} requests are {end}" for end in ("lost", "doubled", "wrong") if ends[end]]
        if not ends["right"]:
            found.append("no request was answered right")
        return found + broken_bounds(self._growth(), self.memory.gpu_growth(self._warm_up_s()))

    def _result(self, world: World, killer: Killer) -> dict[str, Any]:
        kinds = sorted({entry.kind for entry in self.ledger.entries})
        return {
            "seconds": self.seconds,
            "seed": self.args.seed,
            "compared": "text" if self.ledger.by_text else "length",
            "requests": len(self.ledger.entries),
            "kinds": {k: sum(e.kind == k for e in self.ledger.entries) for k in kinds},
            "ends": self.ledger.ends(),
            "errors": self.ledger.errors(),
            "errors_by_kind": self.ledger.errors_by_kind(),
            "kills": self.ledger.kills(),
            "no_process_of": sorted(killer.absent),
            "stalls_s": world.stalls.by_fault(self.ledger.faults),
            "growth_mib": self._growth(),
            "gpu_growth_mib": self.memory.gpu_growth(self._warm_up_s()),
            "shown": self.ledger.shown,
        }


def run(args: argparse.Namespace, command: Command) -> tuple[dict[str, Any], list[str]]:
    """Start the server, soak it, and stop it. Returns the result, and the checks that failed. Raises RuntimeError."""
    log = Path(tempfile.mkdtemp(prefix="soak-")) / "server.log"
    server = Server(command, log)
    members: list[int] = []
    try:
        print(f"started after {server.wait_until_healthy(600.0)} s; its log: {log}", flush=True)
        soak = Run(args, server)
        result, failed = uvloop.run(soak())
        members = tree(server.pid)
        result |= {"machine": machine(), "log": str(log)}
    finally:
        result_stop_s = server.stop()
    if server.process.returncode not in (0, -signal.SIGTERM):
        failed.append(f"the server ended with code {server.process.returncode}")
    failed += [f"process {pid} was left behind" for pid in members if alive(pid)]
    report(result, failed)
    return result | {"stop_s": result_stop_s}, failed


def report(result: dict[str, Any], failed: list[str]) -> None:
    """The results, for a reader."""
    print(f"{result['requests']} requests: " + ", ".join(f"{count} {end}" for end, count in result["ends"].items()))
    print("errors by cause: " + (", ".join(f"{count} {cause}" for cause, count in result["errors"].items()) or "none"))
    print(f"{'fault':18} {'sent':>5} {'clients that stood still: count':>33} {'median':>8} {'P99':>8} {'worst':>8} s")
    for name, sent in sorted(result["kills"].items()):
        stall = result["stalls_s"].get(name, {})
        times = " ".join(f"{stall.get(part, 0.0):8}" for part in ("median", "p99", "worst"))
        print(f"{name:18} {sent:5} {stall.get('count', 0):33} {times}")
    if result["no_process_of"]:
        print("at times there was none of: " + ", ".join(result["no_process_of"]))
    for name, mib in result["growth_mib"].items():
        print(f"{name:18} grew by {mib['rss']} MiB of RSS, {mib['pss']} MiB of PSS in {mib['lived_s']} s")
    if result["gpu_growth_mib"] is not None:
        print(f"the GPU's memory grew by {result['gpu_growth_mib']} MiB")
    print(*(f"CHECK FAILED: {what}" for what in failed), sep="\n", flush=True)
