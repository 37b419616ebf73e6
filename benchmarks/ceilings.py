"""The least time that a workload could take on this GPU, from the costs of its parts, each measured here alone.

    python benchmarks/ceilings.py MODEL_DIR [--workloads NAME ...] [--tokens 1 16 32 ...] [--tensor-parallel-size N ...]

Measured: every matrix product of the model, as torch or as Quire computes it, whichever is faster, one captured graph for each
number of tokens, over as many weights as the model has (so that L2 holds none of the next layer's); the rate of a copy (bytes
read + written a second); the best dense rate reached. Computed from these: KV bytes read and written, and the bytes of norms,
activation, rotation and sampler, at the copy's rate; attention's arithmetic over prompts at the dense rate. Between measured
sizes time is interpolated, and never more than at the next size, to which a step could be padded.

A workload is played step by step as an engine with continuous batching would run it: at most 1024 rows and --budget tokens a
step, running rows first, prompts cut into chunks. A step costs products + head + attention (its bytes or its arithmetic, the
larger) + elementwise + sampler. Launch gaps, scheduling and the sampler's arithmetic cost nothing: no engine can reach this.

For several GPUs: one rank's share of the products is measured on this one, and an exchange, two a layer, costs --exchange-us
(as measured by benchmarks/collectives.py). Stages share a step's time evenly and never wait, except for a request that is alone
in its micro-batch; engines share the requests. Transfers between stages cost nothing.
Prints tables and a last line `RESULT {json}`. `--device cpu` only tries the script: its figures mean nothing.
"""

import argparse
import bisect
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import workloads
from layout import SIZES, add_layout_arguments, layout_in_words, layout_options
from servers import machine

from quire.workers.models.config import ModelConfig
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # x [M, K], w [N, K], out [M, N]

TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_ROWS = 1024
PARTS = ("products", "head", "attention", "elementwise", "sampler", "exchange")
BYTES = 2  # bfloat16
COPY_BYTES = 2 << 30


# ------------------------------------------------------------------------------------------------------------- measuring
def measure(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one call: the median over replays of a graph that holds it (on a CPU: over calls)."""
    if device.type == "cpu":
        run()
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return sorted(times)[repeats // 2]
    return replay_seconds(run, repeats)


def replay_seconds(run: Callable[[], object], repeats: int) -> float:
    """The median over replays of a CUDA graph that holds one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


@dataclass
class Measured:
    """This machine's times for this model, in seconds by number of tokens (body) or of rows (head)."""

    copy_bytes_s: float
    body: dict[int, float] = field(default_factory=dict)
    head: dict[int, float] = field(default_factory=dict)
    dense_flop_s: float = 0.0
    exchange: dict[int, float] = field(default_factory=dict)  # of one exchange, by rows

    @staticmethod
    def at(times: dict[int, float], size: int) -> float:
        """Interpolated; not more than at the next larger measured size; beyond the largest in proportion."""
        if size <= 0:
            return 0.0
        sizes = sorted(times)
        i = bisect.bisect_left(sizes, size)
        if i == len(sizes):
            return times[sizes[-1]] * size / sizes[-1]
        above = min(times[s] for s in sizes[i:])
        if i == 0:
            return above
        low, high = sizes[i - 1], sizes[i]
        between = times[low] + (times[high] - times[low]) * (size - low) / (high - low)
        return min(between, above)


def measure_machine(config: ModelConfig, tokens: list[int], device: torch.device, repeats: int, ranks: int) -> Measured:
    """Measure one rank's share of the model."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = Measured(copy_rate(device, repeats))
    print(f"copy: {found.copy_bytes_s / 1e12:.3f} TB/s (read + written)", flush=True)
    h, i = config.hidden_size, config.layers[0].intermediate_size // ranks
    attention = config.layers[0].attention.on_rank(Parallel(0, ranks))  # of all layers
    shapes = [(attention.q_size + 2 * attention.kv_size, h), (h, attention.q_size), (2 * i, h), (h, i)]
    layers = [[random(n, k, device=device, dtype=dtype) for n, k in shapes] for _ in config.layers]
    vocab = Parallel(0, ranks).vocabulary(config.vocab_size).size
    head, spare = (
        random(vocab, h, device=device, dtype=dtype) for _ in range(2)
    )  # in turn: half of 0.3 GB would stay in an L2 of 50 MB
    flops = 2 * sum(n * k for n, k in shapes) * len(config.layers)
    print(f"\n{'tokens':>7} {'products ms':>12} {'TB/s':>7} {'TFLOP/s':>8} {'head ms':>9} {'TB/s':>7} {'TFLOP/s':>8}")
    for count in tokens:
        inputs = {k: random(count, k, device=device, dtype=dtype) for _, k in shapes}
        outputs = {n: torch.empty(count, n, device=device, dtype=dtype) for n, _ in shapes}

        def body(product: Product, inputs=inputs, outputs=outputs) -> None:
            for weights in layers:
                for w in weights:
                    product(inputs[w.shape[1]], w, outputs[w.shape[0]])

        ways = products(device)
        found.body[count] = t = min(measure(partial(body, way), device, repeats) for way in ways)
        found.dense_flop_s = max(found.dense_flop_s, flops * count / t)
        line = f"{count:7} {1e3 * t:12.3f} {_bytes(layers) / t / 1e12:7.2f} {flops * count / t / 1e12:8.1f}"
        del inputs, outputs
        if count <= MAX_ROWS:
            x = random(count, h, device=device, dtype=dtype)
            logits = torch.empty(count, vocab, device=device, dtype=dtype)

            def heads(product: Product, x=x, logits=logits) -> None:
                for w in (head, spare):
                    product(x, w, logits)

            found.head[count] = t = min(measure(partial(heads, way), device, repeats) for way in ways) / 2
            head_flops = 2 * head.numel() * count
            line += f" {1e3 * t:9.3f} {_bytes([[head]]) / t / 1e12:7.2f} {head_flops / t / 1e12:8.1f}"
        print(line, flush=True)
    return found


def random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Small values: at full range a matrix product's power, and with it the clock, would differ from a model's."""
    return torch.randn(shape, device=device, dtype=dtype) * 0.02


def _bytes(layers: list[list[torch.Tensor]]) -> int:
    return sum(w.numel() * w.element_size() for weights in layers for w in weights)


def eager_seconds(call: Callable[[], object], times: int = 20) -> float:
    """A call's share of many in a row, without a graph: in a graph a copy is a slower node."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def copy_rate(device: torch.device, repeats: int) -> float:
    size = COPY_BYTES if device.type == "cuda" else 64 << 20
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        b.copy_(a)

    return 2 * size / (eager_seconds(copy) if device.type == "cuda" else measure(copy, device, repeats))


def products(device: torch.device) -> list[Product]:
    """The ways to compute x @ w^T into `out`: torch's, and the kernel that Quire chooses for so many rows."""
    ways: list[Product] = [lambda x, w, out: torch.mm(x, w.t(), out=out)]
    if device.type == "cuda":
        from quire.kernels.linear.linear import skinny_linear

        ways.append(lambda x, w, out: skinny_linear(x, w, out=out))
    return ways


def attention_rate(config: ModelConfig, device: torch.device, repeats: int) -> float:
    """FLOP/s of torch's own causal attention over 8 x 2048 tokens, half the square counted: for orientation."""
    spec = config.layers[0].attention
    length, batch = (2048, 8) if device.type == "cuda" else (128, 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(batch, spec.num_heads, length, spec.head_dim, device=device, dtype=dtype) for _ in range(3))
    seconds = measure(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, repeats)
    return 4 * batch * spec.q_size * length * (length + 1) / 2 / seconds


# -------------------------------------------------------------------------------------------------------------- computing
class Costs:
    """Seconds of a step's parts, from a Measured and the model's shape."""

    def __init__(self, config: ModelConfig, found: Measured, ranks: int = 1) -> None:
        self.config, self.found = config, found
        c, layer = config, config.layers[0]  # all layers are alike except for their windows
        attention = layer.attention.on_rank(Parallel(0, ranks))
        self._vocab = Parallel(0, ranks).vocabulary(c.vocab_size).size
        per_layer = 8 * c.hidden_size  # two norms, each: read x and residual, write both
        per_layer += 3 * layer.intermediate_size // ranks  # gate and up read, product written
        per_layer += (
            2 * (attention.q_size + 2 * attention.kv_size) + 2 * attention.q_size
        )  # qkv read, q and KV written; attention's q and output
        self._elementwise = BYTES * (per_layer * len(c.layers) + 4 * c.hidden_size)  # per token
        self._kv = 2 * BYTES * attention.kv_size  # per layer and token of context
        self._flops = 4 * attention.q_size  # per layer, query and key
        windows = [spec.attention.window for spec in c.layers]
        self._windows = {w: windows.count(w) for w in set(windows)}

    def step(self, contexts: list[int], chunks: list[tuple[int, int]], num_samples: int) -> dict[str, float]:
        """contexts: of decode rows, this step's token included. chunks: (tokens computed before, tokens). Seconds by part."""
        tokens = len(contexts) + sum(n for _, n in chunks)
        rate, c = self.found.copy_bytes_s, self.config
        kv_bytes = flops = 0.0
        for window, layers in self._windows.items():
            seen = sum(min(n, window) if window else n for n in contexts)
            for before, n in chunks:
                seen += min(before + n, window + n) if window else before + n
                flops += self._flops * layers * _pairs(before, n, window)
            kv_bytes += self._kv * layers * seen
        return {
            "products": self.found.at(self.found.body, tokens),
            "head": self.found.at(self.found.head, num_samples),
            "attention": max(kv_bytes / rate, flops / self.found.dense_flop_s),
            "elementwise": self._elementwise * tokens / rate,
            "sampler": BYTES * self._vocab * num_samples / rate,
            "exchange": 2 * len(c.layers) * self.found.at(self.found.exchange, tokens) if self.found.exchange else 0.0,
        }


def _pairs(before: int, count: int, window: int) -> float:
    """(query, key) pairs of `count` new tokens after `before` others."""
    if not window:
        return count * before + count * (count + 1) / 2
    return float(sum(min(before + i + 1, window) for i in range(count)))


def play_shared(costs: Costs, n_in: list[int], n_out: list[int], budget: int, stages: int, engines: int) -> dict[str, Any]:
    """The slowest engine's figures; a stage runs each micro-batch's steps in turn, in its share of their time."""
    of_engines = []
    for engine in range(engines):
        shares = [slice(engine + engines * micro_batch, None, engines * stages) for micro_batch in range(stages)]
        micro_batches = [play(costs, n_in[share], n_out[share], budget) for share in shares]
        parts = {name: round(sum(c["parts"].get(name, 0.0) for c in micro_batches) / stages, 4) for name in PARTS}
        seconds = max(sum(c["seconds"] for c in micro_batches) / stages, max(c["seconds"] for c in micro_batches))
        of_engines.append({"steps": sum(c["steps"] for c in micro_batches), "parts": parts, "seconds": seconds})
    return max(of_engines, key=lambda played: played["seconds"])


def play(costs: Costs, n_in: list[int], n_out: list[int], budget: int) -> dict[str, Any]:
    """All requests arrive at once; returns the number of steps that they take, and the seconds by part."""
    waiting = list(range(len(n_in)))[::-1]
    computed, produced = [0] * len(n_in), [0] * len(n_in)
    decoding: list[int] = []
    prefilling: list[int] = []
    parts: dict[str, float] = {}
    steps = 0
    while waiting or prefilling or decoding:
        left = budget - len(decoding)
        chunks, ready = [], []
        while left > 0 and (prefilling or (waiting and len(decoding) + len(chunks) < MAX_ROWS)):
            r = prefilling.pop() if prefilling else waiting.pop()
            n = min(n_in[r] - computed[r], left)
            chunks.append((computed[r], n))
            computed[r] += n
            left -= n
            (ready if computed[r] == n_in[r] else prefilling).append(r)
            if prefilling:
                break
        contexts = [n_in[r] + produced[r] for r in decoding]
        for name, seconds in costs.step(contexts, chunks, len(decoding) + len(ready)).items():
            parts[name] = parts.get(name, 0.0) + seconds
        steps += 1
        decoding += ready
        for r in decoding:
            produced[r] += 1
        decoding = [r for r in decoding if produced[r] < n_out[r]]
    return {"steps": steps, "parts": {name: round(s, 4) for name, s in parts.items()}, "seconds": sum(parts.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder; only its config.json is read")
    parser.add_argument("--workloads", nargs="+", default=workloads.GPU_NAMES, choices=list(workloads.WORKLOADS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--budget", type=int, default=8192, help="most tokens of a step (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--exchange-us", nargs="+", type=_rows_and_us, default=[], metavar="ROWS:US",
        help="what one exchange takes for so many rows, like 1:6.5 64:9.5 256:19; needed beside --tensor-parallel-size",
    )  # fmt: skip
    add_layout_arguments(parser)
    args = parser.parse_args()
    ranks, stages, engines = (getattr(args, name) for name in SIZES)
    if ranks > 1 and not args.exchange_us:
        parser.error("--tensor-parallel-size needs --exchange-us: what an exchange takes, measured by collectives.py")
    config, device = read_model_config(args.model), torch.device(args.device)
    if device.type == "cuda":  # as the engine's workers have it
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with torch.inference_mode():
        found = measure_machine(config, sorted(args.tokens), device, args.repeats, ranks)
        attention = attention_rate(config, device, args.repeats)
    print(f"\ndense {found.dense_flop_s / 1e12:.1f} TFLOP/s; torch's attention {attention / 1e12:.1f} TFLOP/s")
    found.exchange = dict(args.exchange_us) if ranks > 1 else {}
    costs = Costs(config, found, ranks)
    result: dict[str, Any] = {
        "model": Path(args.model).name, **layout_options(args), "machine": machine(),
        "copy_tb_s": round(found.copy_bytes_s / 1e12, 3),
        "dense_tflop_s": round(found.dense_flop_s / 1e12, 1), "attention_tflop_s": round(attention / 1e12, 1),
        "products_ms": {n: round(1e3 * t, 4) for n, t in found.body.items()},
        "head_ms": {n: round(1e3 * t, 4) for n, t in found.head.items()},
    }  # fmt: skip
    print(
        f"\n{layout_in_words(args):22} {'seconds':>9} {'out tok/s':>11} {'tok/s':>11} {'ms/step':>9} {'steps':>6}   "
        + " ".join(PARTS)
    )
    for name in args.workloads:
        n_in, n_out = workloads.lengths(name)
        played = play_shared(costs, n_in, n_out, args.budget, stages, engines)
        seconds = played.pop("seconds")
        row = result[name] = {**workloads.figures(seconds, n_in, n_out), "seconds": round(seconds, 4), **played}
        shares = " ".join(f"{played['parts'][p] / seconds:{len(p)}.0%}" for p in PARTS)
        print(
            f"{name:22} {seconds:9.3f} {row['output_tok_s']:11,.0f} {row['total_tok_s']:11,.0f} "
            f"{row['ms_per_step_at_least']:9.3f} {row['steps']:6}   {shares}"
        )
    print("RESULT " + json.dumps(result))


def _rows_and_us(text: str) -> tuple[int, float]:
    rows, _, us = text.partition(":")
    try:
        return int(rows), float(us) / 1e6
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWS:US, like 64:9.5") from None


if __name__ == "__main__":
    main()
