"""Adapters of a server that is never left alone: loads, reloads, unloads, broken folders, and processes that are killed.

    soak_adapters.py                        the bundled model on a CPU, 200 loads, reloads and unloads, 1,000 broken folders
    soak_adapters.py --operations 20 --broken 50 --streams 8 --adapters 6 --kills 1

Clients stream answers of many adapters through few adapter slots, greedily. Each answer must be the one that its adapter gave
alone, before anything else happened. Meanwhile an operator loads an adapter under a new name, reloads one that the clients use
from another folder, and unloads, in turn; after each call a request must see its effect. A reloaded adapter's clients must get
the old answer or the new one, never a mixture. In the first half of the operations, workers and the core are killed. Then
broken folders (broken_adapters.py) are loaded one after the other: each must be a 400 that names what is wrong, within
--answer-s, and no worker may be replaced.

At the end nothing may run or wait, the server must list exactly the adapters that it should have, and no process may have grown
by more than --max-growth-mib since three quarters of the operations were done. Pauses of the streams beside broken folders are
printed next to their pauses without, and how late this client was itself. The last line is `RESULT {json}`; the exit code is 1
if a check failed.
"""

import argparse
import asyncio
import collections
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from broken_adapters import broken_folders, shapes_of, tensors_of, write_adapter
from servers import Command, Server, alive, end_by_signal, machine, tree
from soak_faults import Processes, grown, memory_mib, module_of
from soak_kill import GAUGES
from sse_client import Connection, Target, ask

from quire.ipc.bundled import CHAT_MODEL

TOKENS = 24
PROMPT = "Once upon a time there was a little"
CALL_S = 300.0  # for any call, on a busy machine and with a killed engine
AGAIN_S, MOST_AGAIN = 0.2, 300
IDLE_S = 20.0


class Version(NamedTuple):
    """The folder and the answer of one adapter."""

    folder: Path
    text: str


@dataclass
class Results:
    answers: collections.Counter[str] = field(default_factory=collections.Counter)
    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    calls_again: int = 0  # calls of the operator that met an engine which was away, and were made once more
    slowest_call_s: float = 0.0
    slowest_broken_s: float = 0.0
    pauses_s: dict[str, list[float]] = field(default_factory=dict)  # between chunks of streams, by what went on beside them
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    memory: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def fail(self, why: str) -> None:
        self.failures.append(why)
        print(f"FAILED {why}", flush=True)


class Soak:
    def __init__(self, args: argparse.Namespace, server: Server, root: Path) -> None:
        self.args, self.server, self.root = args, server, root
        self.target = Target.of(server.command.url, "/v1/completions")
        self.random = random.Random(args.seed)
        self.results = Results()
        self.shapes = shapes_of(CHAT_MODEL.folder)
        self.names = [f"stable{i}" for i in range(args.adapters)]
        self.versions: dict[int, Version] = {}
        self.now: dict[str, set[Version]] = {}  # what a name may stand for at this moment
        self.series: dict[int, list[tuple[float, float]]] = {}  # by pid: seconds, MiB
        self.late_s: dict[str, list[float]] = {}
        self.beside = ""  # what goes on beside the streams, if their pauses count
        self.ends, self.num_done = False, 0
        self.new: dict[str, Version] = {}  # loaded, and not unloaded yet
        (root / "outside").write_text("{}")
        self.broken = list(broken_folders(self.shapes, root / "outside", args.seed))  # this takes seconds
        self.random.shuffle(self.broken)
        self.broken.sort(key=lambda broken: "takes more" not in broken.says)  # at the front: patterns that never end

    # ------------------------------------------------------------------------------------------------------- requests
    async def answer(self, name: str) -> tuple[int, str]:
        body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        connection = await Connection.open(self.target)
        answer, done = connection.send(self.target.request(json.dumps(body).encode()))
        answer.texts = []
        try:
            async with asyncio.timeout(CALL_S):
                await done
        finally:
            connection.abort()
        if self.beside:
            self.results.pauses_s.setdefault(self.beside, []).extend(answer.gaps)
        status = answer.status if not answer.error or answer.status != 200 else 0
        return status, "".join(answer.texts) if status == 200 else answer.error

    async def client(self, number: int) -> None:
        for name in itertools.cycle(self.names[number % len(self.names) :] + self.names[: number % len(self.names)]):
            if self.ends:
                return
            may_be = set(self.now[name])
            task = asyncio.create_task(self.answer(name))
            while not task.done():
                await asyncio.wait([task], timeout=0.05)
                may_be |= self.now[name]
            status, text = task.result()
            is_right = status == 200 and text in {version.text for version in may_be}
            self.results.answers["right" if is_right else "wrong" if status == 200 else f"status {status}"] += 1
            if not is_right:
                self.results.fail(f"{name}: {status} {text[:200]!r}; {[v.text[:40] for v in may_be]}")

    # -------------------------------------------------------------------------------------------------------- operator
    async def call(self, route: str, **body: Any) -> tuple[int, str]:
        """A load or an unload."""
        began, data = time.monotonic(), json.dumps(body).encode()
        answer = await ask(self.target, self.target.request(data, f"/v1/{route}_lora_adapter"), CALL_S)
        self.results.calls[f"{route} {answer.status}"] += 1
        self.results.slowest_call_s = max(self.results.slowest_call_s, time.monotonic() - began)
        return answer.status, answer.body.decode() or answer.error

    async def must(self, route: str, **body: Any) -> None:
        """One that meets an engine which is away is made again, as its 503 says."""
        for attempt in itertools.count():
            status, said = await self.call(route, **body)
            if status != 503 or attempt == MOST_AGAIN:
                break
            self.results.calls_again += 1
            await asyncio.sleep(AGAIN_S)
        was_done = attempt and (status == 404 or "already been loaded" in said)  # the first time
        if status != 200 and not was_done:
            self.results.fail(f"{route} {body}: {status} {said[:200]}")

    async def operate(self, operator: int) -> None:
        """Load, reload, unload, in turn."""
        names, new = self.names[operator :: self.args.operators], ""
        for number in range(operator, self.args.operations, self.args.operators):
            kind = ("load", "reload", "unload")[number // self.args.operators % 3]
            if kind == "load":
                new, version = f"new{number}", self.versions[1000 + number % 7]
                self.new[new] = version
                await self.must("load", lora_name=new, lora_path=str(version.folder))
                await self.expect(new, version)
            elif kind == "reload":
                name = self.random.choice(names)
                (before,) = self.now[name]
                index = self.names.index(name)
                after = self.versions[index + (0 if before == self.versions[index + 100] else 100)]
                self.now[name] = {before, after}
                await self.must("load", lora_name=name, lora_path=str(after.folder), load_inplace=True)
                self.now[name] = {after}
                await self.expect(name, after)
            else:
                await self.must("unload", lora_name=new)
                await self.expect(new, None)
                del self.new[new]
            self.num_done += 1
            if self.num_done == self.args.operations * 3 // 4:
                self.series.clear()
            if self.num_done % max(self.args.operations // 10, 1) == 0:
                self.say(f"{self.num_done} operations")

    async def expect(self, name: str, version: Version | None) -> None:
        """A name that no adapter has is a 404 as soon as the engine can be asked for it."""
        status, text = await self.answer(name)
        while version is None and status == 503:
            await asyncio.sleep(AGAIN_S)
            status, text = await self.answer(name)
        if version is None and status != 404:
            self.results.fail(f"{name} was unloaded: {status} {text[:100]!r}")
        elif version is not None and (status, text) != (200, version.text):
            self.results.fail(f"{name} was loaded: {status} {text[:100]!r} instead of {version.text[:100]!r}")

    async def learn(self) -> None:
        """Write all adapters, and ask each alone."""
        for number in (*range(len(self.names)), *range(100, 100 + len(self.names)), *range(1000, 1007)):
            folder = write_adapter(self.root / "dir" / f"v{number}", tensors_of(self.shapes, number))
            await self.must("load", lora_name="learn", lora_path=str(folder), load_inplace=True)
            status, text = await self.answer("learn")
            if status != 200:
                raise RuntimeError(f"adapter {number} cannot be asked: {status} {text}")
            self.versions[number] = Version(folder, text)
        await self.must("unload", lora_name="learn")
        if len({version.text for version in self.versions.values()}) < len(self.versions):
            raise RuntimeError("two adapters give the same answer")
        for number, name in enumerate(self.names):
            await self.must("load", lora_name=name, lora_path=str(self.versions[number].folder))
            self.now[name] = {self.versions[number]}
        self.say(f"{len(self.versions)} answers are known")

    # ----------------------------------------------------------------------------------------------------------- kills
    async def kill(self) -> None:
        """Kill a worker and the core by turns, in the first half of the operations."""
        for number in range(self.args.kills):
            while self.num_done < (number + 1) * self.args.operations / 2 / self.args.kills:
                await asyncio.sleep(0.02)
            kind = ("worker", "core")[number % 2]
            while not (pids := Processes(self.server.pid).by_kind()[kind]):
                await asyncio.sleep(0.02)
            os.kill(pids[0], signal.SIGKILL)
            self.results.kills[kind] += 1
            self.say(f"killed the {kind}")

    # ---------------------------------------------------------------------------------------------------------- broken
    async def load_broken(self) -> None:
        for number, broken in enumerate(self.broken[: self.args.broken]):
            folder = self.root / "dir" / "broken"
            await asyncio.to_thread(broken.write, folder)
            began = time.monotonic()
            status, said = await self.call("load", lora_name="broken", lora_path=str(folder))
            seconds = time.monotonic() - began
            self.results.slowest_broken_s = max(self.results.slowest_broken_s, seconds)
            message = json.loads(said)["error"]["message"] if status == 400 else said
            if status != 400 or broken.says not in message:
                self.results.fail(f"{broken.name}: {status} {said[:300]}")
            if seconds > self.args.answer_s:
                self.results.fail(f"{broken.name}: answered after {seconds:.2f} s")
            await asyncio.to_thread(shutil.rmtree, folder)
            if (number + 1) % max(self.args.broken // 10, 1) == 0:
                self.say(f"{number + 1} broken folders")
        await self.shrinking()

    async def shrinking(self) -> None:
        """Load a folder with a file that shrinks and grows all the time."""
        folder = write_adapter(self.root / "dir" / "shrinking", tensors_of(self.shapes))
        file, whole, done = folder / "adapter_model.safetensors", (folder / "adapter_model.safetensors").read_bytes(), False

        def shrink() -> None:
            numbers = random.Random(self.args.seed)
            while not done:
                os.truncate(file, numbers.randrange(len(whole)))
                time.sleep(numbers.random() * 0.002)
                with file.open("r+b") as writable:
                    writable.write(whole)
                time.sleep(numbers.random() * 0.02)

        task = asyncio.create_task(asyncio.to_thread(shrink))
        for _ in range(self.args.broken // 20):
            status, said = await self.call("load", lora_name="shrinking", lora_path=str(folder), load_inplace=True)
            if status not in (200, 400) or (status == 400 and "adapter_model" not in said and "file has changed" not in said):
                self.results.fail(f"a shrinking file: {status} {said[:300]}")
        done = True
        await task
        await self.call("unload", lora_name="shrinking")

    # ---------------------------------------------------------------------------------------------------------- memory
    async def watch(self) -> None:
        begin = time.monotonic()
        while True:
            for pid in tree(self.server.pid):
                if (both := memory_mib(pid)) is not None:
                    self.series.setdefault(pid, []).append((time.monotonic() - begin, min(both)))
            await asyncio.sleep(0.5)

    async def look_at_itself(self) -> None:
        """Note how late this process is, since streams seem to pause meanwhile."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            if self.beside:
                self.late_s.setdefault(self.beside, []).append(time.monotonic() - began - 0.005)

    def growth(self) -> dict[str, float]:
        found = {}
        for pid, series in self.series.items():
            if alive(pid) and len(series) >= 10:
                found[f"{module_of(pid) or 'server'} {pid}"] = grown([mib for _, mib in series])
        return found

    def say(self, what: str) -> None:
        answers = ", ".join(f"{count} {end}" for end, count in self.results.answers.items())
        total = sum(series[-1][1] for pid, series in self.series.items() if alive(pid))
        print(f"{time.monotonic() - self.begin:7.1f} s  {what:28} answers: {answers or 'none'}  {total:.0f} MiB", flush=True)

    # ------------------------------------------------------------------------------------------------------------- run
    async def __call__(self) -> dict[str, Any]:
        args, results = self.args, self.results
        self.begin = time.monotonic()
        watchers = [asyncio.create_task(self.watch()), asyncio.create_task(self.look_at_itself())]
        await self.learn()
        clients = [asyncio.create_task(self.client(number)) for number in range(args.streams)]
        killer = asyncio.create_task(self.kill())
        await asyncio.gather(*(self.operate(operator) for operator in range(args.operators)))
        await killer
        before = set(Processes(self.server.pid).by_kind()["worker"])
        self.beside = "nothing"
        await asyncio.sleep(args.quiet_s)
        self.beside = "broken folders"
        await self.load_broken()
        self.beside = ""
        if set(Processes(self.server.pid).by_kind()["worker"]) != before:
            results.fail("a worker was replaced beside broken folders")
        results.memory = self.growth()
        self.ends = True
        await asyncio.gather(*clients)
        for watcher in watchers:
            watcher.cancel()
        for name, version in self.now.items():
            await self.expect(name, *version)
        await self.at_rest()
        for name, mib in results.memory.items():
            if mib > args.max_growth_mib:
                results.fail(f"{name} grew by {mib} MiB")
        return {
            "answers": dict(results.answers),
            "calls": dict(results.calls),
            "calls_again": results.calls_again,
            "kills": dict(results.kills),
            "slowest_call_s": round(results.slowest_call_s, 2),
            "slowest_broken_s": round(results.slowest_broken_s, 2),
            "growth_mib": results.memory,
            "pauses_ms_beside": {beside: pauses_ms(pauses) for beside, pauses in results.pauses_s.items()},
            "client_late_ms": {beside: pauses_ms(late) for beside, late in self.late_s.items()},
        }

    async def at_rest(self) -> None:
        deadline, left = time.monotonic() + IDLE_S, {"/metrics": 1.0}
        while any(left.values()) and time.monotonic() < deadline:
            text = (await ask(self.target, self.target.request(path="/metrics"), 10.0)).body.decode()
            left = {name: float(value) for name, value in GAUGES.findall(text)} or left
            await asyncio.sleep(0.2)
        self.results.failures += [f"{name} is {value:g} with nothing to do" for name, value in left.items() if value]
        cards = json.loads((await ask(self.target, self.target.request(path="/v1/models"), 10.0)).body)["data"]
        roots = {card["id"]: card["root"] for card in cards if card["parent"]}
        wanted = {name: str(version.folder) for name, (version,) in self.now.items()}
        wanted |= {name: str(version.folder) for name, version in self.new.items()}
        if roots != wanted:
            self.results.fail(f"the server has {set(roots.items()) ^ set(wanted.items())}")


def pauses_ms(pauses: list[float]) -> dict[str, float]:
    values = sorted(pauses)
    at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}
    return {name: round(1e3 * values[int(part * (len(values) - 1))], 1) for name, part in at.items()} if values else {}


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=200, help="loads, reloads and unloads (default: 200)")
    parser.add_argument("--broken", type=int, default=1000, help="broken folders (default: 1,000)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=30)
    parser.add_argument("--operators", type=int, default=4, help="calls to load and unload at once (default: 4)")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--kills", type=int, default=4, help="of a worker and of the core by turns (default: 4)")
    parser.add_argument("--answer-s", type=float, default=2.0, help="longest answer to a broken folder (default: 2)")
    parser.add_argument("--quiet-s", type=float, default=20.0, help="streams alone, for their pauses (default: 20)")
    parser.add_argument("--max-growth-mib", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="", help="more options of the server")
    args = parser.parse_args()
    end_by_signal()
    root, port = Path(tempfile.mkdtemp(prefix="soak-adapters-")), free_port()
    (root / "dir").mkdir()
    command = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "serve", "--port", str(port), "--device", "cpu"]
    command += ["--dtype", "float32", "--max-num-seqs", "16", "--cpu-kv-cache-gib", "0.1", "--enable-lora", "--max-loras"]
    command += [str(args.slots), "--lora-dirs", str(root / "dir"), "--max-queue-s", "240", *args.options.split()]
    server = Server(Command("quire", command, f"http://127.0.0.1:{port}", ""), root / "server.log")
    try:
        server.wait_until_healthy(120.0)
        soak = Soak(args, server, root)
        result = uvloop.run(soak())
        failures = soak.results.failures
    finally:
        server.stop()
    log = server.log.read_text(errors="replace").splitlines()
    failures += [f"the log says: {line}" for line in log if "Traceback" in line or "AssertionError" in line][:3]
    if server.process.returncode not in (0, -signal.SIGTERM):
        failures.append(f"the server ended with code {server.process.returncode}")
    print(f"log: {server.log}", *(f"CHECK FAILED: {what}" for what in failures[:20]), sep="\n")
    print("RESULT " + json.dumps({"ok": not failures, "failures": failures[:20], "machine": machine(), **result}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
