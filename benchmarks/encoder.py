"""Encoders of images: 16 images encoded as a server does it, beside cuBLAS products and cuDNN attention of the same shapes.

    python benchmarks/encoder.py                              # Qwen3-VL-8B's and Qwen2.5-VL-7B's encoders, 16 of 1024 x 1024
    python benchmarks/encoder.py Qwen3-VL-2B --images 1 --side 512
    python benchmarks/encoder.py --tiny --side 64 --images 2  # on a CPU: it says nothing about speed

*ours*: `ModelItems.encode` of images that have arrived: copies, rescaling, the encoder, its merger. *ceiling*: each product of
the encoder as one `torch.nn.functional.linear` (cuBLAS), and each attention as one `scaled_dot_product_attention` over images
or windows of one size (cuDNN's or flash, the faster one), one after the other in one captured graph, without norms,
activations, rotations and sums: what they cost is part of the ratio. Weights are random. *processor*: milliseconds of one CPU
core to decode and preprocess one such image, a JPEG. Bias: all images have one size, so the packed rows are alike.

Prints a line a model, and ends in one line `RESULT {json}`. Needs a GPU, but for `--tiny`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import media_shapes
import numpy as np
import torch
import torch.nn.functional as F
from images_http import photo
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.frontend.media.images import decode
from quire.frontend.media.processing import Processor
from quire.ipc.messages.media import MediaItem, MediaTensor
from quire.workers.layers.linear import Placement
from quire.workers.loading.weights import weight_owners
from quire.workers.models.media.arriving import Arriving
from quire.workers.models.media.model_items import ModelItems
from quire.workers.models.media.spec import SEES, MediaSpec
from quire.workers.models.transformers.tower import Tower
from quire.workers.parallel import Parallel

Sizes = tuple[int, int, int]
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


def items_of(config: dict[str, Any], device: torch.device, dtype: torch.dtype, tokens: int) -> ModelItems:
    """The encoder of a config with random weights, as a worker holds it. tokens: of one run."""
    sees = SEES[config["architectures"][0]]
    spec = MediaSpec(kinds=("image",), config=json.dumps(config), modules=sees.modules)
    generator = torch.Generator(device)
    with torch.inference_mode(), torch.device(device):
        tower = Tower(spec, Placement(dtype, Parallel(device=device)))
        for _, owner in weight_owners(tower):  # type: ignore[arg-type]
            owner.fill_dummy(0.03, generator)
            owner.finish()
    items = ModelItems(tower, spec, config["vision_config"]["out_hidden_size"], dtype, device)
    items.num_rows = 2 * tokens
    return items


def arrived(folder: Path, count: int, side: int, is_pinned: bool) -> tuple[list[Arriving], float]:
    """Images as their bytes arrive at a worker, and milliseconds of the processor for one."""
    processor, rng, found, took = Processor(folder, {}), np.random.default_rng(0), [], []
    for number in range(count):
        data = photo(rng, side)
        began = time.perf_counter()
        made = processor(decode(data))
        took.append(1e3 * (time.perf_counter() - began))
        tensors = [MediaTensor(name, str(x.dtype), list(x.shape)) for name, x in made.tensors.items()]  # type: ignore[arg-type]
        item = MediaItem("image", bytes(32), [(0, made.num_tokens)], tensors, made.positions, made.advance, made.rescale)
        one = Arriving(number, item, is_pinned)
        raw = b"".join(np.ascontiguousarray(x).tobytes() for x in made.tensors.values())
        one.data.numpy()[:] = np.frombuffer(raw, np.uint8)
        one.missing = 0
        found.append(one)
    return found, statistics.median(took)


def products(
    config: dict[str, Any], images: int, patches: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """The encoder's products (rows, in, out) and attentions (rows, tokens a row, layers). patches: of an image."""
    vision = config["vision_config"]
    h, inner, depth = vision["hidden_size"], vision["intermediate_size"], vision["depth"]
    total, merge = images * patches, vision["spatial_merge_size"] ** 2
    pixels = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    gated = config["model_type"] == "qwen2_5_vl"
    layer = [(total, h, 3 * h), (total, h, h), (total, h, (2 if gated else 1) * inner), (total, inner, h)]
    merger = [(total // merge, merge * h, merge * h), (total // merge, merge * h, vision["out_hidden_size"])]
    mergers = 1 + len(vision.get("deepstack_visual_indexes", ()))
    full = len(vision["fullatt_block_indexes"]) if gated else depth
    attentions = [(images, patches, full)]
    if gated:
        window = min((vision["window_size"] // vision["patch_size"]) ** 2, total)
        attentions.append((total // window, window, depth - full))
    return [(total, pixels, h), *layer * depth, *merger * mergers], attentions


def ceiling(config: dict[str, Any], images: int, patches: int, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Milliseconds of all products and attentions, the latter by the fastest backend."""
    vision = config["vision_config"]
    gemms, attentions = products(config, images, patches)
    heads, dim = vision["num_heads"], vision["hidden_size"] // vision["num_heads"]
    made = {(rows, k): torch.randn(rows, k, device=device, dtype=dtype) for rows, k, _ in gemms}
    weights = [torch.randn(n, k, device=device, dtype=dtype) * 0.02 for _, k, n in gemms]
    bias = {n: torch.zeros(n, device=device, dtype=dtype) for *_, n in gemms}

    def multiply() -> None:
        for (rows, k, n), weight in zip(gemms, weights, strict=True):
            F.linear(made[rows, k], weight, bias[n])

    took = best_ms(multiply, device, repeats)
    for rows, tokens, layers in attentions:
        qkv = torch.randn(rows, tokens, 3, heads, dim, device=device, dtype=dtype).permute(2, 0, 3, 1, 4)
        found = []
        for backend in BACKENDS if device.type == "cuda" else (SDPBackend.MATH,):
            try:
                found.append(best_ms(attending(backend, qkv, layers), device, repeats))
            except RuntimeError:
                continue  # the backend does not take this shape
        took += min(found)
    return took


def attending(backend: SDPBackend, qkv: torch.Tensor, layers: int) -> Callable[[], None]:
    def run() -> None:
        with sdpa_kernel(backend):
            for _ in range(layers):
                F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])

    return run


def best_ms(run: Callable[[], Any], device: torch.device, repeats: int, captured: bool = True) -> float:
    """The median of some runs, on a GPU as a captured graph if it is to be one."""
    for _ in range(2):
        run()
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@torch.inference_mode()
def measure(name: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    config = media_shapes.tiny(media_shapes.SHAPES[name]) if args.tiny else media_shapes.SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        media_shapes.write(Path(folder), config, "")
        images, processor_ms = arrived(Path(folder), args.images, args.side, device.type == "cuda")
    tokens = images[0].item.num_tokens
    patches = tokens * config["vision_config"]["spatial_merge_size"] ** 2
    items = items_of(config, device, dtype, args.images * tokens)
    batches = [images] if not args.one_by_one else [[image] for image in images]

    def encode() -> None:
        for batch in batches:
            items.encode(batch)

    ours = best_ms(encode, device, args.repeats, captured=False)
    best = ceiling(config, args.images, patches, device, dtype, args.repeats)
    sizes = {"images": args.images, "side": args.side, "tokens": tokens, "patches": args.images * patches}
    return {**sizes, "ours_ms": ours, "ceiling_ms": best, "over_ceiling": ours / best, "processor_ms": processor_ms}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(media_shapes.SHAPES)}")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--one-by-one", action="store_true", help="a run for each image, instead of one for all")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small layers")
    args = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results = {}
    for name in args.names or ("Qwen3-VL-8B", "Qwen2.5-VL-7B"):
        results[name] = found = measure(name, args, device, dtype)
        shown = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items())
        print(f"{name:14}", "  ".join(shown), flush=True)
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
