"""Times of the kernels of recurrent layers for decode rows, beside what their bytes alone would take; needs a GPU.

    python benchmarks/kernels_recurrent.py [--rows 1,64,256] [--window 4] [--copy 4.28] [--tune]

The sizes are those of Qwen3.5-9B and Nemotron-H-8B. Each time is the mean over a CUDA graph of as many layers as the models
have, each with states of its own, so that a step of few rows finds none of them in L2. The ceiling counts a read and a write of
each state at --copy TB/s, the rate of a copy on this GPU. "windows": rows have --window tokens each, and apply half as many
that an earlier step has kept. --tune tries other shapes of programs. Ends in one line of JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from ceilings import replay_seconds

from quire.kernels.recurrent import convolution, delta, mamba
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights
from quire.kernels.recurrent.rows import Rows, Windows
from quire.kernels.triton_support.dependent_launch import late

DTYPE = torch.bfloat16
DELTA, MAMBA, LAYERS = DeltaHeads(16, 32, 128, 128), MambaHeads(8, 128, 128, 64), 24
WINDOW = 4
BLOCKS = ((128, 8), (128, 16), (64, 8), (64, 4), (32, 8), (32, 4), (32, 2), (16, 4), (16, 2))  # columns and warps to try


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def decode_rows(count: int) -> Rows:
    """Rows of one token each; row i has state i + 1."""
    ids = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    limit = torch.full((1,), count, dtype=torch.int32, device="cuda")
    return Rows(ids, ids[1:].contiguous(), ids[1:], ids[:-1] * 0, limit, ids[:-1].contiguous(), count)


def window_rows(count: int, window: int, sizes: list[int]) -> Rows:
    """Rows of `window` tokens each, that apply window // 2 kept ones; row i has slot i and state i + 1. sizes: of what a layer
    keeps of a token."""
    tokens, applied = count * window, window // 2
    ids, starts = ints(range(count + 1)), ints(range(0, tokens + 1, window))
    slots = ids[:-1].contiguous()
    num_kept, seq_len = slots * 0 + applied, slots * 0 + 100
    kept = tuple(random(2 * tokens, size) for size in sizes)
    windows = Windows(slots, num_kept, slots * window, seq_len, slots * 0, slots * 0 - 1, ints([tokens]), kept)
    return Rows(starts, ids[1:].contiguous(), ids[1:], ids[:-1] * 0, ints([count]), ints(range(tokens)), count, windows)


def ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


Case = tuple[Callable[[], object], int]  # a call of all layers, and the bytes that it must read and write


def of_delta(count: int, window: int = 0) -> tuple[Callable[[delta.Config | None], object], int]:
    """window: tokens of each row; 0: one, without windows."""
    h = DELTA
    kept = [h.channels, h.channels, h.num_values + h.num_decays]
    rows = window_rows(count, window, kept) if window else decode_rows(count)
    joined = random(len(rows.positions), h.channels + h.value_size + 2 * h.num_values)
    inputs = DeltaInputs(*joined.split([h.channels, h.value_size, h.num_values, h.num_values], 1))
    heads = random(h.num_values, dtype=torch.float32)
    weights = DeltaWeights(heads, heads, random(h.value_dim), 1e-6)
    states = [torch.zeros(count + 1, h.num_values, h.key_dim, h.value_dim, device="cuda") for _ in range(LAYERS)]

    def run(config: delta.Config | None) -> None:
        for state in states:
            delta.gated_delta(inputs, weights, h, state, rows, pdl=late(), config=config)

    return run, sum(2 * state[1:].nbytes for state in states)


def of_mamba(count: int, window: int = 0) -> Case:
    h = MAMBA
    rows = window_rows(count, window, [h.channels, h.channels, h.num_heads]) if window else decode_rows(count)
    joined = random(len(rows.positions), h.size + 2 * h.num_groups * h.state_size + h.num_heads)
    xbc, dt = joined.split([joined.shape[1] - h.num_heads, h.num_heads], 1)
    heads = random(h.num_heads, dtype=torch.float32)
    weights = MambaWeights(heads, heads, heads, random(h.size), 1e-5, h.size // h.num_groups)
    inputs = MambaInputs(xbc, random(len(xbc), h.size), dt)
    states = [torch.zeros(count + 1, h.num_heads, h.state_size, h.head_dim, device="cuda") for _ in range(LAYERS)]

    def run() -> None:
        for state in states:
            mamba.mamba(inputs, weights, h, state, rows, pdl=late())

    return run, sum(2 * state[1:].nbytes for state in states)


def of_convolution(count: int, window: int = 0) -> Case:
    channels = DELTA.channels
    rows = window_rows(count, window, [channels, channels]) if window else decode_rows(count)
    x, weight = random(len(rows.positions), channels), random(WINDOW, channels)
    tails = [random(count + 1, WINDOW - 1, channels) for _ in range(LAYERS)]

    def run() -> None:
        for tail in tails:
            convolution.causal_convolution(x, weight, None, tail, rows, pdl=late())

    return run, sum(2 * tail[1:].nbytes for tail in tails) + 2 * LAYERS * x.nbytes


def with_constants(module: Any, channels: int, warps: int, run: Callable[[], object]) -> Callable[[], object]:
    """The same call with other sizes of the module's programs, which are set until it is captured."""

    def changed() -> None:
        before = module.DECODE_CHANNELS, module.DECODE_WARPS
        module.DECODE_CHANNELS, module.DECODE_WARPS = channels, warps
        run()
        module.DECODE_CHANNELS, module.DECODE_WARPS = before

    return changed


def cases(count: int, window: int, tunes: bool) -> Iterator[tuple[str, Callable[[], object], int]]:
    """(name, call, its bytes); the states of one kernel at a time are in memory."""
    for tokens, end in ((0, ""), (window, " windows")):
        by_config, num_bytes = of_delta(count, tokens)
        yield f"delta{end}", partial(by_config, None), num_bytes
        for block, warps in (
            ((128, 8), (128, 16), (64, 8), (64, 4), (32, 8), (32, 4), (32, 2), (16, 4), (16, 2)) if tunes else ()
        ):
            yield f"delta{end} {block} {warps}", partial(by_config, delta.Config(block, warps)), num_bytes
        del by_config
        run, num_bytes = of_mamba(count, tokens)
        yield f"mamba{end}", run, num_bytes
        for channels, warps in ((64, 4), (64, 8), (32, 4), (32, 2), (16, 4), (16, 2)) if tunes else ():
            yield f"mamba{end} {channels} {warps}", with_constants(mamba, channels, warps, run), num_bytes
        del run
    run, num_bytes = of_convolution(count, window)
    yield "convolution windows", run, num_bytes
    run, num_bytes = of_convolution(count)
    yield "convolution", run, num_bytes
    for channels, warps in ((128, 4), (256, 2), (256, 1), (512, 2), (512, 4), (1024, 4), (2048, 8)) if tunes else ():
        yield f"convolution {channels} {warps}", with_constants(convolution, channels, warps, run), num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--window", type=int, default=4, help="tokens of a row with a window (default: 4)")
    parser.add_argument("--copy", type=float, default=4.28, help="TB/s of a copy, read and write together")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    for count in map(int, args.rows.split(",")):
        for name, run, num_bytes in cases(count, args.window, args.tune):
            micros = replay_seconds(run, 9) * 1e6 / LAYERS
            share = num_bytes / LAYERS / args.copy / 1e6 / micros
            result[f"{name} x{count}"] = {"us": round(micros, 2), "share_of_copy": round(share, 3)}
            print(f"{name:28} {count:4} rows {micros:9.2f} us a layer, {share:6.1%} of a copy", flush=True)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
