"""Time of the kernels of LoRA adapters on one GPU, in CUDA graphs over rotated adapters, and the part that bytes would take.

    python benchmarks/kernels_lora.py [--model 0.6B|8B] [--rows 1,64,256] [--adapters 8] [--rank 16] [--pdl 0|1|2] [--tune]
                                      [--bandwidth 4.8]

Rows have the adapters in turn. A row of the table: kernel, layer, µs a call, the µs that its bytes alone would take, and their
quotient. `product` is the layer's without an adapter, `apart` a product behind `shrink`, `beside` one launch for both if there
is one, `beside all` also if `linear_hopper.shrinks` says no. `norm` is the norm behind o and down, `norm apart` a norm behind
`expand`, `norm term` one that adds the adapter itself. --tune times `shrink` with other chunks and the others with other blocks
of outputs. As in kernels_small.py, calls follow each other without a gap, and a layer's input and output are as warm as in a
model. Ends in one line of JSON.
"""

import argparse
import json
from collections.abc import Callable

import torch
from kernels_small import DEVICE, MODELS, Model, Table, copies, random

from quire.kernels.elementwise import norm
from quire.kernels.elementwise.norm_reference import Term
from quire.kernels.linear import linear, linear_hopper, shrinking, split_linear
from quire.kernels.lora import products, schedule, tables
from quire.kernels.lora import rows as by_row
from quire.kernels.lora.tables import LoraSchedule, LoraWeights, Shrink

CHUNKS = (256, 512)
BLOCKS = (64, 128, 256)


def pieces(m: Model) -> dict[str, tuple[list[int], int]]:
    """layer: (outputs of its pieces, inputs)"""
    heads, kv_heads = m.q_heads * m.head_dim, m.kv_heads * m.head_dim
    return {
        "qkv": ([heads, kv_heads, kv_heads], m.hidden),
        "o": ([m.hidden], heads),
        "gate_up": ([m.intermediate] * 2, m.hidden),
        "down": ([m.hidden], m.intermediate),
    }


def random_weights(slots: int, rank: int, num_inputs: int, sizes: list[int]) -> LoraWeights:
    weights = LoraWeights.allocate(slots, rank, num_inputs, sizes, torch.bfloat16, torch.device(DEVICE))
    for tensor in (weights.a, weights.b):
        tensor.normal_(std=0.01)
    weights.ranks[:-1] = rank
    weights.scales.fill_(1.0)
    return weights


def grouped(rows: int, slots: int) -> LoraSchedule:
    """The schedule of rows that have the adapters in turn."""
    into = LoraSchedule.allocate(rows, slots, torch.device(DEVICE))
    into.ids[0] = torch.arange(rows, device=DEVICE) % slots
    schedule.group(into, rows, slots)
    return into


def bench(table: Table, name: str, sizes: list[int], num_inputs: int, args: argparse.Namespace, rows: int) -> None:
    into, used = grouped(rows, args.adapters), min(rows, args.adapters)
    bytes_a, bytes_b = (used * args.rank * n * 2 for n in (num_inputs * len(sizes), sum(sizes)))
    x, y = random(rows, num_inputs), random(rows, sum(sizes))
    if name in ("o", "down") and rows <= 256:
        y = y.float()  # a partial sum
    shape = f"{name} {rows} rows, {used} adapters"

    def made() -> list[LoraWeights]:
        count = copies(bytes_a + bytes_b)
        return [random_weights(args.adapters, args.rank, num_inputs, sizes) for _ in range(min(count, 32))]

    def calls(kernel: Callable[..., object], h: torch.Tensor, weights: list[LoraWeights], *y: torch.Tensor) -> list:
        return [lambda w=w: kernel(h, *y, w, into, 0, pdl=args.pdl) for w in weights]

    weights = made()
    table.add("shrink", shape, calls(products.shrink, x, weights), bytes_a + x.nbytes)
    for chunk in CHUNKS if args.tune else ():
        before, products.CHUNK = products.CHUNK, chunk
        table.add(f"shrink chunk {chunk}", shape, calls(products.shrink, x, weights), bytes_a + x.nbytes)
        products.CHUNK = before
    h = products.shrink(x, weights[0], into, 0)
    moved = bytes_b + y.nbytes + h.nbytes
    for block in BLOCKS if args.tune else (tables.BLOCK_N,):
        if args.tune:
            tables.BLOCK_N = products.BLOCK_N = block
            products.GATED_BLOCK_N = products.LARGE_GATED_BLOCK_N = by_row.BLOCK_N = block
            weights = made()
        if name == "gate_up":
            kind, extra = "expand_gated", y.nbytes // 2
            table.add(f"{kind} {block}", shape, calls(products.expand_gated, h, weights, y), moved + extra)
        else:
            table.add(f"expand {block}", shape, calls(products.expand, h, weights, y), moved + y.nbytes)


def bench_norm(table: Table, name: str, sizes: list[int], num_inputs: int, args: argparse.Namespace, rows: int) -> None:
    """The norm behind o or down. The product has left partial sums, as it does with so many rows."""
    [width], into, used = sizes, grouped(rows, args.adapters), min(rows, args.adapters)
    shape, bytes_b = f"{name} {rows} rows, {used} adapters", used * args.rank * width * 2
    weights = [random_weights(args.adapters, args.rank, num_inputs, sizes) for _ in range(min(copies(bytes_b), 32))]
    x, residual, gain = random(rows, width), random(rows, width), random(width)
    if 1 < rows <= 304:
        x = random(2, rows, width, dtype=torch.float32)
    h, moved = torch.randn(rows, weights[0].max_rank, device=DEVICE), x.nbytes + 3 * residual.nbytes
    y = x if x.dim() == 2 else x[0]

    def norm_of(adapters: LoraWeights | None) -> object:
        term = adapters and Term(h, adapters.b, adapters.ranks, adapters.scales, into.ids[0], tables.RANK_STEP)
        return norm.add_rms_norm(x, residual, gain, 1e-6, term=term, pdl=args.pdl)

    def apart(adapters: LoraWeights) -> object:
        return products.expand(h, y, adapters, into, 0, pdl=args.pdl), norm_of(None)

    table.add("norm", shape, [lambda: norm_of(None)], moved)
    table.add("norm apart", shape, [lambda w=w: apart(w) for w in weights], moved + bytes_b)
    table.add("norm term", shape, [lambda w=w: norm_of(w) for w in weights], moved + bytes_b)


def bench_beside(table: Table, name: str, sizes: list[int], num_inputs: int, args: argparse.Namespace, rows: int) -> None:
    """The product and `shrink`, in one launch and in two."""
    into, used, x = grouped(rows, args.adapters), min(rows, args.adapters), random(rows, num_inputs)
    bytes_w, bytes_a = sum(sizes) * num_inputs * 2, used * args.rank * num_inputs * 2 * len(sizes)
    shape, count = f"{name} {rows} rows, {used} adapters", min(copies(bytes_w), 8)
    weights = [random_weights(args.adapters, args.rank, num_inputs, sizes) for _ in range(count)]
    each = [(random(sum(sizes), num_inputs), adapters) for adapters in weights]
    splits = name in ("o", "down") and split_linear.pays(x, each[0][0])

    def product(w: torch.Tensor) -> object:
        if splits:
            return split_linear.split_linear(x, w, dependents=args.pdl > 0)
        return linear.skinny_linear(x, w, pdl=args.pdl)

    def beside(w: torch.Tensor, weights: LoraWeights) -> object:
        shrink = Shrink(weights.a, weights.ranks, into.ids[0])
        if splits:
            return shrinking.shrinking_split_linear(x, w, None, shrink, dependents=args.pdl > 0)
        return shrinking.shrinking_linear(x, w, None, None, shrink, pdl=args.pdl)

    def add(kind: str, calls: list, more: int) -> None:
        table.add(kind, shape, calls, bytes_w + more + x.nbytes)

    add("product", [lambda w=w: product(w) for w, _ in each], 0)
    add("apart", [lambda w=w, a=a: (products.shrink(x, a, into, 0, pdl=args.pdl), product(w)) for w, a in each], bytes_a)
    before = linear_hopper.SHARE, linear_hopper.MAX_WASTE
    for kind, limits in (("beside", before), ("beside all", (0, 1 << 40))):
        linear_hopper.SHARE, linear_hopper.MAX_WASTE = limits
        if beside(*each[0]) is not None:
            add(kind, [lambda w=w, a=a: beside(w, a) for w, a in each], bytes_a)
    linear_hopper.SHARE, linear_hopper.MAX_WASTE = before


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8B")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pdl", type=int, choices=(0, 1, 2), default=1)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="of the GPU's memory, TB/s")
    args = parser.parse_args()
    torch.manual_seed(1)
    table = Table(args.bandwidth, torch.cuda.get_device_name())
    for rows in map(int, args.rows.split(",")):
        for name, (sizes, num_inputs) in pieces(MODELS[args.model]).items():
            bench(table, name, sizes, num_inputs, args, rows)
            bench_beside(table, name, sizes, num_inputs, args, rows)
            if name in ("o", "down"):
                bench_norm(table, name, sizes, num_inputs, args, rows)
    print(json.dumps({"device": table.device, "rows": table.rows}))
