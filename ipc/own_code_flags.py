"""Flags of the engine for developers: their own classes, and where the time goes."""

from collections.abc import Callable


def add_own_code_arguments(add: Callable[..., None]) -> None:
    add("--emulate-world-size", type=int, metavar="N", help="run one of N ranks, to measure it; needs --load-format dummy")
    add(
        "--logits-processors",
        nargs="+",
        action="extend",
        metavar="MODULE:CLASS",
        help="classes with vLLM's LogitsProcessor interface (also FILE.py:CLASS), for requests with vllm_xargs (default: none)",
    )
    add(
        "--logits-processors-path",
        nargs="+",
        action="extend",
        metavar="FOLDER",
        help="folders that are searched for these modules after the installed ones and the current folder (default: none)",
    )
    add(
        "--profile-dir",
        metavar="FOLDER",
        help="folder for the traces of torch's profiler, which /start_profile begins (default: no profiling)",
    )
