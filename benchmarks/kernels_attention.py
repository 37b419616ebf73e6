"""Paged attention on one GPU: time, share of the roofline, and torch's attention beside it; `--tune` sweeps the tile sizes.

    python benchmarks/kernels_attention.py [--only decode|prefill] [--match TEXT] [--tune] [--seconds N]
                                           [--config 128,64,8,2,2] [--config ...]

Method: every shape is captured as a CUDA graph of several layers' calls, each layer with its own cache, so that the caches
together are over 4x the L2; the time of a call is the median over replays, divided by the layers. The schedule is timed
separately: a step pays for it once. Bytes are those of visible keys and values, FLOPs those of visible pairs. Decode is
compared with a large copy (read + write), measured first, and with one of as many bytes as it reads itself, since a call of 40
µs is mostly its own beginning and end; prefill is compared with 990 TFLOP/s. Bias: torch's attention gets contiguous keys and
values, no paging, and for prefill heads that are expanded beforehand.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from attention_shapes import DECODE, PREFILL, AttentionShape, describe
from ceilings import copy_rate, eager_seconds
from msgspec import structs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.attention.decode import decode_attention
from quire.kernels.attention.decode_schedule import DecodeWorkspace, decode_schedule
from quire.kernels.attention.prefill import prefill_attention
from quire.kernels.attention.prefill_schedule import PrefillWorkspace, prefill_schedule
from quire.kernels.triton_support.dependent_launch import PLAIN, mode_for
from quire.kernels.tuning.configs import DecodeConfig, PrefillConfig

L2_BYTES = 60 << 20
SHARED_BYTES = 227 << 10


def graph_us(layers: list[Callable[[], object]], replays: int = 7) -> float:
    """Microseconds a call, in a graph of all `layers`, replayed until a sample takes at least 2 ms."""
    for layer in layers[:2]:
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer()
    graph.replay()

    def sample(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / times

    times = max(1, int(2000 / sample(1)))
    return statistics.median(sample(times) for _ in range(replays)) / len(layers)


def copy_us(num_bytes: int) -> float:
    """Microseconds of torch's fastest way to move so many bytes, half of them read: its copy, or a kernel in a graph."""
    pairs = -(-4 * L2_BYTES // num_bytes)
    buffers = [torch.zeros(2, num_bytes // 4, device="cuda", dtype=torch.bfloat16) for _ in range(pairs)]
    turns = itertools.cycle(buffers)

    def copy() -> None:
        source, target = next(turns)
        target.copy_(source)

    def negate(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.neg(source, out=target)

    return min(eager_seconds(copy) * 1e6, graph_us([negate(*pair) for pair in buffers]))


def rooflines() -> tuple[float, float]:
    """(TB/s of a copy, TFLOP/s of a bf16 product)."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    product = 2 * 8192**3 / eager_seconds(lambda: torch.mm(x, x, out=y))
    return copy_rate(x.device, repeats=1) / 1e12, product / 1e12


def cold_us(calls: list[Callable[[], None]]) -> float:
    """Microseconds a call with a cold L2, as between a model's layers, each of which streams its weights."""
    trash = torch.zeros(96 << 20, dtype=torch.uint8, device="cuda")

    def evict() -> None:
        trash.add_(1)

    calls = calls[:32]
    return 2 * graph_us([each for call in calls for each in (evict, call)]) - graph_us([evict] * len(calls))


class Inputs:
    """Device tensors of a shape: as many layers' caches as are needed to exceed the L2, blocks in random order."""

    def __init__(self, shape: AttentionShape, max_layers: int = 256) -> None:
        heads, kv_heads, dim = shape.heads
        blocks = [-(-keys // shape.block_size) for keys, _queries in shape.rows]
        self.shape, self.scale, self.max_blocks = shape, dim**-0.5, max(blocks)
        size = (sum(blocks) + 1, kv_heads, shape.block_size, dim)
        layer_bytes = 2 * size[0] * kv_heads * shape.block_size * dim * shape.cache_dtype.itemsize
        self.num_layers = min(max_layers, -(-4 * L2_BYTES // layer_bytes))
        self.tokens = sum(queries for _keys, queries in shape.rows)
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.caches = [[torch.randn(size, **make).to(shape.cache_dtype) for _ in range(2)] for _layer in range(self.num_layers)]
        self.q = torch.randn(self.tokens, heads + 2 * kv_heads, dim, **make)[:, :heads]
        self.out = torch.empty(self.tokens, heads, dim, **make)
        ids = (torch.randperm(sum(blocks)) + 1).to(torch.int32).split(blocks)
        self.table = torch.zeros(len(blocks), self.max_blocks, dtype=torch.int32)
        for row, row_ids in enumerate(ids):
            self.table[row, : len(row_ids)] = row_ids
        self.table = self.table.cuda()
        self.slots = torch.arange(len(blocks), dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, *(queries for _keys, queries in shape.rows)]).cumsum(0).to("cuda", torch.int32)
        self.seq_lens = torch.tensor([keys for keys, _queries in shape.rows], dtype=torch.int32, device="cuda")
        self.max_keys = self.max_blocks * shape.block_size

    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.q, *self.caches[layer], self.table, self.slots, self.starts, self.seq_lens, self.out


def decode_calls(
    inputs: Inputs, config: DecodeConfig | None = None, mode: int = PLAIN
) -> tuple[list[Callable[[], None]], Callable]:
    """(attention, one call a layer; schedule, which has run once)."""
    shape, rows = inputs.shape, len(inputs.shape.rows)
    queries = max(queries for _keys, queries in shape.rows)
    specialization = {"cache_dtype": shape.cache_dtype, "config": config}
    workspace = DecodeWorkspace.allocate(rows, *shape.heads, queries, "cuda", shape.dtype, **specialization)
    schedule = workspace.new_schedule(shape.window)

    def plan() -> None:
        decode_schedule(workspace, schedule, inputs.starts, inputs.seq_lens, inputs.tokens, inputs.max_keys)

    def call(layer: int) -> Callable[[], None]:
        return lambda: decode_attention(
            *inputs.tensors(layer), scale=inputs.scale, workspace=workspace, schedule=schedule, dependent_launch=mode
        )

    plan()
    return [call(layer) for layer in range(inputs.num_layers)], plan


def decode_us(inputs: Inputs, config: DecodeConfig | None = None) -> tuple[float, float]:
    """(attention, schedule) in microseconds."""
    calls, plan = decode_calls(inputs, config)
    return graph_us(calls), graph_us([plan] * 8)


def prefill_calls(
    inputs: Inputs, config: PrefillConfig | None = None, hopper: bool = True
) -> tuple[list[Callable[[], None]], Callable]:
    """(attention, one call a layer; schedule, which has run once); a configuration is for the portable kernel."""
    shape, rows = inputs.shape, len(inputs.shape.rows)
    options = {"cache_dtype": shape.cache_dtype, "config": config, "hopper": hopper and config is None}
    workspace = PrefillWorkspace.allocate(rows, inputs.tokens, *shape.heads, "cuda", shape.dtype, **options)

    def plan() -> None:
        prefill_schedule(workspace, inputs.starts, inputs.seq_lens, inputs.tokens, inputs.max_keys, window=shape.window)

    def call(layer: int) -> Callable[[], None]:
        given = {"scale": inputs.scale, "workspace": workspace, "window": shape.window, "shape": scores}
        return lambda: prefill_attention(*inputs.tensors(layer), **given)

    scores = shape.scores
    plan()
    return [call(layer) for layer in range(inputs.num_layers)], plan


def prefill_us(inputs: Inputs, config: PrefillConfig | None = None, hopper: bool = True) -> tuple[float, float]:
    """(attention, schedule) in microseconds."""
    calls, plan = prefill_calls(inputs, config, hopper)
    return graph_us(calls), graph_us([plan] * 8)


def torch_us(shape: AttentionShape, backend: SDPBackend) -> float | None:
    """torch's attention on contiguous tensors, if one call can compute the shape: rows of one length, no window."""
    keys, queries = shape.rows[0]
    if not shape.uniform or shape.window or shape.cache_dtype != shape.dtype or queries not in (1, keys):
        return None
    heads, kv_heads, dim = shape.heads
    make = {"device": "cuda", "dtype": shape.dtype}
    # One query: the group's heads are the queries, which share keys. Else: expanded heads.
    key_heads, q_shape = (kv_heads, (kv_heads, heads // kv_heads)) if queries == 1 else (heads, (heads, queries))
    layers = min(8, -(-4 * L2_BYTES // (2 * len(shape.rows) * key_heads * keys * dim * 2)))
    q = torch.randn(len(shape.rows), *q_shape, dim, **make)
    caches = [[torch.randn(len(shape.rows), key_heads, keys, dim, **make) for _ in range(2)] for _layer in range(layers)]

    def call(layer: int) -> Callable[[], torch.Tensor]:
        return lambda: scaled_dot_product_attention(q, *caches[layer], is_causal=queries > 1)

    try:
        with sdpa_kernel(backend):
            return graph_us([call(layer) for layer in range(layers)], replays=3)
    except RuntimeError:  # this backend does not support the shape
        return None


def score(shape: AttentionShape, us: float, is_decode: bool) -> float:
    """TB/s for decode, TFLOP/s for prefill."""
    heads, kv_heads, dim = shape.heads
    keys, pairs = shape.visible()
    work = 2 * keys * kv_heads * dim * shape.cache_dtype.itemsize if is_decode else 4 * pairs * heads * dim
    return work / us / 1e6


def run_configs(shapes: list[AttentionShape], is_decode: bool, roofline: float, configs: list[list[int]]) -> None:
    """Given configurations (fields of DecodeConfig or PrefillConfig) beside the kernel's own choice (-)."""
    for shape in shapes:
        inputs = Inputs(shape)
        for fields in [None, *configs]:
            config = None if fields is None else (DecodeConfig if is_decode else PrefillConfig)(*fields)
            try:
                us = decode_us(inputs, config)[0] if is_decode else prefill_us(inputs, config)[0]  # type: ignore[arg-type]
            except Exception as error:  # a config the compiler refuses: shared memory, registers
                print(f"{describe(shape)} {fields}: {type(error).__name__} {str(error)[:90]}", flush=True)
                continue
            rate = score(shape, us, is_decode)
            print(f"{describe(shape)} {us:9.1f} µs {rate:7.2f} {rate / roofline:6.1%}  {fields or '-'}", flush=True)


def run(shapes: list[AttentionShape], is_decode: bool, roofline: float) -> None:
    unit = "TB/s" if is_decode else "TFLOP/s"
    kind = "decode" if is_decode else "prefill"
    print(f"\n{kind}: µs a call, {unit}, share of {roofline:.2f} {unit}; others: µs (their time over ours)")
    for shape in shapes:
        inputs = Inputs(shape)
        if is_decode:
            us, plan_us = decode_us(inputs)
        else:
            us, plan_us = prefill_us(inputs)
        rate = score(shape, us, is_decode)
        line = f"{describe(shape)} {us:9.1f} {rate:7.2f} {rate / roofline:6.1%}  schedule {plan_us:4.1f}"
        if not is_decode:
            line += f"  portable kernel {prefill_us(inputs, hopper=False)[0]:.1f}"
        if is_decode:
            same_us = copy_us(round(rate * us * 1e6))
            line += f"  copy of as much {same_us:.1f} ({same_us / us:.1%})"
        if is_decode and len(shape.rows) <= 16:
            line += f"  cold {cold_us(decode_calls(inputs)[0]):.1f}"
            line += f"  dependent launch {graph_us(decode_calls(inputs, mode=mode_for(len(shape.rows)))[0]):.1f}"
        del inputs
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            peer = torch_us(shape, backend)
            if peer is not None:
                line += f"  {backend.name.split('_')[0].lower()} {peer:.1f} ({peer / us:.2f}x)"
        print(line, flush=True)


def decode_configs(shape: AttentionShape) -> list[DecodeConfig]:
    dim, size = shape.heads[2], shape.cache_dtype.itemsize
    configs = []
    for tile, warps, stages, programs in itertools.product((32, 64, 128), (1, 2, 4, 8), (2, 3, 4), (1, 2, 3, 4, 6)):
        in_flight = (stages - 1) * 2 * tile * dim * size
        fits = (in_flight + (8 << 10)) * programs <= SHARED_BYTES and 4 <= warps * programs <= 16
        if fits and in_flight * programs >= 64 << 10 and 8 * warps <= tile <= 32 * warps:
            configs.append(DecodeConfig(tile, warps, stages, programs))
    return configs


def prefill_configs(shape: AttentionShape) -> list[PrefillConfig]:
    dim, size = shape.heads[2], shape.cache_dtype.itemsize
    configs = []
    for rows, tile, warps, stages, programs in itertools.product(
        (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4)
    ):
        shared = (rows * 2 + stages * 2 * tile * size) * dim
        rows_a_warp = (16,) if dim > 64 else (16, 32)
        if shared * programs <= SHARED_BYTES and rows // warps in rows_a_warp and warps * programs <= 16:
            configs.append(PrefillConfig(rows, tile, warps, stages, programs))
    return configs


def compile_config(job: tuple[AttentionShape, bool, DecodeConfig | PrefillConfig]) -> None:
    shape, is_decode, config = job
    try:
        (decode_us if is_decode else prefill_us)(Inputs(replace(shape, rows=shape.rows[-1:]), 1), config)  # type: ignore[arg-type]
    except Exception as error:  # a config the compiler refuses: shared memory, registers
        print(f"{config}: {type(error).__name__} {str(error)[:90]}", flush=True)


def tune(shapes: list[AttentionShape], is_decode: bool, roofline: float, seconds: float) -> None:
    """Every feasible config on every shape of one specialization; the best five of each shape, then of all by mean share."""
    deadline = time.monotonic() + seconds
    inputs = [Inputs(shape) for shape in shapes]
    shares: dict[DecodeConfig | PrefillConfig, list[float]] = {}
    configs: list = decode_configs(shapes[0]) if is_decode else prefill_configs(shapes[0])
    print(f"\n{len(configs)} configs for {describe(shapes[0])} ...", flush=True)

    def measure(configs: list) -> None:
        for number, config in enumerate(configs):
            if time.monotonic() > deadline:
                print(f"time is up after {number} of {len(configs)}")
                return
            try:
                times = [(decode_us if is_decode else prefill_us)(each, config)[0] for each in inputs]  # type: ignore[arg-type]
            except Exception:  # compile_config has printed the reason
                continue
            shares[config] = [score(shape, us, is_decode) / roofline for shape, us in zip(shapes, times, strict=True)]

    def ranked(key: Callable[[DecodeConfig | PrefillConfig], float]) -> list:
        return sorted(shares, key=key, reverse=True)

    measure(configs)
    if is_decode:
        best = ranked(lambda c: statistics.geometric_mean(shares[c]))[:5]
        measure([structs.replace(config, whole_tiles=tiles) for config in best for tiles in (0, 2, 4, 6)])
    for number, shape in enumerate(shapes):
        print(describe(shape))
        for config in ranked(lambda c, number=number: shares[c][number])[:5]:  # type: ignore[misc]
            us = score(shape, 1, is_decode) / (shares[config][number] * roofline)
            print(f"   {shares[config][number]:6.1%} {us:9.1f} µs  {config}")
    print("all of them")
    for config in ranked(lambda c: statistics.geometric_mean(shares[c]))[:12]:
        each = " ".join(f"{share:.0%}" for share in shares[config])
        print(f"   {statistics.geometric_mean(shares[config]):6.1%}  ({each})  {config}", flush=True)


def tune_all(specializations: list[list[AttentionShape]], is_decode: bool, roofline: float, seconds: float) -> None:
    """Compile everything on all cores, into Triton's cache; then measure, one after the other."""
    begin = time.monotonic()
    configs = decode_configs if is_decode else prefill_configs
    jobs = [(s[0], is_decode, config) for s in specializations for config in configs(s[0])]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_config, jobs))
    print(f"compiled {len(jobs)} configs in {time.monotonic() - begin:.0f} s")
    for number, specialization in enumerate(specializations):
        left, others = seconds - (time.monotonic() - begin), len(specializations) - number
        # The first specialization (Llama, blocks of 64) matters most: it may take half of the time.
        tune(specialization, is_decode, roofline, left / 2 if number == 0 < others - 1 else left / others)


def by_specialization(shapes: list[AttentionShape]) -> list[list[AttentionShape]]:
    """Shapes grouped by the compiled kernel that serves them."""
    groups: dict[tuple, list[AttentionShape]] = {}
    for shape in shapes:
        queries = shape.rows[0][1] if shape.rows[0][1] <= 8 else 0
        groups.setdefault((shape.heads, shape.block_size, shape.window > 0, shape.cache_dtype, queries), []).append(shape)
    return list(groups.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=500, help="tuning stops after this")
    parser.add_argument("--specializations", type=int, default=99, help="tune only the kernel's first specializations")
    parser.add_argument("--config", action="append", help="measure this configuration, with --only; may be repeated")
    parser.add_argument("--match", default="", help="only shapes whose description contains this")
    args = parser.parse_args()
    if args.config and not args.only:
        parser.error("--config needs --only decode or --only prefill")
    torch.manual_seed(0)
    copy, product = rooflines()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy:.2f} TB/s, product {product:.0f} TFLOP/s")
    for kind, shapes, roofline in (("decode", DECODE, copy), ("prefill", PREFILL, 990.0)):
        shapes = [shape for shape in shapes if args.match in describe(shape)]
        if args.only not in (None, kind) or not shapes:
            continue
        if args.config:
            run_configs(shapes, kind == "decode", roofline, [[int(n) for n in each.split(",")] for each in args.config])
        elif args.tune:
            tune_all(by_specialization(shapes)[: args.specializations], kind == "decode", roofline, args.seconds)
        else:
            run(shapes, kind == "decode", roofline)


if __name__ == "__main__":
    main()
