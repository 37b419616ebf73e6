"""Measures the loss of a rank: `lost_rank.py MODEL --tensor-parallel-size 4 [--streams 256] [--how kill stop]`.

It starts a server with --no-replay, so that streams end with their workers (heal.py measures streams that go on), and times the
start-up. Then, for each way of --how, --streams streams begin, and when they have eight tokens each on average, one worker
process gets SIGKILL or SIGSTOP. The results: told, seconds until streams have ended; serving, seconds until a new request has
its first token. Afterwards an answer with temperature 0 must be the same as before. Exits with 1 if it is not, or if a stream
ended without an error. Prints a line for each way and a last line `RESULT {json}`.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from layout import add_layout_arguments, layout_flags, layout_in_words
from servers import Server, engine_command, machine, tree
from sse_client import Answer, Connections, Target, ask, clock

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PROMPT_LEN, EARLY_TOKENS, RETRY_S, PATIENCE_S = 128, 8, 0.05, 120.0
WORKER = b"quire.workers"


def workers(server: Server) -> list[int]:
    """The workers' process ids by rank, which is the order of their starts."""
    found = [pid for pid in tree(server.pid) if WORKER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    return sorted(found, key=lambda pid: (int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid))


class Client:
    def __init__(self, server: Server) -> None:
        self._target = Target.of(server.command.url, "/v1/completions")
        self._connections = Connections(self._target)
        self._model = server.command.model

    async def ask(self, seed: int, max_tokens: int, timeout_s: float = 300.0) -> Answer:
        prompt = [(seed * 7919 + i * 31) % 2000 + 10 for i in range(PROMPT_LEN)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
        data = self._target.request(json.dumps({**body, "stream": True}).encode())
        return await self._connections.ask(data, timeout_s, keep_texts=True)

    async def text(self) -> str:
        answer = await self.ask(1, 16)
        return answer.error or "".join(answer.texts or [])

    async def tokens_so_far(self) -> float:
        """Output tokens that the server has generated in total."""
        metrics = (await ask(self._target, self._target.request(path="/metrics"))).body.decode()
        return sum(float(n) for n in re.findall(r"^\w+:generation_tokens_total(?:{.*})? (.+)$", metrics, re.MULTILINE))

    async def first_token(self) -> float:
        """When a new request gets its first token; requests are repeated until one succeeds."""
        begin = clock()
        while (answer := await self.ask(2, 1, 30.0)).error:
            if clock() - begin > PATIENCE_S:
                raise RuntimeError(f"no request was served for {PATIENCE_S:g} s; the last one: {answer.error}")
            await asyncio.sleep(RETRY_S)
        return answer.first


async def lose(server: Server, how: str, rank: int, streams: int, answer_len: int) -> dict[str, Any]:
    client = Client(server)
    said = await client.text()
    enough = await client.tokens_so_far() + EARLY_TOKENS * streams
    asked = [asyncio.create_task(client.ask(10 + i, answer_len)) for i in range(streams)]
    while await client.tokens_so_far() < enough and not any(task.done() for task in asked):
        await asyncio.sleep(RETRY_S)
    if early := [task.result().error for task in asked if task.done()]:
        raise RuntimeError(f"{len(early)} streams ended before the rank was lost: {early[0]}")
    lost = workers(server)[rank]
    begin = clock()
    os.kill(lost, SIGNALS[how])
    ends = [0.0] * streams

    def ended(i: int) -> None:
        ends[i] = clock() - begin

    for i, task in enumerate(asked):
        task.add_done_callback(lambda _, i=i: ended(i))
    serving = asyncio.create_task(client.first_token())
    answers = await asyncio.gather(*asked)
    served = await serving - begin
    same = await client.text() == said
    silent = sum(not a.error for a in answers)
    told = sorted(ends)
    return {
        "how": how, "rank": rank, "streams": streams, "told_first_s": round(told[0], 2), "told_all_s": round(told[-1], 2),
        "serving_s": round(served, 2), "without_error": silent, "same_answer": same, "error": answers[0].error[:200],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--how", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--rank", type=int, default=1, help="whose process (default: 1)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--options", default="", help="more flags of `quire serve`")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    add_layout_arguments(parser)
    args = parser.parse_args()
    options = " ".join([*layout_flags(args), "--no-replay", args.options])
    command = engine_command(
        "quire", args.model, port=args.port, load_format=args.load_format, max_model_len=args.max_model_len, memory=0.9,
        site="", options=options,
    )  # fmt: skip
    log = Path(tempfile.mkdtemp(prefix="lost-rank-")) / "quire.log"
    with Server(command, log) as server:
        started = server.wait_until_ready(args.start_timeout)
        print(f"started: {started} (log: {log})", flush=True)
        found = []
        for how in args.how:
            found.append(asyncio.run(lose(server, how, args.rank, args.streams, args.max_model_len - PROMPT_LEN)))
            print(json.dumps(found[-1]), flush=True)
    where = {**machine(), "layout": layout_in_words(args), "date": time.strftime("%Y-%m-%d")}
    print("RESULT " + json.dumps({"model": Path(args.model).name, **where, **started, "lost": found}))
    sys.exit(any(one["without_error"] or not one["same_answer"] for one in found))


if __name__ == "__main__":
    main()
