"""Flags for the layout of a model over GPUs in benchmarks, under the names that Quire and vLLM share."""

import argparse
import math
from typing import Any

SIZES = {
    "tensor_parallel_size": "GPUs that share each layer",
    "pipeline_parallel_size": "stages of layers",
    "data_parallel_size": "whole engines",
}


def add_layout_arguments(parser: Any) -> None:
    """parser: a parser, or a group of its arguments."""
    for name, what in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1, metavar="N", help=f"{what} (default: 1)")


def layout_options(args: argparse.Namespace) -> dict[str, int]:
    """The sizes as options of Quire's or vLLM's LLM, without those that are 1."""
    return {name: getattr(args, name) for name in SIZES if getattr(args, name) != 1}


def layout_flags(args: argparse.Namespace) -> list[str]:
    """The sizes as flags of `serve`."""
    return [word for name, n in layout_options(args).items() for word in (f"--{name.replace('_', '-')}", str(n))]


def several(gpu: str, args: argparse.Namespace) -> str:
    """The GPUs of the layout in words: "4 NVIDIA H200"."""
    count = math.prod(layout_options(args).values())
    return gpu if count == 1 else f"{count} {gpu}"


def layout_in_words(args: argparse.Namespace) -> str:
    """The layout for tables: "TP2 PP2", "" for one GPU."""
    return " ".join(f"{name[0].upper()}P{n}" for name, n in layout_options(args).items())
