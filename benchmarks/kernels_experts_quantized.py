"""A layer's quantized experts on one GPU: time and share of the bytes' ceiling by rows, beside 16-bit experts and torch's.

    python benchmarks/kernels_experts_quantized.py [--model NAME ...] [--form NAME ...] [--rows N ...]

Forms: `mxfp4`, `int4` (groups of 128), `fp8` (a scale a row and a token), `fp8-block` (128 by 128 and 128 of a token). Ways:
`chosen` (the tuning table's choice: alignment, inputs in 8 bits, both products, the sum), `pairs` (up to 16 rows), `bf16` (our
kernels on 16-bit weights of the same sizes) and `torch` (its grouped products on them, rows sorted beforehand). Method and
bias: kernels_experts.py. The ceiling: bytes of the chosen experts in their form over the rate of a large read and write.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from ceilings import copy_rate
from kernels_attention import graph_us
from kernels_experts import LAYERS, MODELS, Layer, by_torch, choose_ids, make_weights
from workload import Mixture

from quire.kernels.experts import experts, four_bits_pairs, pairs, scaled
from quire.kernels.experts.experts_reference import SwiGLU
from quire.kernels.experts.four_bits_weight import FourBits, FourBitWeights, new_int, new_mx
from quire.kernels.experts.scaled_weight import BLOCK, ScaledExperts, ScaledWeights
from quire.kernels.triton_support.dependent_launch import mode_for

ROWS = (1, 2, 4, 16, 64, 256, 2048)
BYTES = {"mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 128, "fp8": 1.0, "fp8-block": 1.0 + 4 / 128}
GPT_OSS = SwiGLU(limit=7.0, alpha=1.702, offset=1.0)
SCALE = 246  # mxfp4's scales, so that results stay small


def four_bits_of(m: Mixture, form: str) -> FourBitWeights:
    def make(n: int, k: int) -> FourBits:
        if form == "mxfp4":
            weight = new_mx(m.experts, n, k, "cuda")
            weight.scales.fill_(SCALE * 0x01010101 - (1 << 32))
            assert weight.factors is not None
            weight.factors.fill_(1.0)
        else:
            weight = new_int(m.experts, n, k, 128, torch.bfloat16, "cuda")._replace(zeros=None)
            weight.scales.fill_(0.004)
        weight.words.random_(-(2**31), 2**31 - 1)
        return weight

    return FourBitWeights(make(2 * m.intermediate, m.hidden), make(m.hidden, m.intermediate))


def scaled_of(m: Mixture, form: str) -> ScaledWeights:
    def make(n: int, k: int) -> ScaledExperts:
        data = torch.empty(m.experts, n, k, dtype=torch.float8_e4m3fn, device="cuda")
        for expert in data:
            expert.copy_(torch.randn(n, k, device="cuda") * 100)
        blocks = -(-k // BLOCK) if form == "fp8-block" else 1
        return ScaledExperts(data, torch.full((m.experts, blocks, n), 2e-4, device="cuda"), form == "fp8-block")

    return ScaledWeights(make(2 * m.intermediate, m.hidden), make(m.hidden, m.intermediate))


def calls_of(weights: list[Any], layers: list[Layer], x: torch.Tensor, act: SwiGLU, config: Any) -> list[Callable[[], object]]:
    def call(w: Any, layer: Layer) -> Callable[[], object]:
        return lambda: experts.experts(x, w, layer.ids, layer.scale, act, config=config, pdl=mode_for(len(x)))

    return [call(w, layer) for w, layer in zip(weights, layers, strict=True)]


def measure(name: str, form: str, rows: int, weights: list[Any], layers: list[Layer], rate: float) -> None:
    m, act = MODELS[name], GPT_OSS if name.startswith("gpt-oss") else SwiGLU()
    x = torch.randn(rows, m.hidden, device="cuda", dtype=torch.bfloat16)
    layers = [layer._replace(ids=choose_ids(m, rows), scale=torch.rand(rows, m.top_k, device="cuda")) for layer in layers]
    ways = {"chosen": calls_of(weights, layers, x, act, None)}
    if rows <= pairs.MAX_ROWS:
        ways["pairs"] = calls_of(weights, layers, x, act, scaled.PAIRS if form.startswith("fp8") else four_bits_pairs.PAIRS)
    ways |= {"bf16": calls_of([layer.weights for layer in layers], layers, x, act, None)}
    ways |= {"torch": [by_torch(x, layer, m) for layer in layers]}
    chosen = sum(len(layer.ids.unique()) for layer in layers) / len(layers)
    num_bytes, flops = chosen * 3 * m.hidden * m.intermediate * BYTES[form], 6 * rows * m.top_k * m.hidden * m.intermediate
    ceiling = max(num_bytes / rate, flops / 800e12) * 1e6
    for way, calls in ways.items():
        us = graph_us(calls * (4 if rows <= 256 else 1))
        print(f"{name:18} {form:10} {rows:5} rows  {way:7} {us:9.1f} us  {ceiling / us:6.1%} of {ceiling:.1f}", flush=True)
        row = {"model": name, "form": form, "rows": rows, "way": way, "us": round(us, 2), "ceiling_us": round(ceiling, 2)}
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["gpt-oss-20b", "Qwen3-30B-A3B"])
    parser.add_argument("--form", nargs="+", choices=BYTES, default=list(BYTES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    args = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate(torch.device("cuda"), repeats=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {rate / 1e12:.2f} TB/s", flush=True)
    with torch.inference_mode():
        for name in args.model:
            m = MODELS[name]
            none = torch.empty(0, device="cuda")
            layers = [Layer(make_weights(m), none, none, none) for _ in range(LAYERS)]
            for form in args.form:
                make = scaled_of if form.startswith("fp8") else four_bits_of
                weights = [make(m, form) for _ in range(LAYERS)]
                for rows in args.rows:
                    measure(name, form, rows, weights, layers, rate)


if __name__ == "__main__":
    main()
