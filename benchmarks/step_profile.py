"""Where a decode step's GPU time goes: `step_profile.py MODEL --rows 1 64 256 [--quantization fp8] [--kernels]`, dummy weights.

It times the forward and sampling graphs of each padded size by replaying them back to back, and with --kernels lists the times
of their kernels (torch.profiler over replays; dependent launches include their wait). Sequences have `--context` tokens each.
With --window N every row has a window of N tokens, of which one is accepted; no drafter's own time is in it.
With --lora N rows have N LoRA adapters of all linear layers in turn (random weights, --lora-rank), and the step is timed with
and without them. --prefill N also times a step of 8 prompts of N tokens together, and lists its kernels with --kernels.
Needs a GPU. Prints `RESULT {json}` last.
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "support")]
from inline_engine import InlineEngine  # noqa: E402

from quire.ipc.adapters import AdapterLimits  # noqa: E402
from quire.ipc.sampling import SamplingParams  # noqa: E402
from quire.ipc.speculative_config import SpeculativeConfig  # noqa: E402
from quire.ipc.step.sections import SAMPLING_RANDOM, SAMPLING_WINDOWS  # noqa: E402
from quire.workers.graph_sizes import BatchDescriptor  # noqa: E402
from quire.workers.speculation.drafter import Drafter  # noqa: E402


class NeverRight(Drafter):
    """Every row always has all drafts that it may have: id 0, which a dummy model hardly draws."""

    def extend(self, step, num_tokens):
        pass

    def draft(self, tables, step, num_rows):
        tables.drafts.zero_()
        tables.num_drafts.fill_(tables.drafts.shape[1])


def prepared(
    model: str,
    rows: int,
    context: int,
    engine: InlineEngine | None,
    most_rows: int = 0,
    quantization: str | None = None,
    window: int = 1,
    lora: int = 0,
    rank: int = 16,
) -> InlineEngine:
    """An engine with `rows` decoding sequences of `context` tokens and a few more, in its first slots."""
    if engine is None:
        blocks = max(300, 2 + max(rows, most_rows) * (context // 64 + 2) * 2)  # twice, for layers with and without windows
        engine = InlineEngine(
            model, device="cuda", dtype=torch.bfloat16, max_num_seqs=1024, budget=8192, block_size=64, num_blocks=blocks,
            max_model_len=8192, dummy=True, model_options={"quantization": quantization}, speculation=speculation(window),
            enable_prefix_caching=False, look_ahead=False, num_states=max(rows, most_rows) + 4,
            adapters=AdapterLimits(max_loras=lora, max_rank=rank) if lora else None,
        )  # fmt: skip
        if lora:
            fill_adapters(engine, rank)
        if window > 1:
            engine.runner.device.drafter = NeverRight()
        with engine.runner.device.stream():
            engine.runner.capture_graphs()
        engine.scheduler.check = lambda: None
    engine.scheduler.abort_owner(0)
    params = SamplingParams(temperature=1.0, max_tokens=1000, ignore_eos=True, seed=1)
    for i in range(rows):
        engine.add([11 + i % 50] * context, params, i % lora if lora else -1)

    def is_the_step(plan):
        is_decode = len(plan.decode_rows) == plan.num_rows == rows and "slot_updates" not in plan.sections
        return is_decode and plan.draft_tokens == rows * (window - 1)

    engine.run(until=is_the_step)
    assert not engine.scheduler.is_idle, f"there was no step of {rows} decode rows and windows of {window} tokens"
    return engine


def fill_adapters(engine: InlineEngine, rank: int) -> None:
    """Random adapters of this rank in all slots."""
    for weights in engine.adapters.places.layers:
        weights.a.normal_(std=0.01)
        weights.b.normal_(std=0.01)
        weights.ranks[:-1] = rank
        weights.scales.fill_(1.0)
    print(f"adapter slots of {engine.adapters.slot_bytes / 1e6:.1f} MB", flush=True)


def adapters_ms(engine: InlineEngine, size: int, kind: int, base_ms: float, kernels: int) -> dict[str, float]:
    """The time of the same step with its rows' adapters, and over the base's."""
    graphs, batch = engine.runner.graphs, BatchDescriptor(size, size, False, adapters=True)
    with torch.inference_mode():
        graphs.capture(batch, kind)
    both = [graphs._forward[batch], graphs._sampling[size, kind]]
    if kernels:
        print_kernels(both, kernels)
    ms = replay_ms(both)
    return {"adapters_ms": ms, "over_base": ms / base_ms}


def prefill_ms(engine: InlineEngine, tokens: int, prompts: int, lora: int, kernels: int = 0, repeats: int = 5) -> float:
    """The least GPU time of a step of so many tokens in so many prompts of random ids; lora: the number of their adapters."""
    engine.scheduler.abort_owner(0)
    params, length, times = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), tokens // prompts, []
    step, rng = engine.runner.step, random.Random(7)

    def run() -> None:
        for i in range(prompts):
            engine.add(rng.choices(range(20, 200), k=length), params, i % lora if lora else -1)
        engine.run()

    def timed(words, read_masks):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        results = step(words, read_masks)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        return results

    engine.runner.step = timed
    for _ in range(repeats + 1):
        run()
    del engine.runner.step
    if kernels:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        print_times(times_of(profile, 1), kernels)
    return min(sorted(times, reverse=True)[1:repeats])  # the longest steps are these, the very longest compiles


def print_kernels(graphs: list[torch.cuda.CUDAGraph], most: int) -> None:
    print_times(kernel_times(graphs), most)


def print_times(times: dict[str, tuple[float, int]], most: int) -> None:
    for name, (us, count) in sorted(times.items(), key=lambda x: -x[1][0])[:most]:
        print(f"      {us:9.1f} µs {count:5} x  {name}")


def speculation(window: int) -> SpeculativeConfig | None:
    if window == 1:
        return None
    return SpeculativeConfig(method="ngram", num_speculative_tokens=window - 1, enable_adaptive_verification=False)


def replay_ms(graphs: list[torch.cuda.CUDAGraph], repeats: int = 20) -> float:
    """Mean time of replaying these graphs once, back to back."""
    stream = torch.cuda.current_stream()
    for g in graphs * 3:
        g.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    for _ in range(repeats):
        for g in graphs:
            g.replay()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def kernel_times(graphs: list[torch.cuda.CUDAGraph], repeats: int = 5) -> dict[str, tuple[float, int]]:
    """Kernel name -> (µs a step, launches a step)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            for g in graphs:
                g.replay()
        torch.cuda.synchronize()
    return times_of(profile, repeats)


def times_of(profile: torch.profiler.profile, repeats: int) -> dict[str, tuple[float, int]]:
    """Kernel name -> (µs a repeat, launches a repeat)."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:70]].append(event.time_range.elapsed_us())
    return {name: (sum(times) / repeats, len(times) // repeats) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--window", type=int, default=1, help="tokens of a row, 1 to 16 (default: 1)")
    parser.add_argument("--lora", type=int, default=0, metavar="N", help="rows have N adapters in turn (default: none)")
    parser.add_argument("--prefill", type=int, metavar="TOKENS", help="also time a step of 8 prompts of so many tokens")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--quantization", help="of the weights, as quire serve takes it")
    parser.add_argument(
        "--kernels", type=int, nargs="?", const=16, default=0, metavar="N", help="list the N longest (default: 16)"
    )
    args = parser.parse_args()
    engine, result = None, {}
    for rows in args.rows:
        sizes, lora = (args.context, engine, max(args.rows)), (args.lora, args.lora_rank)
        engine = prepared(args.model, rows, *sizes, args.quantization, args.window, *lora)
        graphs, windows = engine.runner.graphs, args.window > 1
        size = next(s for s in (graphs.sizes.samples if windows else graphs.sizes.decode) if s >= rows * args.window)
        kind = SAMPLING_RANDOM | (SAMPLING_WINDOWS if windows else 0)
        with engine.runner.device.stream():
            forward = graphs._forward[BatchDescriptor(size, size, False, windows=windows)]
            sampling = graphs._sampling[size, kind]
            # each replay of a sampling graph is one token more for every sequence, some 30 in all
            both = replay_ms([forward, sampling])
            result[rows] = {"forward_ms": replay_ms([forward]), "tail_ms": replay_ms([sampling], 3), "step_ms": both}
            if args.lora:
                result[rows] |= adapters_ms(engine, size, kind, both, args.kernels)
            print(f"{rows:5} rows: " + ", ".join(f"{k} {v:.3f}" for k, v in result[rows].items()), flush=True)
            if args.kernels:
                print_kernels([forward, sampling], args.kernels)
    if args.prefill:
        base = prefill_ms(engine, args.prefill, 8, 0, args.kernels)
        result["prefill"] = {"step_ms": base}
        if args.lora:
            adapted = prefill_ms(engine, args.prefill, 8, args.lora, args.kernels)
            result["prefill"] |= {"adapters_ms": adapted, "over_base": adapted / base}
        print(f"prefill of {args.prefill}: " + ", ".join(f"{k} {v:.3f}" for k, v in result["prefill"].items()), flush=True)
    shown = {name: vars(args)[name] for name in ("model", "context", "window", "lora", "lora_rank")}
    print("RESULT " + json.dumps({**shown, "rows": result}))


if __name__ == "__main__":
    main()
