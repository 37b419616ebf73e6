"""Whether `--deterministic` keeps its promise: `deterministic.py MODEL [--requests 1000] [--kills 2]`.

Requests of 1 to 3,000 tokens, greedy and seeded, with log-probabilities, are asked for several times by one engine: in random
order and in batches of random size, so that each meets other rows, other chunks of prompts and, from the second time on, cached
prefixes; with --kills, while workers are killed, so that requests are computed again. All token ids and all log-probabilities
must be equal to the last bit. The same comparison without --deterministic, on fewer requests, says how much there was to find.
Prints a table and a last line `RESULT {json}`; the exit code is 1 if a request differs. Models of random weights serve
(--load-format dummy): their logits lie close together, so that a last bit decides often.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

Answer = tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]


def requests(args: argparse.Namespace, vocab: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with their parameters: lengths are even on a logarithmic scale, every third request is greedy."""
    rng, made = random.Random(args.seed), []
    for number in range(args.requests):
        length = min(args.longest, max(1, round(args.longest ** rng.random())))
        params = SamplingParams(
            temperature=0.0 if number % 3 == 0 else 1.0,
            top_p=0.9 if number % 3 == 1 else 1.0,
            seed=number,
            max_tokens=rng.randint(1, args.outputs),
            ignore_eos=True,
            logprobs=5,
            detokenize=False,
        )
        made.append(([rng.randrange(vocab) for _ in range(length)], params))
    return made


def workers_of(pid: int) -> list[int]:
    """The processes below `pid` that run a worker."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            found += [child] if b"quire.workers" in command and b"compile" not in command else []
            found += workers_of(child)
    return found


def kill_at_random(rng: random.Random, count: int, gap_s: float, stop: threading.Event) -> int:
    """Kill a worker `count` times, with random pauses between; returns how many were killed."""
    killed = 0
    while killed < count and not stop.wait(gap_s * (0.5 + rng.random())):
        if workers := workers_of(os.getpid()):
            os.kill(rng.choice(workers), signal.SIGKILL)
            killed += 1
    return killed


def answers(llm: LLM, asked: list[tuple[list[int], SamplingParams]], order: list[int], rng: random.Random) -> dict[int, Answer]:
    """Each request's ids and log-probabilities, asked for in this order in batches of random size."""
    found: dict[int, Answer] = {}
    at = 0
    while at < len(order):
        batch = order[at : at + rng.choice((1, 7, 60, 300))]
        at += len(batch)
        prompts = [{"prompt_token_ids": asked[i][0]} for i in batch]
        for i, out in zip(batch, llm.generate(prompts, [asked[i][1] for i in batch], use_tqdm=False), strict=True):
            one = out.outputs[0]
            tops = tuple(tuple((token, float(e.logprob)) for token, e in sorted(step.items())) for step in one.logprobs)
            found[i] = tuple(one.token_ids), tops
    return found


def differing(first: dict[int, Answer], second: dict[int, Answer]) -> dict[str, int]:
    return {
        "requests": len(first),
        "other_tokens": sum(first[i][0] != second[i][0] for i in first),
        "other_logprobs": sum(first[i][1] != second[i][1] for i in first),
    }


def run(args: argparse.Namespace, options: dict[str, Any], count: int, kills: int) -> list[dict[str, Any]]:
    """Ask `count` requests --orders times, then once more with kills."""
    llm = LLM(args.model, load_format=args.load_format, dtype=args.dtype, max_model_len=args.longest + args.outputs, **options)
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    asked, rng, rows = requests(args, vocab)[:count], random.Random(args.seed + 1), []
    first: dict[int, Answer] = {}
    for turn in range(args.orders + (kills > 0)):
        order, stop, killed = rng.sample(range(count), count), threading.Event(), [0]
        has_kills = turn == args.orders
        thread = threading.Thread(target=lambda k=killed, s=stop: k.__setitem__(0, kill_at_random(rng, kills, args.gap_s, s)))
        if has_kills:
            thread.start()
        begin = time.perf_counter()
        got = answers(llm, asked, order, rng)
        seconds = time.perf_counter() - begin
        stop.set()
        if has_kills:
            thread.join()
        first = first or got
        rows.append({"turn": turn, "killed": killed[0], "seconds": round(seconds, 2), **differing(first, got)})
        print(rows[-1], flush=True)
    llm.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--orders", type=int, default=3, help="times that all requests are asked for (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=0, help="workers to kill during one more turn (default: none)")
    parser.add_argument("--gap-s", type=float, default=8.0, help="mean seconds between two kills (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of a prompt at most (default: %(default)s)")
    parser.add_argument("--outputs", type=int, default=64, help="tokens of an answer at most (default: %(default)s)")
    parser.add_argument(
        "--without", type=int, default=100, help="requests to ask without --deterministic (default: %(default)s)"
    )
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--options", default="{}", help="JSON, further options of LLM")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = json.loads(args.options)
    result = {"deterministic": run(args, options | {"deterministic": True}, args.requests, args.kills)}
    if args.without:
        result["without"] = run(args, options, min(args.without, args.requests), 0)
    print("RESULT", json.dumps(result))
    sys.exit(any(row["other_tokens"] or row["other_logprobs"] for row in result["deterministic"]))


if __name__ == "__main__":
    main()
