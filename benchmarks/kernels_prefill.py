"""Prefill attention beyond plain attention on a Hopper: its own kernel, tiled in several ways, beside the portable one.

    python benchmarks/kernels_prefill.py [--match TEXT] [--config 64,3,1,24] [--config ...]

Windows, softcaps, sinks, wide heads, odd groups, 8-bit caches (`attention_shapes.ODD_PREFILL`). A line is a shape: TFLOP/s of
visible pairs by the tuning table's choice ("table"), by other configurations (tile, stages, ping-pong, producer's registers)
and by the portable kernel; "*" marks the fastest. Method and bias: kernels_attention.py. A rule of `prefill_hopper` in the
GPU's table (kernels/tuning/) that has no configuration assigns such layers to the portable kernel.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attention_shapes import ODD_PREFILL, AttentionShape, describe
from kernels_attention import Inputs, graph_us, prefill_calls, score
from msgspec.structs import replace

from quire.kernels.triton_support.compile_ahead import compile_only
from quire.kernels.tuning.configs import HopperPrefillConfig
from quire.kernels.tuning.current import current, using
from quire.kernels.tuning.table import HopperPrefillRule

NARROW_HEADS = [(128, 2, 1, 24), (64, 3, 0, 24), (64, 3, 1, 24)]
WIDE_HEADS = [(64, 2, 0, 40), (64, 2, 1, 40)]


@contextmanager
def cut(fields: tuple[int, ...] | None) -> Iterator[None]:
    """Within, Hopper's kernel computes everything with this configuration; None: with that of the table in force."""
    if fields is None:
        yield
        return
    tile, stages, turns, registers = fields
    rule = HopperPrefillRule(config=HopperPrefillConfig(tile, stages, bool(turns), registers))
    table = current()
    with using(replace(table, attention=replace(table.attention, prefill_hopper=(rule,)))):
        yield


def measure(shape: AttentionShape, given: list[tuple[int, ...]]) -> str:
    inputs = Inputs(shape)
    configs = given or (WIDE_HEADS if shape.heads[2] > 128 else NARROW_HEADS)
    rates = {}
    named = [(",".join(map(str, fields)), fields, True) for fields in configs]
    for name, fields, hopper in (("table", None, True), *named, ("portable", None, False)):
        try:
            with cut(fields):
                rates[name] = score(shape, graph_us(prefill_calls(inputs, hopper=hopper)[0]), is_decode=False)
        except Exception as error:  # a configuration that does not fit into shared memory
            print(f"{name}: {type(error).__name__} {str(error)[:90]}", flush=True)
    best = max(rates, key=rates.__getitem__)
    return "  ".join(f"{name} {rate:.0f}{'*' if name == best else ''}" for name, rate in rates.items())


def compile_all(shapes: list[AttentionShape], given: list[tuple[int, ...]]) -> None:
    """Compile on all cores, before anything is measured."""
    with compile_only():
        for shape in shapes:
            inputs = Inputs(shape, max_layers=1)
            for fields in (None, *(given or (WIDE_HEADS if shape.heads[2] > 128 else NARROW_HEADS))):
                with cut(fields):
                    prefill_calls(inputs)[0][0]()
            prefill_calls(inputs, hopper=False)[0][0]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only shapes whose description contains this")
    parser.add_argument("--config", action="append", default=[], help="tile,stages,ping-pong,registers; may be repeated")
    args = parser.parse_args()
    torch.manual_seed(0)
    shapes = [shape for shape in ODD_PREFILL if args.match in describe(shape)]
    configs = [tuple(int(n) for n in each.split(",")) for each in args.config]
    compile_all(shapes, configs)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: TFLOP/s")
    for shape in shapes:
        print(f"{describe(shape)}  {measure(shape, configs)}", flush=True)


if __name__ == "__main__":
    main()
