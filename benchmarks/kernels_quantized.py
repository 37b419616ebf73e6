"""Products with quantized weights on one GPU: time, share of the roofline, and cuBLAS on bfloat16 weights for comparison.

    python benchmarks/kernels_quantized.py [--model 0.6B|8B] [--only int4,fp8,fp8_block,int8,w8a16,quantize]
                                           [--rows 1,16,64,256,2048] [--pdl 0|1|2] [--sweep]
                                           [--bandwidth 4.28] [--bf16 790] [--fp8 1200]

A row of the table: kernel, shape, µs a call, µs of the roofline (the larger of bytes and operations), their quotient, cuBLAS's
µs with the dense weight. Weights rotate through at least 256 MB; x is as warm as in a model. For fp8 and int8, activations are
quantized to 8 bits before the clock starts; `quantize` times the kernels that do it, beside the bf16 kernels in their place. o
and down have a second row, for the split-K partial sums that the next norm adds up (if they are faster). --sweep tries
configurations of every kernel of ours and prints the best three, as for a tuning table.
Biases: kernels follow each other without a gap, each a copy of the last. Ends in one line of JSON.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernels_small import DEVICE, MODELS, Model, copies, measure, ranked

from quire.kernels.elementwise import activation, norm
from quire.kernels.linear import int4, int8, quantize, scaled, w8a16
from quire.kernels.linear.fp8 import fp8_linear, fp8_linear_split_k
from quire.kernels.linear.int4_weight import Int4Weight, pack
from quire.kernels.linear.scaled import Scaled
from quire.kernels.linear.w8a16_weight import Weight8
from quire.kernels.triton_support import hopper

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GROUP = 128
MAX_SWEPT_ROWS = 512
Call = Callable[[], object]
BEFORE_A_NORM = ("o", "down")
IN_PARTS: dict[str, Callable[..., object]] = {
    "int4": int4.int4_linear_split_k,
    "w8a16": w8a16.w8a16_linear_split_k,
    "fp8": fp8_linear_split_k,
    "fp8_block": fp8_linear_split_k,
    "int8": int8.int8_linear_split_k,
}


class Table:
    def __init__(self, args: argparse.Namespace):
        self.args, self.rows = args, []

    def add(
        self, kernel: str, name: str, m: int, n: int, k: int, micros: float, weight_bytes: float, rate: float, beside: float
    ):
        """Print a row: rate is in TFLOP/s; bytes of x and y are counted as 16 bits."""
        by_bytes = (weight_bytes + 2 * m * (n + k)) / self.args.bandwidth * 1e-6
        least = max(by_bytes, 2.0 * m * n * k / rate * 1e-6)
        print(
            f"{kernel:10} {name:8} {m:5} x {n:6} x {k:6} {micros:9.2f} µs  roofline {least:9.2f}  {least / micros:6.1%}"
            f"  cuBLAS bf16 {beside:9.2f}  {beside / micros:5.2f} x",
            flush=True,
        )
        row = {"kernel": kernel, "layer": name, "rows": m, "us": round(micros, 3), "share": round(least / micros, 4)}
        self.rows.append({**row, "cublas_bf16_us": round(beside, 3)})


def int4_weights(n: int, k: int) -> list[Int4Weight]:
    def one() -> Int4Weight:
        q = torch.randint(0, 16, (n, k), device=DEVICE, dtype=torch.uint8)
        return pack(q, None, torch.rand(n, -(-k // GROUP), device=DEVICE).to(BF16), GROUP)

    return [one() for _ in range(copies(n * k // 2))]


def int8_weights(n: int, k: int) -> list[Weight8]:
    def one() -> Weight8:
        return Weight8(bytes_of(n, k, torch.int8), torch.rand(n, 1, device=DEVICE), None, k)

    return [one() for _ in range(copies(n * k))]


def scaled_operands(rows: int, n: int, k: int, dtype: torch.dtype, by_block: bool) -> tuple[Scaled, list[Scaled]]:
    shape = (-(-n // 128), -(-k // 128)) if by_block else (n, 1)

    def one() -> Scaled:
        return Scaled(bytes_of(n, k, dtype), torch.rand(shape, device=DEVICE), 128 if by_block else 1)

    x = quantize.quantize(torch.randn(rows, k, device=DEVICE, dtype=BF16), dtype, by_block=by_block)
    return x, [one() for _ in range(copies(n * k))]


def bytes_of(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (n, k), device=DEVICE, dtype=dtype)
    return torch.randn(n, k, device=DEVICE, dtype=BF16).to(dtype)


def dense_micros(rows: int, n: int, k: int) -> float:
    """Microseconds of cuBLAS in bfloat16."""
    x = torch.randn(rows, k, device=DEVICE, dtype=BF16)
    weights = [torch.randn(n, k, device=DEVICE, dtype=BF16) for _ in range(copies(2 * n * k))]
    return measure([functools.partial(F.linear, x, w) for w in weights])


def bench_layer(table: Table, kind: str, name: str, rows: int, n: int, k: int, beside: float) -> None:
    args, is_gated = table.args, name == "gate_up"
    if kind in ("int4", "w8a16"):
        x = torch.randn(rows, k, device=DEVICE, dtype=BF16)
        weights: list[Any] = int4_weights(n, k) if kind == "int4" else int8_weights(n, k)
        run = int4.int4_linear if kind == "int4" else w8a16.w8a16_linear
        how = {"pdl": args.pdl} | ({"is_gated": True} if is_gated else {})
        calls = [functools.partial(run, x, w, **how) for w in weights]
        size, rate = (n * k / 2 + 2 * n * k / GROUP, args.bf16) if kind == "int4" else (n * k, args.bf16)
        sweep = functools.partial(sweep_16, kind, x, weights, n // 2 if is_gated else n, is_gated)
    else:
        dtype = torch.int8 if kind == "int8" else E4M3
        x8, weights = scaled_operands(rows, n, k, dtype, kind == "fp8_block")
        run8 = int8.int8_linear if kind == "int8" else fp8_linear
        how = {"pdl": args.pdl, "dtype": BF16} | ({"is_gated": True} if is_gated else {})
        calls = [functools.partial(run8, x8, w, **how) for w in weights]
        size, rate = n * k, args.fp8
        sweep = functools.partial(sweep_8, x8, weights, n // 2 if is_gated else n, is_gated)
    table.add(kind, name, rows, n, k, measure(calls), size, rate, beside)
    if name in BEFORE_A_NORM:
        parts = [functools.partial(IN_PARTS[kind], *call.args, **call.keywords) for call in calls]
        table.add(f"{kind}+", name, rows, n, k, measure(parts), size, rate, beside)
    is_few = kind == "w8a16" or (kind == "int4" and not hopper.available(torch.device(DEVICE, 0)))
    if args.sweep and rows <= (hopper.MAX_ROWS if is_few else MAX_SWEPT_ROWS):
        for micros, config in sweep()[:3]:
            print(f"    {micros:9.2f} µs  {config}")


def possible(launch: Callable[..., None], configs: list[Any]) -> set[Any]:
    """Configurations that compile and fit into shared memory and registers."""
    found = set()
    for config in configs:
        try:
            launch(config)
        except (RuntimeError, ValueError) as error:
            print(f"    {config}: {type(error).__name__}")
            continue
        found.add(config)
    return found


def sweep_16(kind: str, x: torch.Tensor, weights: list[Any], n: int, is_gated: bool) -> list[tuple[float, Any]]:
    out = x.new_empty(len(x), n)
    if hopper.available(x.device):
        configs: list[Any] = int4_hopper_configs(len(x), x.shape[1]) if kind == "int4" else w8a16_hopper_configs(len(x))
    elif kind == "int4" and len(x) == 1:
        configs = [int4.Config(*c) for c in itertools.product((1, 2, 4, 8), (128, 256, 512), (1, 2, 4))]
    elif kind == "int4":
        configs = [int4.Config(b, 16, w, s) for b, w, s in itertools.product((16, 32, 64, 128), (2, 4, 8), (3, 5, 7))]
    else:
        configs = [scaled.Config(16, b, w, s) for b, w, s in itertools.product((16, 32, 64, 128), (4, 8), (3, 5))]
    launch: Callable[..., None] = int4.launch if kind == "int4" else w8a16.launch
    if kind == "int4" and hopper.available(x.device):
        launch = launch_int4_hopper
    elif hopper.available(x.device):
        from quire.kernels.linear import w8a16_hopper

        launch = w8a16_hopper.launch

    def calls(config: Any) -> list[Call]:
        return [functools.partial(launch, x, w, None, out, config, is_gated=is_gated) for w in weights]

    return ranked(calls, possible(lambda config: calls(config)[0](), configs))


def int4_hopper_configs(rows: int, k: int) -> list[Any]:
    """Configurations with rings as deep as fit."""
    from quire.kernels.linear import int4_hopper, int4_wide

    sms = hopper.num_sms(DEVICE)
    configs = [] if rows < hopper.MAX_ROWS else int4_wide.configs(rows, k, sms, split_k=False)
    for warps, blocks, sharing in itertools.product((4, 8), (1, 2, 4), (1, 2, 3, 4) if rows <= hopper.MAX_ROWS else ()):
        stage = (16 * warps * 64 + int4_hopper.block_rows(rows) * 256) * blocks
        stages = min(int4_hopper.SHARED_BYTES // sharing // stage, int4_hopper.MAX_STAGES)
        if stages >= 2:
            configs.append(int4_hopper.Config(warps, blocks, stages, sms * sharing))
    return configs


def w8a16_hopper_configs(rows: int) -> list[Any]:
    """As `int4_hopper_configs`, for w8a16."""
    from quire.kernels.linear import w8a16_hopper

    configs = []
    for warps, blocks, sharing in itertools.product((4, 8), (1, 2), (1, 2, 3)):
        stages = w8a16_hopper.max_stages(rows, warps, blocks, sharing)
        if stages >= 2:
            configs.append(w8a16_hopper.Config(warps, blocks, stages, hopper.num_sms(DEVICE) * sharing))
    return configs


def launch_int4_hopper(x: torch.Tensor, weight: Any, bias: None, out: torch.Tensor, config: Any, **options: Any) -> None:
    """Launch the kernel that the configuration belongs to."""
    from quire.kernels.linear import int4_hopper, int4_wide

    kernel = int4_wide if isinstance(config, int4_wide.Config) else int4_hopper
    kernel.launch(x, weight, bias, out, config, **options)


def sweep_8(x: Scaled, weights: list[Scaled], n: int, is_gated: bool) -> list[tuple[float, Any]]:
    rows = len(x.data)
    out = torch.empty(rows, n, device=DEVICE, dtype=BF16)
    launches: dict[Any, Callable[..., None]] = {}
    for m, block, warps, stages in itertools.product((16, 32, 64, 128), (32, 64, 128), (4, 8), (3, 4, 5)):
        if m <= max(16, hopper.block_rows(rows)):
            launches[scaled.Config(m, block, warps, stages)] = scaled.launch
    if rows <= hopper.MAX_ROWS and hopper.available(x.data.device):
        from quire.kernels.linear import scaled_hopper

        for tile, blocks, sharing in itertools.product((16, 32, 64, 128), (1, 2, 4), (1, 2, 3)):
            stages = scaled_hopper.max_stages(rows, tile, blocks, sharing)
            if stages >= 2:
                ring = scaled_hopper.Config(tile, blocks, stages, hopper.num_sms(x.data.device) * sharing)
                launches[ring] = scaled_hopper.launch

    elif hopper.available(x.data.device):
        from quire.kernels.linear import scaled_wide

        sms, by_block = hopper.num_sms(x.data.device), weights[0].scales.shape[1] > 1
        wide = scaled_wide.configs(scaled_wide.bucket(rows), x.data.shape[1], sms, split_k=False, by_block=by_block)
        launches.update(dict.fromkeys(wide, scaled_wide.launch))

    def calls(config: Any) -> list[Call]:
        return [functools.partial(launches[config], x, w, None, out, config, is_gated=is_gated) for w in weights]

    return ranked(calls, possible(lambda config: calls(config)[0](), list(launches)))


def bench_quantize(m: Model, rows: int, pdl: int) -> None:
    """Quantizing kernels, beside those that write 16 bits."""
    x, residual = (torch.randn(rows, m.hidden, device=DEVICE, dtype=BF16) for _ in range(2))
    weight = torch.ones(m.hidden, device=DEVICE, dtype=BF16)
    gate_up = torch.randn(rows, 2 * m.intermediate, device=DEVICE, dtype=BF16)
    plain = measure([functools.partial(norm.add_rms_norm, x, residual, weight, 1e-5, pdl=pdl)])
    silu = measure([functools.partial(activation.silu_mul, gate_up, pdl=pdl)])
    for dtype, by_block in ((E4M3, False), (E4M3, True), (torch.int8, False)):
        options = {"by_block": by_block, "pdl": pdl}
        ours = measure([functools.partial(quantize.rms_norm_quantize, x, residual, weight, 1e-5, dtype, **options)])
        both = measure([functools.partial(quantize.silu_mul_quantize, gate_up, dtype, **options)])
        alone = measure([functools.partial(quantize.quantize, x, dtype, **options)])
        label = f"{str(dtype)[6:]} {'block' if by_block else 'token'}"
        print(
            f"quantize {rows:5} {label:20} norm {ours:7.2f} ({plain:.2f})  silu {both:7.2f} ({silu:.2f})  alone {alone:7.2f} µs"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--only", default="int4,fp8,fp8_block,int8,w8a16,quantize")
    parser.add_argument("--rows", default="1,16,64,256,2048")
    parser.add_argument("--pdl", type=int, choices=(0, 1, 2), default=0, help="mode of triton_support/dependent_launch.py")
    parser.add_argument("--sweep", action="store_true", help="try configurations of our kernels")
    parser.add_argument("--bandwidth", type=float, default=4.28, help="of the memory, in TB/s")
    parser.add_argument("--bf16", type=float, default=790, help="TFLOP/s of dense products")
    parser.add_argument("--fp8", type=float, default=1200, help="TFLOP/s of 8-bit ones")
    args = parser.parse_args()
    torch.manual_seed(0)
    table, only = Table(args), args.only.split(",")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.bandwidth} TB/s")
    for model, rows in itertools.product(args.model or MODELS, map(int, args.rows.split(","))):
        m = MODELS[model]
        print(f"\n{model}, {rows} rows")
        if "quantize" in only:
            bench_quantize(m, rows, args.pdl)
        for name, (n, k) in m.linears.items():
            kinds = [kind for kind in only if kind != "quantize"] if name != "head" else []  # the head stays bf16
            beside = dense_micros(rows, n, k) if kinds else 0.0
            for kind in kinds:
                bench_layer(table, kind, name, rows, n, k, beside)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": table.rows}))


if __name__ == "__main__":
    main()
