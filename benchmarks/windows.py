"""Does the scheduler choose windows well? `windows.py MODEL [--batch 1 4 16 64 256] [--rates 0.3 0.9]`, dummy weights.

One engine, scheduler and worker in one process, decodes batches with fixed windows of 1 (no drafts), 2, 4, 8 and 16 tokens, and
then with windows that the scheduler adapts. Every sequence always has 15 drafts, and each draft is right with the given
probability, so that the first i are with its i-th power. Sequences begin with --context tokens and never end: a run goes on
until they have --tokens more each, on the average. An adaptive scheduler first has LEARNING_STEPS to learn. Steps are timed on
the device, from the end of one to the end of the next. Bias: links and processes cost nothing here, and acceptance by chance
costs each step with windows some 40 small launches, in fixed windows as in adapted ones. There is a line of JSON for each rate
and batch, at once: tokens a second by window, and what adapted windows give of the best fixed one. The last line is `RESULT
{json}`.
"""

import argparse
import json
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "support")]
from inline_engine import InlineEngine  # noqa: E402
from step_profile import NeverRight  # noqa: E402

from quire.enginecore.scheduling.scheduler import Scheduler  # noqa: E402
from quire.ipc.messages.frontend import EngineLimits  # noqa: E402
from quire.ipc.sampling import SamplingParams  # noqa: E402
from quire.ipc.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig  # noqa: E402

FIXED = (1, 2, 4, 8, 16)
LEARNING_STEPS = 256  # in an engine's first second or two


def speculation(window: int | None, rates: list[float]) -> SpeculativeConfig | None:
    """window None: adapted."""
    if window == 1:
        return None
    drafts, is_adaptive = (MAX_SPECULATIVE_TOKENS, True) if window is None else (window - 1, False)
    config = {"num_speculative_tokens": drafts, "enable_adaptive_verification": is_adaptive}
    return SpeculativeConfig(method="ngram", synthetic_acceptance_rates=rates, **config)


class Clock:
    """When the device has done what it was given so far."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._now = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def since(self, before: "Clock") -> float:
        """Seconds. Waits for the device."""
        if self._event is None or before._event is None:
            return self._now - before._now
        self._event.synchronize()
        return before._event.elapsed_time(self._event) / 1000


class TimedEngine(InlineEngine):
    steps = 0  # of the scheduler

    def choose(self, window: int | None, rate: float) -> None:
        """A new scheduler, with these windows; drafts are right with this probability."""
        config, device = self.scheduler.config, self.runner.device
        rates = [rate ** (i + 1) for i in range(MAX_SPECULATIVE_TOKENS)]
        device._rates.copy_(torch.tensor(rates))  # captured steps read it
        self.scheduler = Scheduler(replace(config, speculation=speculation(window, rates)))
        self.steps = 0
        self.intake = self._new_intake(EngineLimits(config.max_model_len, config.vocab_size, config.max_num_seqs, 20), ())

    def decode(self, batch: int, context: int, tokens: int) -> float:
        """Tokens a second of a batch of new sequences, each of which gets so many tokens on the average."""
        for i in range(batch):
            params = SamplingParams(temperature=1.0, max_tokens=10_000_000, ignore_eos=True, seed=i)
            self.add([11 + i % 50] * context, params)
        in_flight: deque[tuple[Any, torch.Tensor, Clock]] = deque()
        seconds, found, before, depth = 0.0, 0, Clock(self.device), 0
        with self.runner.device.stream(), torch.inference_mode():
            while found < batch * tokens:
                while len(in_flight) < self.depth and (made := self.scheduler.schedule()) is not None:
                    self.runner.step(made[0].encode(), lambda plan: None)
                    in_flight.append((made[1], self._copied(made[1]), Clock(self.device)))
                step, words, now = in_flight.popleft()
                took, before, self.steps = now.since(before), now, self.steps + 1
                out = self.scheduler.update(step, self.samples_of(step, words), now=0.0)
                depth, of_drafts = step.draft_depth, depth
                if step.prefills:
                    seconds, found = 0.0, 0  # from here on
                    continue
                times = self.scheduler.counters.step_times
                times.learn(step.num_tokens, step.window > 1, took, of_drafts, len(step.slots))
                seconds, found = seconds + took, found + len(out.keys)
            self.scheduler.abort_owner(0)
            while in_flight:
                step, words, now = in_flight.popleft()
                now.since(before)
                self.scheduler.update(step, self.samples_of(step, words), now=0.0)
        return found / seconds

    def _copied(self, step: Any) -> torch.Tensor:
        words = self.result_words(step)
        if self.device.type == "cpu":
            return words.clone()
        return torch.empty(words.shape, dtype=words.dtype, pin_memory=True).copy_(words, non_blocking=True)


def measure(engine: TimedEngine, rate: float, batch: int, context: int, tokens: int) -> dict[str, float]:
    """Tokens a second by window."""
    found = {}
    for window in (*FIXED, None):
        engine.choose(window, rate)
        engine.decode(batch, context, tokens // 4 + 1)
        while window is None and engine.steps < LEARNING_STEPS:
            engine.decode(batch, context, tokens)
        found[str(window or "adaptive")] = round(max(engine.decode(batch, context, tokens) for _ in range(2)), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder; of its files only config.json is read")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.9])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=160, help="of each sequence and run (default: %(default)s)")
    parser.add_argument("--quantization", help="of the weights, as quire serve takes it")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a trial with a tiny model")
    args = parser.parse_args()
    is_gpu, most = args.device == "cuda", args.context + 4 * args.tokens
    block_size, rows = 64 if is_gpu else 16, max(args.batch)
    engine = TimedEngine(
        args.model,
        device=args.device,
        dtype=torch.bfloat16 if is_gpu else torch.float32,
        max_num_seqs=rows,
        budget=8192,
        block_size=block_size,
        num_blocks=2 + rows * (most // block_size + 1),
        max_model_len=max(most, 20 * args.tokens),
        dummy=True,
        model_options={"quantization": args.quantization},
        speculation=speculation(None, [0.0] * MAX_SPECULATIVE_TOKENS),
        enable_prefix_caching=False,
        look_ahead=False,
    )
    engine.runner.device.drafter = NeverRight()
    if is_gpu:
        with engine.runner.device.stream():
            engine.runner.capture_graphs()
    results = []
    for rate in args.rates:
        for batch in args.batch:
            found = measure(engine, rate, batch, args.context, args.tokens)
            best = max(found[str(window)] for window in FIXED)
            results.append({"rate": rate, "batch": batch, **found, "over_best": round(found["adaptive"] / best, 3)})
            print(json.dumps(results[-1]), flush=True)
    print("RESULT", json.dumps({"model": args.model, "results": results}), flush=True)


if __name__ == "__main__":
    main()
