"""Decode on the CPU: the engine without IPC (core's scheduler and worker in this process) beside transformers.generate.

    python benchmarks/cpu_decode.py [FOLDER ...] [--threads 1] [--batch 1,16] [--prompt 64] [--new 128] [--rounds 5]

Same folder, float32, threads and greedy decoding for both. Ours: time of the steps that decode all rows and nothing else, plan
and update included; `worker` is the share of it that the worker process would spend. transformers: one request, (time of --new
tokens - time of 1) / (--new - 1). Both are measured in turn, and the least mean of --rounds counts: on a shared machine noise
only adds. Prefill is one chunk of 512 tokens. Ratio: tokens per second, transformers one request after the other = 1.
The last line is `RESULT {json}`.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPO = Path(__file__).parent.parent
sys.path[:0] = [str(REPO / "tests/support")]
PREFILL = 512


class Ours:
    def __init__(self, folder: Path, max_rows: int, max_len: int):
        from inline_engine import InlineEngine

        blocks = -(-max_len // 16) * max_rows + 64
        options: dict[str, Any] = {"max_num_seqs": max_rows, "budget": 2048, "enable_prefix_caching": False}
        self.engine = InlineEngine(folder, num_blocks=blocks, max_model_len=max_len, **options)
        self.vocab_size = self.engine.runner.ctx.config.vocab_size

    def add(self, rows: int, prompt: int, new: int) -> None:
        from quire.ipc.sampling import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        for tokens in prompts(rows, prompt, self.vocab_size):
            self.engine.add(tokens, params)

    def step(self) -> tuple[int, int, float, float] | None:
        """(decode rows, prefill tokens, seconds, seconds of the worker) of the next step."""
        begin = time.perf_counter()
        made = self.engine.scheduler.schedule()
        if made is None:
            return None
        plan, step = made
        words = plan.encode()
        sent = time.perf_counter()
        self.engine.runner.step(words, lambda: np.zeros(0, np.int32))
        done = time.perf_counter()
        self.engine.scheduler.update(step, self.engine._results(step), now=0.0)
        return len(plan.decode_rows), len(plan.prefill_tokens), time.perf_counter() - begin, done - sent

    def decode(self, rows: int, prompt: int, new: int) -> tuple[float, float]:
        """Mean milliseconds (whole, worker) of a step that decodes all rows and nothing else."""
        self.add(rows, prompt, new)
        steps = []
        while (took := self.step()) is not None:
            steps.append(took)
        whole = [s[2:] for s in steps if s[0] == rows and not s[1]]
        seconds, worker = np.mean(whole, 0)
        return float(seconds) * 1e3, float(worker) * 1e3

    def prefill(self) -> float:
        self.add(1, PREFILL, 1)
        took = self.step()
        assert took is not None and took[1] == PREFILL
        return took[2] * 1e3


class Theirs:
    def __init__(self, folder: Path, vocab_size: int):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.vocab_size = vocab_size

    def generate(self, prompt: int, new: int) -> float:
        ids = torch.tensor(prompts(1, prompt, self.vocab_size))
        lengths = {"max_new_tokens": new, "min_new_tokens": new}
        begin = time.perf_counter()
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0, **lengths
        )
        return (time.perf_counter() - begin) * 1e3

    def decode(self, prompt: int, new: int) -> float:
        return (self.generate(prompt, new) - self.generate(prompt, 1)) / (new - 1)


def prompts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(4, vocab_size, (rows, length)).tolist()


def measure(folder: Path, batches: list[int], args: argparse.Namespace) -> dict[str, Any]:
    max_len = max(args.prompt + args.new, PREFILL + 1) + 16
    ours = Ours(folder, max(batches), max_len)
    theirs = Theirs(folder, ours.vocab_size)
    rounds: dict[str, list[float]] = {}
    with torch.inference_mode():
        ours.decode(1, args.prompt, 4), theirs.generate(args.prompt, 4)  # warm
        for _ in range(args.rounds):
            for rows in batches:
                whole, worker = ours.decode(rows, args.prompt, args.new)
                rounds.setdefault(f"batch_{rows}_ms", []).append(whole)
                rounds.setdefault(f"batch_{rows}_worker_ms", []).append(worker)
            rounds.setdefault("prefill_ms", []).append(ours.prefill())
            rounds.setdefault("transformers_ms", []).append(theirs.decode(args.prompt, args.new))
            rounds.setdefault("transformers_prefill_ms", []).append(theirs.generate(PREFILL, 1))
    result: dict[str, Any] = {name: round(min(values), 3) for name, values in rounds.items()}
    for rows in batches:
        result[f"batch_{rows}_ratio"] = round(rows * result["transformers_ms"] / result[f"batch_{rows}_ms"], 2)
    return {"model": folder.name} | result


def report(result: dict[str, Any], batches: list[int]) -> None:
    print(f"{result['model']}: transformers {result['transformers_ms']:.3f} ms a token")
    for rows in batches:
        whole, worker, ratio = (result[f"batch_{rows}_{what}"] for what in ("ms", "worker_ms", "ratio"))
        print(
            f"  {rows:3} rows: {whole:8.3f} ms a step ({worker:.3f} in the worker), {ratio:.2f} times transformers one by one"
        )
    print(f"  {PREFILL} tokens of prefill: {result['prefill_ms']:.2f} ms, transformers {result['transformers_prefill_ms']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="model folders; none: the bundled model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches = [int(n) for n in args.batch.split(",")]
    results = []
    for folder in args.folders or [REPO / "enginecore/loading/bundled"]:
        results.append(measure(folder, batches, args))
        report(results[-1], batches)
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": args.threads}
    print("RESULT " + json.dumps({"machine": machine, "prompt": args.prompt, "new": args.new, "models": results}))


if __name__ == "__main__":
    main()
