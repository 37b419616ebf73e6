"""Where a decode step's GPU time goes: `step_profile.py MODEL --rows 1 64 256 [--quantization fp8] [--kernels]`, dummy weights.

It times the forward and sampling graphs of each padded size by replaying them back to back, and with --kernels lists the times
of their kernels (torch.profiler over replays; dependent launches include their wait). Sequences have `--context` tokens each.
With --window N every row has a window of N tokens, of which one is accepted; no drafter's own time is in it. Needs a GPU.
Prints `RESULT {json}` last.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "support")]
from inline_engine import InlineEngine  # noqa: E402

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
) -> InlineEngine:
    """An engine with `rows` decoding sequences of `context` tokens and a few more, in its first slots."""
    if engine is None:
        blocks = 2 + max(rows, most_rows) * (context // 64 + 2) * 2  # twice, for layers with and without windows
        engine = InlineEngine(
            model, device="cuda", dtype=torch.bfloat16, max_num_seqs=1024, budget=8192, block_size=64, num_blocks=blocks,
            max_model_len=8192, dummy=True, model_options={"quantization": quantization}, speculation=speculation(window),
            enable_prefix_caching=False, look_ahead=False, num_states=max(rows, most_rows) + 4,
        )  # fmt: skip
        if window > 1:
            engine.runner.device.drafter = NeverRight()
        with engine.runner.device.stream():
            engine.runner.capture_graphs()
        engine.scheduler.check = lambda: None
    engine.scheduler.abort_owner(0)
    params = SamplingParams(temperature=1.0, max_tokens=1000, ignore_eos=True, seed=1)
    for i in range(rows):
        engine.add([11 + i % 50] * context, params)

    def is_the_step(plan):
        is_decode = len(plan.decode_rows) == plan.num_rows == rows and "slot_updates" not in plan.sections
        return is_decode and plan.draft_tokens == rows * (window - 1)

    engine.run(until=is_the_step)
    assert not engine.scheduler.is_idle, f"there was no step of {rows} decode rows and windows of {window} tokens"
    return engine


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
    parser.add_argument("--quantization", help="of the weights, as quire serve takes it")
    parser.add_argument(
        "--kernels", type=int, nargs="?", const=16, default=0, metavar="N", help="list the N longest (default: 16)"
    )
    args = parser.parse_args()
    engine, result = None, {}
    for rows in args.rows:
        engine = prepared(args.model, rows, args.context, engine, max(args.rows), args.quantization, args.window)
        graphs, windows = engine.runner.graphs, args.window > 1
        size = next(s for s in (graphs.sizes.samples if windows else graphs.sizes.decode) if s >= rows * args.window)
        kind = SAMPLING_RANDOM | (SAMPLING_WINDOWS if windows else 0)
        with engine.runner.device.stream():
            forward = graphs._forward[BatchDescriptor(size, size, False, windows=windows)]
            sampling = graphs._sampling[size, kind]
            # each replay of a sampling graph is one token more for every sequence, some 30 in all
            both = replay_ms([forward, sampling])
            result[rows] = {"forward_ms": replay_ms([forward]), "tail_ms": replay_ms([sampling], 3), "step_ms": both}
            print(f"{rows:5} rows: " + ", ".join(f"{k} {v:.3f}" for k, v in result[rows].items()), flush=True)
            if args.kernels:
                times = kernel_times([forward, sampling])
                for name, (us, count) in sorted(times.items(), key=lambda x: -x[1][0])[: args.kernels]:
                    print(f"      {us:9.1f} µs {count:5} x  {name}")
    print("RESULT " + json.dumps({"model": args.model, "context": args.context, "window": args.window, "rows": result}))


if __name__ == "__main__":
    main()
