"""Time of the kernels around attention on one GPU, in CUDA graphs over rotated buffers, and the fraction of the memory's speed.

    python benchmarks/kernels_small.py [--model 0.6B|8B] [--only norm,silu,rope,step,sampler,linear,split,stream]
                                       [--rows 1,16,64,256,1024] [--linear-rows 1,2,4,8,16] [--pdl 0|1|2] [--tune]
                                       [--bandwidth 4.8]

A row of the table: kernel, shape, µs a call, the µs that its bytes alone would take, and their quotient. Buffers rotate through
at least 256 MB, so that L2 holds only what a model would leave there; what a kernel passes to the next one (x, y of a linear
layer) is as warm as in a model. Linear layers are compared with cuBLAS; --tune sweeps configurations.
Biases: kernels follow each other without a gap, each a copy of the last; the launch overhead inside a graph counts.
Ends in one line of JSON.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from ceilings import replay_seconds
from msgspec.structs import astuple

from quire.ipc.step.plan import DTYPES, LogitsProcessors, StepPlan
from quire.ipc.step.sections import PREFILL_SAMPLE
from quire.kernels.attention import rope_kv
from quire.kernels.elementwise import activation, norm
from quire.kernels.linear import linear, split_linear
from quire.kernels.sampling import logits_processors, sampler
from quire.kernels.step import step_inputs
from quire.kernels.step import tables as t
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN
from quire.kernels.triton_support.hopper import MAX_ROWS, available, num_sms
from quire.kernels.tuning.configs import SkinnyConfig, SplitConfig
from quire.kernels.tuning.current import linear_tuning

ROTATED_BYTES = 256 << 20
DTYPE = torch.bfloat16
BLOCK_SIZE = 16


class Model(NamedTuple):
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """name: (N, K)"""
        heads = self.q_heads + 2 * self.kv_heads
        return {
            "qkv": (heads * self.head_dim, self.hidden),
            "o": (self.hidden, self.q_heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


MODELS = {"0.6B": Model(1024, 3072, 16, 8, 128, 151936, True), "8B": Model(4096, 14336, 32, 8, 128, 128256, False)}


def measure(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """µs a call: the median over replays of one graph that holds all calls, at least 20 of them."""
    calls = calls * -(-20 // len(calls))

    def run() -> None:
        for call in calls:
            call()

    return replay_seconds(run, repeats) * 1e6 / len(calls)


def ranked(calls: Callable[[Any], list[Callable[[], object]]], configs: set[Any]) -> list[tuple[float, Any]]:
    """(µs, configuration), the fastest first."""
    return sorted(((measure(calls(config), 5), config) for config in configs), key=lambda each: each[0])


def copies(bytes_each: int) -> int:
    return max(2, min(64, -(-ROTATED_BYTES // bytes_each)))


class Table:
    """Prints each row at once, and keeps it for the line of JSON."""

    def __init__(self, bandwidth: float, device: str):
        self.bandwidth, self.device, self.rows = bandwidth, device, []

    def add(self, kernel: str, shape: str, calls: list[Callable[[], object]], bytes_moved: int, beside: str = "") -> float:
        micros = measure(calls)
        least = bytes_moved / self.bandwidth * 1e-6
        print(f"{kernel:24} {shape:28} {micros:9.2f} µs   by bytes {least:9.2f}   {least / micros:6.1%}   {beside}", flush=True)
        row = {"kernel": kernel, "shape": shape, "us": round(micros, 3), "fraction": round(least / micros, 4)}
        self.rows.append({**row, "beside": beside} if beside else row)
        return micros


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


DEVICE = "cuda"


def bench_norm(table: Table, m: Model, rows: int, pdl: int) -> None:
    weight = random(m.hidden)
    size = rows * m.hidden * 2
    n = copies(4 * size)
    xs, residuals, outs = ([random(rows, m.hidden) for _ in range(n)] for _ in range(3))
    both = list(zip(xs, residuals, outs, strict=True))
    table.add(
        "rms_norm",
        f"{rows} x {m.hidden}",
        [lambda a=a, c=c: norm.rms_norm(a, weight, 1e-6, c, pdl=pdl) for a, _, c in both],
        2 * size,
    )
    calls = [lambda a=a, b=b, c=c: norm.add_rms_norm(a, b, weight, 1e-6, c, pdl=pdl) for a, b, c in both]
    table.add("add_rms_norm", f"{rows} x {m.hidden}", calls, 4 * size)


def bench_silu(table: Table, m: Model, rows: int, pdl: int, tune: bool) -> None:
    size = rows * m.intermediate * 2
    pairs = [(random(rows, 2 * m.intermediate), random(rows, m.intermediate)) for _ in range(copies(3 * size))]

    def calls(config: activation.Config | None) -> list[Callable[[], object]]:
        return [lambda x=x, y=y: activation.silu_mul(x, y, pdl=pdl, config=config) for x, y in pairs]

    for block, warps in itertools.product((512, 1024, 2048, 4096), (1, 2, 4, 8)) if tune else ():
        if 8 <= block // (32 * warps) <= 32:
            print(f"    {measure(calls(activation.Config(block, warps)), 5):9.2f} µs  {activation.Config(block, warps)}")
    table.add("silu_mul", f"{rows} x {m.intermediate}", calls(None), 3 * size)


def bench_rope(table: Table, m: Model, rows: int, pdl: int, tune: bool) -> None:
    heads = m.q_heads + 2 * m.kv_heads
    moved = rows * (2 * m.q_heads + 4 * m.kv_heads) * m.head_dim * 2
    table_of_angles = random(40960, m.head_dim, dtype=torch.float32)
    positions = torch.randint(0, 40960, (rows,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(4096 * BLOCK_SIZE, device=DEVICE)[:rows]
    weights = (random(m.head_dim), random(m.head_dim)) if m.qk_norm else (None, None)
    each = []
    for _ in range(min(copies(moved), 8)):
        qkv, cache = random(rows, heads * m.head_dim), random(2, 4096, m.kv_heads, BLOCK_SIZE, m.head_dim)
        each.append((qkv, positions, table_of_angles, slots, cache[0], cache[1], m.q_heads, *weights))

    def calls(tile: int | None) -> list[Callable[[], object]]:
        return [lambda args=args: rope_kv.rope_kv(*args, pdl=pdl, tile=tile) for args in each]

    for tile in (512, 1024, 2048, 4096) if tune else ():
        print(f"    {measure(calls(tile), 5):9.2f} µs  tile {tile}")
    table.add("rope_kv", f"{rows} x {heads} x {m.head_dim}", calls(None), moved)


def bench_step(table: Table, m: Model, rows: int) -> None:
    """Decode steps, and a step with prefill tokens only."""
    state, step = t.SlotTables.allocate(rows, 1, 512, DEVICE), t.StepBuffers.allocate(8192, rows, 1, DEVICE)
    pool = t.LogitsProcessorPool.allocate(rows, m.vocab, 40960, DEVICE)
    results = torch.zeros(4, rows, dtype=torch.int64).pin_memory()
    sampled = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    for name, tokens in (("decode", rows), ("prefill", 8192)):
        plan = step_plan(rows, tokens, name == "decode").to(DEVICE)
        prepare = functools.partial(
            step_inputs.prepare_step, plan, state, step, tokens, rows, block_size=BLOCK_SIZE, num_blocks=4096, vocab=m.vocab
        )
        table.add("prepare_step", f"{rows} rows, {name}", [prepare], 30 * tokens + 100 * rows)
        finish = functools.partial(step_inputs.finish_step, plan, state, pool, step, sampled, results, rows, max_rows=rows)
        table.add("finish_step", f"{rows} rows, {name}", [finish], 100 * rows)


def step_plan(rows: int, tokens: int, decode: bool) -> torch.Tensor:
    if decode:
        sections = {"decode_rows": np.arange(rows, dtype=np.int32)}
    else:
        prefill = np.zeros(rows, DTYPES["prefill_rows"])
        prefill["slot"], prefill["length"], prefill["flags"] = np.arange(rows), tokens // rows, PREFILL_SAMPLE
        sections = {"prefill_rows": prefill, "prefill_tokens": np.zeros(tokens, np.int32)}
    return torch.from_numpy(StepPlan(0, sections).encode())


def bench_sampler(table: Table, m: Model, rows: int) -> None:
    state = t.SlotTables.allocate(rows, 1, 1, DEVICE)
    pool, workspace = (
        t.LogitsProcessorPool.allocate(rows, m.vocab, 40960, DEVICE),
        t.SamplerWorkspace.allocate(rows, m.vocab, DEVICE),
    )
    some = [LogitsProcessors(i, range(i, i + 4000), [i] * 200, [i + 1, i + 2], [1.0, 2.0], [], [], []) for i in range(rows)]
    logits_processors.apply_logits_processors(state, pool, some)
    state.column("repetition").fill_(1.1)
    slots, positions = (
        torch.arange(rows, device=DEVICE, dtype=torch.int32),
        torch.full((rows,), 77, device=DEVICE, dtype=torch.int32),
    )
    size = rows * m.vocab * 2
    logits = [random(rows, m.vocab) * 2 for _ in range(copies(size))]
    for x in logits:  # a few tokens far above the rest, as in a model
        x[:, :40] += torch.linspace(12, 4, 40, device=DEVICE, dtype=DTYPE)
    mask = torch.full((rows, -(-m.vocab // 32)), -1, dtype=torch.int32, device=DEVICE)
    for name, values, flags, moved in (
        ("greedy", {}, {"random": False}, size),
        ("random", {"temperature": 1.0}, {"random": True}, size),
        ("random, mask", {"temperature": 1.0}, {"random": True, "bitmask": mask}, size + mask.nbytes),
        ("top-k 50", {"temperature": 1.0, "top_k": 50}, {"random": True, "filtered": True}, size),
        ("top-k 50, top-p 0.9", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}, {"random": True, "filtered": True}, size),
        ("top-p 0.95", {"temperature": 1.0, "top_p": 0.95}, {"random": True, "filtered": True}, size),
        ("min-p 0.05", {"temperature": 1.0, "min_p": 0.05}, {"random": True, "filtered": True}, size),
        ("top-p 0.95, flat", {"temperature": 100.0, "top_p": 0.95}, {"random": True, "filtered": True}, size),
        ("16 processors", {"temperature": 1.0}, {"random": True, "processors": True}, size),
        ("processors", {"temperature": 1.0}, {"random": True, "processors": True}, size + size // 2),
        (
            "processors, top-p 0.95",
            {"temperature": 1.0, "top_p": 0.95},
            {"random": True, "filtered": True, "processors": True},
            size + size // 2,
        ),
    ):  # fmt: skip
        defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for column, value in {**defaults, **values}.items():
            state.column(column).fill_(value)
        state.column("has_processors").zero_()
        with_row = (16 if name == "16 processors" else rows) if "processors" in flags else 0
        state.column("has_processors")[slots[:with_row].long()] = 1
        calls = [lambda x=x, f=flags: sampler.sample(x, slots, positions, state, pool, workspace, **f) for x in logits]
        table.add(f"sample, {name}", f"{rows} x {m.vocab}", calls, moved)
    calls = [lambda x=x: sampler.sampled_logprobs(x, workspace.sampled[:rows], workspace) for x in logits]
    table.add("sampled_logprobs", f"{rows} x {m.vocab}", calls, 2 * size)


def bench_linear(table: Table, m: Model, rows: int, pdl: int, tune: bool) -> None:
    for name, shape in m.linears.items():
        bench_one_linear(table, name, rows, *shape, name == "gate_up", pdl, tune)


def bench_one_linear(table: Table, name: str, rows: int, n: int, k: int, is_gated: bool, pdl: int, tune: bool) -> None:
    """gate_up includes silu and the product after it: it is compared with cuBLAS and a separate kernel for those."""
    weights = [random(n, k) for _ in range(copies(n * k * 2))]
    columns = n // 2 if is_gated else n
    x, out = random(rows, k), random(rows, columns)

    def calls(config: SkinnyConfig | None) -> list[Callable[[], object]]:
        if config is None and is_gated:
            return [lambda w=w: activation.silu_mul(F.linear(x, w), out, pdl=pdl) for w in weights]
        if config is None:
            return [lambda w=w: F.linear(x, w) for w in weights]
        return [lambda w=w: linear.launch_skinny(x, w, None, out, config, is_gated=is_gated, pdl=pdl) for w in weights]

    cublas = measure(calls(None))
    best = linear.choose(rows, columns, k, is_gated)
    if tune:
        timed = ranked(calls, {best, *candidates(rows, k, is_gated)})
        for micros, config in timed[:5]:
            print(f"    {micros:9.2f} µs  {config}")
        best = timed[0][1]
    moved = n * k * 2 + rows * (columns + k) * 2
    name = f"{name} {rows} x {n} x {k}"
    table.add("skinny_linear", name, calls(best), moved, f"cuBLAS {cublas:.2f} µs, {astuple(best)}")


def bench_split(table: Table, m: Model, rows: int, tune: bool) -> None:
    """A product left as split-K partial sums and the norm that adds them up, compared with cuBLAS and a norm."""
    for name in ("o", "down"):
        n, k = m.linears[name]
        weights = [random(n, k) for _ in range(copies(n * k * 2))]
        x, residual, scale, h = random(rows, k), random(rows, n), random(n), random(rows, n)
        if not split_linear.pays(x, weights[0]):
            continue

        def normed(y: torch.Tensor, pdl: int = PLAIN, residual=residual, scale=scale, h=h) -> torch.Tensor:
            return norm.add_rms_norm(y, residual, scale, 1e-6, h, pdl=pdl)

        def pair(w: torch.Tensor, config: SplitConfig, x=x, normed=normed) -> Callable[[], object]:
            return lambda: normed(split_linear.split_linear(x, w, None, config, dependents=True), LATE)

        def calls(config: SplitConfig, weights=weights, pair=pair) -> list[Callable[[], object]]:
            return [pair(w, config) for w in weights]

        cublas = measure([lambda w=w, x=x, normed=normed: normed(F.linear(x, w)) for w in weights])
        best = linear_tuning().split.config
        if tune:
            timed = ranked(calls, {best, *SPLIT_CANDIDATES})
            for micros, config in timed[:8]:
                print(f"    {micros:9.2f} µs  {config}")
            best = timed[0][1]
        moved = n * k * 2 + rows * (k + 4 * n) * 2
        table.add(
            "split_linear, norm", f"{name} {rows} x {n} x {k}", calls(best), moved, f"cuBLAS {cublas:.2f} µs, {astuple(best)}"
        )


SPLIT_CANDIDATES = [
    SplitConfig(splits, block_n, block_k, 4, stages)
    for splits, block_n in ((2, 16), (2, 32), (4, 16), (4, 32), (4, 64), (8, 32), (8, 64))
    for block_k, stages in ((64, 4), (128, 3), (128, 4))
]


def bench_stream(table: Table, m: Model, rows: int, tune: bool) -> None:
    """Hopper's kernel for 2 to 64 rows, in a chain of dependent launches, compared with cuBLAS; gate_up with SiLU."""
    from quire.kernels.linear import linear_hopper as kernel

    for name, (n, k) in m.linears.items():
        weights, x = [random(n, k) for _ in range(copies(n * k * 2))], random(rows, k)
        is_gated, split_k = name == "gate_up", name in ("o", "down")
        columns = n // 2 if is_gated else n

        def calls(c: kernel.Config, weights=weights, x=x, is_gated=is_gated, columns=columns) -> list[Callable[[], object]]:
            shape, dtype = ((c.parts, rows, columns), torch.float32) if c.parts > 1 else ((rows, columns), DTYPE)
            out = torch.empty(shape, dtype=dtype, device=DEVICE)
            return [lambda w=w: kernel.launch(x, w, None, out, c, is_gated=is_gated, pdl=LATE) for w in weights]

        best = kernel.choose(rows, columns, k, num_sms(weights[0].device), is_gated=is_gated, split_k=split_k)
        if tune:
            timed = sorted((measure(calls(c), 5), c) for c in {best, *stream_candidates(rows, is_gated, split_k)})
            for micros, config in timed[:6]:
                print(f"    {micros:9.2f} µs  {config}")
            best = timed[0][1]
        cublas = measure(
            [lambda w=w, x=x, g=is_gated: activation.silu_mul(F.linear(x, w)) if g else F.linear(x, w) for w in weights]
        )
        moved, beside = n * k * 2 + rows * (columns + k) * 2, f"cuBLAS {cublas:.2f} µs, {tuple(best)}"
        table.add("linear_hopper", f"{name} {rows} x {n} x {k}", calls(best), moved, beside)


def stream_candidates(rows: int, is_gated: bool, split_k: bool) -> list[Any]:
    from quire.kernels.linear import linear_hopper as kernel

    found = []
    for block_k, sharing, parts in itertools.product((64, 128), (1, 2, 3), (1, 2, 4, 8) if split_k else (1,)):
        if (stages := kernel.max_stages(rows, block_k, sharing, is_gated)) >= 2:
            found.append(kernel.Config(block_k, stages, num_sms(torch.device(DEVICE, 0)) * sharing, parts))
    return found


def candidates(rows: int, k: int, is_gated: bool) -> list[SkinnyConfig]:
    found = []
    if rows <= linear.MAX_VECTOR_ROWS:
        for block_n, block_k, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
            if block_k < 2 * k and 256 <= block_n * block_k // warps <= 2048:
                found.append(SkinnyConfig(False, block_n, block_k, warps))
    if rows > 1:
        for block_n, block_k, warps, stages in itertools.product((8, 16, 32, 64), (128, 256, 512), (2, 4, 8), (3, 5)):
            if (linear.MAX_ROWS + block_n * (1 + is_gated)) * block_k * 2 * stages <= 200_000 and block_k * 2 <= k:
                found.append(SkinnyConfig(True, block_n, block_k, warps, stages))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--only", default="norm,silu,rope,step,sampler,linear,split,stream")
    parser.add_argument("--rows", default="1,16,64,256,1024")
    parser.add_argument("--linear-rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--pdl", type=int, choices=(0, 1, 2), default=0, help="mode of triton_support/dependent_launch.py")
    parser.add_argument("--tune", action="store_true", help="sweep configurations of silu_mul, rope_kv and linear layers")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="of the memory, in TB/s")
    args = parser.parse_args()
    torch.manual_seed(0)
    table = Table(args.bandwidth, torch.cuda.get_device_name())
    only = args.only.split(",")
    print(f"{table.device}, torch {torch.__version__}, {DTYPE}, {args.bandwidth} TB/s")
    for name in args.model or MODELS:
        m = MODELS[name]
        print(f"\n{name}")
        for rows in (int(r) for r in args.rows.split(",")):
            if "norm" in only:
                bench_norm(table, m, rows, args.pdl)
            for part, bench in (("silu", bench_silu), ("rope", bench_rope)):
                if part in only:
                    bench(table, m, rows, args.pdl, args.tune)
            for part, bench in (("step", bench_step), ("sampler", bench_sampler)):
                if part in only:
                    bench(table, m, rows)
        for rows in (int(r) for r in args.linear_rows.split(",")):
            if "linear" in only and rows <= linear.MAX_ROWS:
                bench_linear(table, m, rows, args.pdl, args.tune)
            if "split" in only:
                bench_split(table, m, rows, args.tune)
            if "stream" in only and 1 < rows <= MAX_ROWS and available(torch.device(DEVICE, 0)):
                bench_stream(table, m, rows, args.tune)
    print(json.dumps({"device": table.device, "torch": torch.__version__, "bandwidth": args.bandwidth, "rows": table.rows}))


if __name__ == "__main__":
    main()
