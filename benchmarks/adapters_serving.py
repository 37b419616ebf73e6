"""What LoRA adapters cost while they are served: `adapters_serving.py MODEL [--parts ttft alora itl idle zipf]`.

    ttft    time to the first token: of a warm adapter, of one from host memory, from the page cache, asked for the first time
    alora   the same behind a conversation that the model itself has answered: of an activated LoRA, over that of a plain one
    itl     gaps between tokens of --streams streams of four adapters, alone, and beside a load and a request for it a second
    idle    LLM with one adapter registered and not used, over LLM without --enable-lora: steps, prefill, seconds to start
    zipf    tokens/s of --concurrency requests for --adapters adapters on demand, chosen by Zipf's law, with each number of
            --slots, over those of one adapter on the same server

The adapters have random values, for the linear layers of the blocks, in config.json's shapes: --load-format dummy needs no
other file. --distinct files of them exist, and the other folders have hard links to these (random_adapters.py): the
engine reads each for itself, from the page cache, and 1,000 adapters of 84 MB fit on a small disk. ttft, alora and itl share a
server; zipf starts one for each number of slots, and idle has two engines of its own.

Each part ends with a line `RESULT part {json}`, so that a run which is cut off keeps what it had. Exit code 1: a part
failed, and the others were still run. An 8B on an H200 should take some 200 s for all parts.
"""

import argparse
import asyncio
import gc
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from load_stats import percentiles
from random_adapters import Adapters
from servers import Command, Server, end_by_signal, machine
from sse_client import Answer, Connection, Connections, Target, ask, clock

PARTS = ("ttft", "alora", "itl", "idle", "zipf")
BASE = "base"
CALL_S = 300.0
LORA_SLOTS, LORA_HOST = 8, 16  # of the server of ttft, itl and alora
FROM_HOST, FROM_FILE = 12, 24  # adapters that are asked in turn: more than slots, more than copies in host memory
INVOCATION = (11, 12, 13)
STREAM_ADAPTERS = 4
COUNTERS = re.compile(r"^quire:lora_(loads|evictions)_total\{[^}]*\} (\S+)$", re.MULTILINE)


# ------------------------------------------------------------------------------------------------------------------ server
@contextmanager
def serving(args: argparse.Namespace, root: Path, slots: int, host: int, max_len: int) -> Iterator["Asking"]:
    """A server with so many adapter slots and copies in host memory; what asks it."""
    command = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "serve", args.model, "--served-model-name", BASE]
    command += ["--port", str(args.port), "--load-format", args.load_format, "--dtype", args.dtype, "--enable-lora"]
    command += ["--max-loras", str(slots), "--max-cpu-loras", str(host), "--max-lora-rank", str(args.rank)]
    command += ["--lora-dirs", str(root), "--lora-on-demand", "--max-queue-s", "600", "--max-model-len", str(max_len)]
    command += args.options.split()
    log = root.parent / f"server-{slots}.log"
    with Server(Command("quire", command, f"http://127.0.0.1:{args.port}", BASE), log) as server:
        seconds = server.wait_until_healthy(300.0)
        print(f"a server with {slots} adapter slots is there after {seconds:.1f} s; its log: {log}", flush=True)
        yield Asking(args, server.command.url)


class Asking:
    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self.args, self.target = args, Target.of(url, "/v1/completions")

    def body(self, model: str, prompt: Sequence[int], tokens: int) -> bytes:
        fields = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return self.target.request(json.dumps(fields).encode())

    async def first_ms(self, model: str, prompt: Sequence[int]) -> float:
        """The time to the first token. Raises RuntimeError."""
        answer = await ask(self.target, self.body(model, prompt, 2), CALL_S)
        return 1e3 * (checked(answer).first - answer.sent)

    async def load(self, name: str) -> None:
        """Load an adapter in place of what has its name now."""
        body = {"lora_name": f"loaded-{name}", "lora_path": str(self.args.root / "adapters" / name), "load_inplace": True}
        answer = await ask(self.target, self.target.request(json.dumps(body).encode(), "/v1/load_lora_adapter"), CALL_S)
        if answer.status != 200:
            raise RuntimeError(f"{name} cannot be loaded: {answer.error}")

    async def counters(self) -> dict[str, float]:
        """Loads into slots and evictions so far. The engine's figures are at most half a second old."""
        await asyncio.sleep(0.8)
        answer = await ask(self.target, self.target.request(path="/metrics"), CALL_S)
        return {name: float(value) for name, value in COUNTERS.findall(answer.body.decode())}


def checked(answer: Answer) -> Answer:
    if answer.error or not answer.first:
        raise RuntimeError(answer.error or "the answer held nothing")
    return answer


class Prompts:
    """Random token ids, no two alike."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = json.loads((Path(args.model) / "config.json").read_text())
        self._random, self._vocab_size = random.Random(args.seed), min(config["vocab_size"], 100_000)

    def __call__(self, count: int) -> list[int]:
        return [self._random.randrange(20, self._vocab_size) for _ in range(count)]


# ------------------------------------------------------------------------------------------------------------------- parts
async def part_ttft(asking: Asking, names: Sequence[str], prompts: Prompts) -> dict[str, Any]:
    """names: FROM_FILE of them, or more."""
    args, found = asking.args, dict[str, list[float]]()

    async def each(kind: str, some: Sequence[str], count: int) -> None:
        kept = found.setdefault(kind, [])
        for name in itertools.islice(itertools.cycle(some), count):
            kept.append(await asking.first_ms(name, prompts(args.prompt_len)))

    await asking.first_ms(BASE, prompts(args.prompt_len))
    await each("first_asked", names[:FROM_FILE], FROM_FILE)
    before = await asking.counters()
    await each("page_cache", names[:FROM_FILE], args.repeat)
    between = await asking.counters()
    await each("to_host", names[:FROM_HOST], FROM_HOST)
    middle = await asking.counters()
    await each("host", names[:FROM_HOST], args.repeat)
    after = await asking.counters()
    await each("warm", names[:1], 3)
    found["warm"].clear()
    await each("warm", names[:1], args.repeat)
    loads = {"page_cache": between["loads"] - before["loads"], "host": after["loads"] - middle["loads"]}
    if any(count < args.repeat for count in loads.values()):
        raise RuntimeError(f"some adapters were still there: {loads} loads for {args.repeat} requests each")
    del found["to_host"]
    ms = {kind: percentiles(values) for kind, values in found.items()}
    more = {kind: round(ms[kind]["p50"] - ms["warm"]["p50"], 2) for kind in ("host", "page_cache", "first_asked")}
    return {"ttft_ms": ms, "more_than_warm_ms": more, "goal_ms": {"host": 4, "page_cache": 25}}


async def part_itl(asking: Asking, names: Sequence[str], prompts: Prompts) -> dict[str, Any]:
    args, found = asking.args, dict[str, dict[str, float]]()
    streaming, loading = names[:STREAM_ADAPTERS], names[STREAM_ADAPTERS : STREAM_ADAPTERS + 8]
    for name in streaming:
        await asking.first_ms(name, prompts(16))
    num_loads = 0

    async def load_each_second() -> None:
        nonlocal num_loads
        for name in itertools.cycle(loading):
            began = clock()
            await asking.load(name)
            await asking.first_ms(f"loaded-{name}", prompts(16))
            num_loads += 1
            await asyncio.sleep(max(args.every_s - (clock() - began), 0.0))

    for kind in ("alone", "beside_loads"):
        connections = Connections(asking.target)
        bodies = [asking.body(streaming[i % len(streaming)], prompts(64), args.stream_tokens) for i in range(args.streams)]
        loads = asyncio.create_task(load_each_second()) if kind == "beside_loads" else None
        answers = await asyncio.gather(*(connections.ask(body, CALL_S) for body in bodies))
        connections.abort()
        if loads is not None:
            if loads.done():
                await loads
            loads.cancel()
        skipped = args.stream_tokens // 10  # while the others begin
        gaps = [1e3 * gap for answer in answers for gap in checked(answer).gaps[skipped:]]
        found[kind] = {**percentiles(gaps), "p99.9": round(float(np.percentile(gaps, 99.9)), 3)}
    ratio = round(found["beside_loads"]["p99"] / found["alone"]["p99"], 3)
    return {"itl_ms": found, "loads": num_loads, "p99_ratio": ratio, "goal": 1.05}


async def part_alora(asking: Asking, plain: str, activated: str, prompts: Prompts) -> dict[str, Any]:
    args, ms = asking.args, dict[str, list[float]]()
    for number in range(args.conversations + 1):
        talk = prompts(args.conversation_len)
        await asking.first_ms(BASE, talk)
        asked = [*talk, *INVOCATION, *prompts(16)]
        for kind, name in (("lora", plain), ("alora", activated)):
            if not number:  # let both have a slot
                await asking.first_ms(name, prompts(16))
            ms.setdefault(kind, []).append(await asking.first_ms(name, asked))
    found = {kind: percentiles(values[1:]) for kind, values in ms.items()}
    ratio = round(found["alora"]["p50"] / found["lora"]["p50"], 3)
    return {"ttft_ms": found, "conversation": args.conversation_len, "ratio": ratio, "goal": 0.15}


async def part_zipf(asking: Asking, names: Sequence[str], slots: int, prompts: Prompts) -> dict[str, Any]:
    args = asking.args
    chance = random.Random(args.seed)
    weights = list(itertools.accumulate(1 / (i + 1) for i in range(len(names))))
    one = await _throughput(asking, lambda: names[0], prompts, args.one_warm_s, args.one_window_s)
    before = await asking.counters()
    many = await _throughput(
        asking, lambda: names[chance.choices(range(len(names)), cum_weights=weights)[0]], prompts, args.warm_s, args.window_s
    )
    after = await asking.counters()
    loads_s = {name: round((after[name] - before[name]) / (args.warm_s + args.window_s), 1) for name in after}
    goal = {64: 0.6, 128: 0.75}.get(slots)
    found = {"slots": slots, "adapters": len(names), "one_adapter": one, "zipf": many, "a_second": loads_s}
    return {**found, "ratio": round(many["tokens_s"] / one["tokens_s"], 3), "goal": goal}


async def _throughput(asking: Asking, choose: Any, prompts: Prompts, warm_s: float, window_s: float) -> dict[str, float]:
    """Tokens a second of --concurrency clients, each of which asks again as soon as it has its answer."""
    args = asking.args
    chance = random.Random(args.seed + 1)
    open_now: dict[int, Answer] = {}
    done_tokens = num_done = 0

    async def client(number: int) -> None:
        nonlocal done_tokens, num_done
        connection = await Connection.open(asking.target)
        try:
            while True:
                tokens = chance.randint(args.least_tokens, args.most_tokens)
                open_now[number], done = connection.send(asking.body(choose(), prompts(args.prompt_len), tokens))
                answer = checked(await done)
                del open_now[number]
                done_tokens, num_done = done_tokens + answer.output_tokens, num_done + 1
        finally:
            connection.abort()

    def tokens_now() -> int:
        return done_tokens + sum(answer.output_tokens for answer in open_now.values())

    clients = [asyncio.create_task(client(number)) for number in range(args.concurrency)]
    try:
        await asyncio.wait(clients, timeout=warm_s, return_when=asyncio.FIRST_COMPLETED)
        begin, before, requests = clock(), tokens_now(), num_done
        ended, _ = await asyncio.wait(clients, timeout=window_s, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            await task  # raises
        seconds, tokens = clock() - begin, tokens_now() - before
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return {"tokens_s": round(tokens / seconds, 1), "requests_s": round((num_done - requests) / seconds, 2)}


def part_idle(args: argparse.Namespace, folder: Path, prompts: Prompts) -> dict[str, Any]:
    """Whole engines, one after the other."""
    found = {"off": _offline(args, prompts)}
    print("without:", json.dumps(found["off"]), flush=True)
    one = {"enable_lora": True, "max_loras": LORA_SLOTS, "max_lora_rank": args.rank, "lora_modules": [f"one={folder}"]}
    found["on"] = _offline(args, prompts, **one)
    speeds = {name: round(found["off"][name] / found["on"][name], 4) for name in found["off"] if name != "start_s"}
    more = round(found["on"]["start_s"] - found["off"]["start_s"], 2)
    return {**found, "speed_over_off": speeds, "goal": 0.995, "start_more_s": more, "start_goal_s": 1.2}


def _offline(args: argparse.Namespace, prompts: Prompts, **adapters: Any) -> dict[str, float]:
    """Milliseconds: of a decode step by batch, and of a prefill."""
    from quire import LLM, SamplingParams

    begin = time.perf_counter()
    options = {"max_model_len": 2048 + 64, "enable_prefix_caching": False, **json.loads(args.llm_options), **adapters}
    llm = LLM(args.model, load_format=args.load_format, dtype=args.dtype, **options)
    found = {"start_s": round(time.perf_counter() - begin, 2)}

    def seconds(asked: list[dict[str, list[int]]], tokens: int) -> float:
        params, best = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False), float("inf")
        for _ in range(args.best_of):
            begin = time.perf_counter()
            llm.generate(asked, params, use_tqdm=False)
            best = min(best, time.perf_counter() - begin)
        return best

    for batch in args.batch:
        asked = [{"prompt_token_ids": prompts(128)} for _ in range(batch)]
        seconds(asked, 2)
        found[f"b{batch}_ms"] = round(1e3 * (seconds(asked, args.tokens) - seconds(asked, 1)) / (args.tokens - 1), 4)
    asked = [{"prompt_token_ids": prompts(args.prefill_len)} for _ in range(args.prefills)]
    found["prefill_ms"] = round(1e3 * seconds(asked, 1), 2)
    llm.shutdown()
    gc.collect()
    return found


# --------------------------------------------------------------------------------------------------------------------- run
class Run(NamedTuple):
    args: argparse.Namespace
    adapters: Adapters
    failed: list[str]

    def part(self, name: str, work: Any) -> None:
        """Run a part, and print its result at once."""
        begin = time.perf_counter()
        try:
            found = uvloop.run(work) if asyncio.iscoroutine(work) else work()
        except Exception as error:  # the other parts are still worth their figures
            self.failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            return
        seconds = round(time.perf_counter() - begin, 1)
        print(f"RESULT {name}", json.dumps({**found, "part_s": seconds}), flush=True)

    def small_server(self, parts: Sequence[str], prompts: Prompts) -> None:
        args, write = self.args, self.adapters.write
        names = [write(f"a{i}") for i in range(FROM_FILE)]
        plain, activated = write("plain"), write("activated", alora_invocation_tokens=list(INVOCATION))
        with serving(args, self.adapters.root, LORA_SLOTS, LORA_HOST, args.conversation_len + 512) as asking:
            if "ttft" in parts:
                self.part("ttft", part_ttft(asking, names, prompts))
            if "alora" in parts:
                self.part("alora", part_alora(asking, plain, activated, prompts))
            if "itl" in parts:
                self.part("itl", part_itl(asking, names, prompts))


def main() -> None:
    args = parse()
    end_by_signal()
    args.root = Path(tempfile.mkdtemp(prefix="adapters-serving-", dir=args.folder)).resolve()
    print(json.dumps(machine()), flush=True)
    try:
        (args.root / "adapters").mkdir()
        adapters = Adapters(args.root / "adapters", Path(args.model), args.rank, args.distinct)
        run, prompts = Run(args, adapters, []), Prompts(args)
        print(f"an adapter of rank {args.rank} has {adapters.megabytes:.1f} MB", flush=True)
        if set(args.parts) & {"ttft", "alora", "itl"}:
            run.small_server(args.parts, prompts)
        if "idle" in args.parts:
            folder = adapters.root / adapters.write("idle")
            run.part("idle", lambda: part_idle(args, folder, prompts))
        if "zipf" in args.parts:
            names = [adapters.write(f"z{i}") for i in range(args.adapters)]
            for slots in args.slots:
                with serving(args, adapters.root, slots, args.host_per_slot * slots, 2048) as asking:
                    run.part("zipf", part_zipf(asking, names, slots, prompts))
    finally:
        shutil.rmtree(args.root / "adapters")
    sys.exit(bool(run.failed))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="model folder of a Llama or Qwen3")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--load-format", default="dummy")
    add("--dtype", default="auto")
    add("--options", default="", help="more options of the servers")
    add("--llm-options", default="{}", help="JSON, more options of LLM, for idle")
    add("--folder", help="where adapters are written (default: the folder of temporary files)")
    add("--port", type=int, default=8199)
    add("--rank", type=int, default=16)
    add("--distinct", type=int, default=8, help="files that are really written (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--prompt-len", type=int, default=128, help="tokens of a prompt of ttft and zipf (default: %(default)s)")
    add("--repeat", type=int, default=48, help="requests of each kind of ttft (default: %(default)s)")
    add("--streams", type=int, default=64)
    add("--stream-tokens", type=int, default=900, help="tokens of each stream of itl (default: %(default)s)")
    add("--every-s", type=float, default=1.0, help="seconds from load to load (default: %(default)g)")
    add("--conversations", type=int, default=5)
    add("--conversation-len", type=int, default=8192)
    add("--adapters", type=int, default=1000)
    add("--slots", type=int, nargs="+", default=[64, 128])
    add("--host-per-slot", type=int, default=4, help="adapters in host memory for each slot of zipf (default: %(default)s)")
    add("--concurrency", type=int, default=256)
    add("--least-tokens", type=int, default=32)
    add("--most-tokens", type=int, default=224)
    add("--warm-s", type=float, default=8.0, help="seconds of zipf before its window (default: %(default)g)")
    add("--window-s", type=float, default=15.0)
    add("--one-warm-s", type=float, default=3.0, help="the same for one adapter (default: %(default)g)")
    add("--one-window-s", type=float, default=8.0)
    add("--batch", type=int, nargs="+", default=[1, 64, 256], help="rows of idle (default: 1 64 256)")
    add("--tokens", type=int, default=128, help="tokens of each row of idle (default: %(default)s)")
    add("--prefills", type=int, default=32)
    add("--prefill-len", type=int, default=2048)
    add("--best-of", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
