"""Measures how long streams stand still when a process dies: `heal.py MODEL [--tensor-parallel-size 2] [--kills worker core]`.

It starts a server and opens --streams streams. When they have some tokens, one process gets SIGKILL: a worker (the last rank)
or the engine's core. The streams go on by themselves, so the results are times of their tokens. gap_first, gap_median and
gap_last: seconds from the kill until a stream has another token, of the first, the middle and the last of those that `went_on`.
healed: the new workers' start, as the engine's log says. tokens: those that are computed again. The same requests ran before
without a kill: same says how many streams got the same text (all in float32; in 16 bits sums are rounded differently in another
batch). Exits with 1 if a stream ends with an error. Prints a line for each kill and a last line `RESULT {json}`.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from layout import add_layout_arguments, layout_flags, layout_in_words
from lost_rank import workers
from servers import Server, engine_command, machine, tree
from sse_client import Answer, Connections, Target, clock

CORE = b"quire.enginecore"
ON_THE_WAY_S = 0.05  # tokens that come so soon after a kill were computed before it
READY_AGAIN = re.compile(r"(?:workers are ready again|\bready) after ([\d.]+) s")


def core_of(server: Server) -> int:
    pids = [pid for pid in tree(server.pid) if CORE in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    return pids[0]


class Streams:
    """The same requests each time: prompts of token ids, and answers of one length."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self._target = Target.of(server.command.url, "/v1/completions")
        self._connections = Connections(self._target)
        self._model, self._args = server.command.model, args

    async def _ask(self, number: int) -> Answer:
        rng = random.Random(number)
        prompt = [rng.randrange(10, 2000) for _ in range(self._args.prompt_len)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": self._args.output_len, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number}
        request = self._target.request(json.dumps(body).encode())
        return await self._connections.ask(request, 900.0, keep_texts=True)

    async def run(self, kill: Any = None) -> tuple[list[Answer], float]:
        """The answers, and when `kill` was called: after half of the time that a run without it took."""
        killed = 0.0
        tasks = [asyncio.create_task(self._ask(number)) for number in range(self._args.streams)]
        if kill is not None:
            await asyncio.sleep(self._args.after_s)
            killed = clock()
            kill()
        return list(await asyncio.gather(*tasks)), killed


def after_kill(answers: list[Answer], killed: float) -> dict[str, Any]:
    """Times of the first tokens after the kill, and how many tokens were there before it."""
    first, before = [], 0
    for answer in answers:
        times = [answer.first + gap for gap in accumulated(answer.gaps)]
        before += sum(at <= killed for at in times)
        first += [at - killed for at in times if at > killed + ON_THE_WAY_S][:1]
    first = sorted(first) or [0.0]
    gaps = {"gap_first_s": first[0], "gap_median_s": first[len(first) // 2], "gap_last_s": first[-1]}
    return {**{name: round(gap, 2) for name, gap in gaps.items()}, "went_on": len(first), "output_tokens": before}


def accumulated(gaps: list[float]) -> list[float]:
    at, result = 0.0, [0.0]
    for gap in gaps:
        at += gap
        result.append(at)
    return result


def measure(server: Server, log: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    asyncio.run(Streams(server, args).run())  # kernels, caches
    begin = clock()
    undisturbed, _ = asyncio.run(Streams(server, args).run())
    args.after_s = (clock() - begin) / 2
    found = []
    for what in args.kills:
        time.sleep(args.pause)
        seen = len(READY_AGAIN.findall(log.read_text(errors="replace")))
        pid = core_of(server) if what == "core" else workers(server)[args.ranks - 1]
        answers, killed = asyncio.run(Streams(server, args).run(lambda pid=pid: os.kill(pid, signal.SIGKILL)))
        server.wait_until_healthy(300.0)
        healed = READY_AGAIN.findall(log.read_text(errors="replace"))[seen:]
        same = sum("".join(a.texts or []) == "".join(b.texts or []) for a, b in zip(answers, undisturbed, strict=True))
        result = after_kill(answers, killed)
        result["tokens"] = result.pop("output_tokens") + args.streams * args.prompt_len
        errors = [answer.error for answer in answers if answer.error]
        found.append(
            {"kill": what, **result, "healed_s": healed[:1], "same": same, "errors": errors[:3], "failed": len(errors)}
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=1024)
    parser.add_argument("--kills", nargs="+", choices=("worker", "core"), default=["worker", "worker", "core"])
    parser.add_argument("--pause", type=float, default=20.0, help="seconds between kills, for spare workers to be ready")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--options", default="", help="more flags of `quire serve`")
    parser.add_argument("--start-timeout", type=float, default=600.0)
    add_layout_arguments(parser)
    args = parser.parse_args()
    args.ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    options = " ".join([*layout_flags(args), args.options])
    command = engine_command(
        "quire", args.model, port=args.port, load_format=args.load_format, max_model_len=args.max_model_len, memory=0.9,
        site="", options=options,
    )  # fmt: skip
    log = Path(tempfile.mkdtemp(prefix="heal-")) / "quire.log"
    with Server(command, log) as server:
        started = server.wait_until_ready(args.start_timeout)
        print(f"started: {started} (log: {log})", flush=True)
        found = measure(server, log, args)
    where = {**machine(), "layout": layout_in_words(args), "date": time.strftime("%Y-%m-%d")}
    print("RESULT " + json.dumps({"model": Path(args.model).name, **where, **started, "kills": found}))
    sys.exit(any(one["failed"] for one in found))


if __name__ == "__main__":
    main()
