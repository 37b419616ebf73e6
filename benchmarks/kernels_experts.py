"""A layer's experts on one GPU: time and share of the bytes' ceiling by rows, with torch's grouped product for comparison.

    python benchmarks/kernels_experts.py [--model NAME ...] [--rows N ...] [--ways NAME ...]

Ways: `router` (logits and choice), `chosen` (the tuning table's choice: alignment, both products, the sum), `pairs` (up to 16
rows), `tiles 16` to `tiles 128` (the table's configurations, whatever the rows), `torch` (two grouped products of rows that are
already in order, with SiLU between, weighted and summed). Method: a CUDA graph of several layers' calls, each with its own
weights and choice, which together exceed the L2; medians over replays. Experts are chosen evenly at random. The ceiling: bytes
of the chosen experts' weights, over the rate of a large read and write. Bias: torch's way is given sorted rows; the sorting is
not timed.
"""

import argparse
import json
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ceilings import copy_rate
from kernels_attention import graph_us
from workload import Mixture

from quire.kernels.experts import experts, pairs, routing
from quire.kernels.experts.experts_reference import SwiGLU, Weights
from quire.kernels.experts.routing_reference import Routing
from quire.kernels.triton_support.dependent_launch import mode_for
from quire.kernels.tuning.configs import PairConfig, TilesConfig
from quire.kernels.tuning.current import current

MODELS = {
    "Qwen3-30B-A3B": Mixture(2048, 768, 128, 8),
    "gpt-oss-20b": Mixture(2880, 2880, 32, 4),
    "DeepSeek-V2-Lite": Mixture(2048, 1408, 64, 6),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
LAYERS = 4


class Layer(NamedTuple):
    weights: Weights
    router: torch.Tensor
    ids: torch.Tensor
    scale: torch.Tensor


def make_weights(m: Mixture) -> Weights:
    make = {"device": "cuda", "dtype": torch.bfloat16}
    gate_up = torch.empty(m.experts, 2 * m.intermediate, m.hidden, **make).normal_(0, m.hidden**-0.5)
    return Weights(gate_up, torch.empty(m.experts, m.hidden, m.intermediate, **make).normal_(0, m.intermediate**-0.5))


def choose_ids(m: Mixture, rows: int) -> torch.Tensor:
    return torch.rand(rows, m.experts, device="cuda").topk(m.top_k, 1).indices.int()


def ways(m: Mixture, rows: int, layers: list[Layer]) -> dict[str, list[Callable[[], object]]]:
    """Lists of calls, one a layer, by name."""
    x, pdl, tuning = torch.randn(rows, m.hidden, device="cuda", dtype=torch.bfloat16), mode_for(rows), current().experts
    routed = Routing(num_experts=m.experts, top_k=m.top_k, is_normalized=True)

    def router(layer: Layer) -> Callable[[], object]:
        return lambda: routing.route(routing.router_logits(x, layer.router, pdl=pdl), routed, pdl=pdl)

    def ours(layer: Layer, config: PairConfig | TilesConfig | None) -> Callable[[], object]:
        return lambda: experts.experts(x, layer.weights, layer.ids, layer.scale, SwiGLU(), config=config, pdl=pdl)

    configs: dict[str, PairConfig | TilesConfig | None] = {"chosen": None}
    if rows <= pairs.MAX_ROWS:
        configs["pairs"] = tuning.pair
    configs |= {f"tiles {config.rows}": config for _, config in tuning.tiles}
    found = {name: [ours(layer, config) for layer in layers] for name, config in configs.items()}
    found = {"router": [router(layer) for layer in layers], **found}
    if hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm"):
        found["torch"] = [by_torch(x, layer, m) for layer in layers]
    return found


def by_torch(x: torch.Tensor, layer: Layer, m: Mixture) -> Callable[[], object]:
    """torch's grouped products; the rows are put in the order of experts beforehand."""
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    flat = layer.ids.flatten().long()
    order = flat.sort(stable=True).indices
    ends = flat.bincount(minlength=m.experts).cumsum(0).int()
    rows, back = x[order // m.top_k], order.argsort()
    gate_up, down = layer.weights.gate_up.transpose(1, 2), layer.weights.down.transpose(1, 2)

    def call() -> torch.Tensor:
        gate, up = grouped_mm(rows, gate_up, offs=ends).chunk(2, -1)
        y = grouped_mm(F.silu(gate) * up, down, offs=ends)[back].view(len(x), m.top_k, -1)
        return (y * layer.scale[:, :, None]).sum(1)

    return call


def measure(name: str, rows: int, layers: list[Layer], only: list[str] | None, rate: float) -> None:
    m = MODELS[name]
    chosen = sum(len(layer.ids.unique()) for layer in layers) / len(layers)
    num_bytes, flops = chosen * 3 * m.hidden * m.intermediate * 2, 6 * rows * m.top_k * m.hidden * m.intermediate
    ceiling = max(num_bytes / rate, flops / 800e12) * 1e6
    for way, calls in ways(m, rows, layers).items():
        if only and way not in only:
            continue
        try:
            us = graph_us(calls * (4 if rows <= 256 else 1))
        except RuntimeError as error:  # for a shape that torch's product does not support
            print(f"{name:18} {rows:5} rows  {way:10} {str(error).splitlines()[0][:80]}", flush=True)
            continue
        share = "" if way == "router" else f"{ceiling / us:6.1%} of {ceiling:.1f}"
        print(f"{name:18} {rows:5} rows  {way:10} {us:9.1f} us  {share}", flush=True)
        print(json.dumps({"model": name, "rows": rows, "way": way, "us": round(us, 2), "ceiling_us": round(ceiling, 2)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--ways", nargs="+")
    args = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate(torch.device("cuda"), repeats=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {rate / 1e12:.2f} TB/s", flush=True)
    with torch.inference_mode():
        for name in args.model:
            m = MODELS[name]
            weights = [make_weights(m) for _ in range(LAYERS)]
            routers = [torch.randn(m.experts, m.hidden, device="cuda", dtype=torch.bfloat16) for _ in weights]
            for rows in args.rows:
                ids = [choose_ids(m, rows) for _ in weights]
                scale = torch.rand(rows, m.top_k, device="cuda")
                layers = [Layer(w, router, some, scale) for w, router, some in zip(weights, routers, ids, strict=True)]
                measure(name, rows, layers, args.ways, rate)


if __name__ == "__main__":
    main()
