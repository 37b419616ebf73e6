"""Make a tuning table for this machine's GPU: measure the table's choices, keep those that are faster, write them to a file.

    python benchmarks/tuning/tune.py [--seconds 200] [--output FILE] [--only NAME ...]

Starts from the table in force for the GPU and takes some minutes, on a GPU that must be otherwise idle. The file, named after
the GPU, is written beside Quire's own tables and is used from the next start on; to undo it, remove it. Prints the changes and,
last, one line of JSON. Entries that depend on a whole server (sizes of steps, dependent launches) are not measured.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sweep_attention
import sweep_cublas
import sweep_experts
import sweep_linear
import torch
import triton
from bench import Bench, DeviceLost
from msgspec.structs import replace
from workload import DRY_RUN, SERVED, Workload

from quire.kernels.tuning.current import for_device, table_path, using
from quire.kernels.tuning.table import Tuning

Sweep = Callable[[Bench, Workload, Tuning], Tuning]

SWEEPS: dict[str, Sweep] = {
    "stream": sweep_linear.sweep_stream,
    "decode": sweep_attention.sweep_decode,
    "libraries": sweep_cublas.sweep_libraries,
    "batched": sweep_cublas.sweep_batched,
    "skinny": sweep_linear.sweep_skinny,
    "split": sweep_linear.sweep_split,
    "norm_linear": sweep_linear.sweep_norm_linear,
    "prefill": sweep_attention.sweep_prefill,
    "rope": sweep_attention.sweep_rope,
    "elementwise": sweep_attention.sweep_elementwise,
    "experts": sweep_experts.sweep_experts,
}
CPU = "cpu (dry run)"
LOST = "the GPU is lost"


def tune(bench: Bench, workload: Workload, table: Tuning, names: Sequence[str]) -> Tuning:
    """The table with the results of the sweeps of these names; a sweep that fails, or that loses the GPU, changes nothing."""
    for number, name in enumerate(names):
        if bench.is_late():
            bench.unmeasured += names[number:]
            break
        bench.log(name)
        try:
            with using(table):
                with bench.compiling():
                    SWEEPS[name](bench, workload, table)
                table = SWEEPS[name](bench, workload, table)
        except DeviceLost as error:
            bench.failed.append(f"{name}: {LOST}: {error}")
            bench.unmeasured += names[number:]
            break
        except Exception as error:  # of a compiler or a driver, in the calls that candidates are compared with
            bench.failed.append(f"{name}: {type(error).__name__} {str(error)[:200]}")
            bench.unmeasured.append(name)
    return table


def changes(old: Tuning, new: Tuning) -> list[str]:
    """A line for each entry that differs."""
    return [f"{path}: {before} -> {after}" for path, before, after in _differ("", *map(msgspec.to_builtins, (old, new)))]


def _differ(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            yield from _differ(f"{path}.{key}" if path else key, old[key], new[key])
    elif isinstance(old, tuple) and len(old) == len(new) and any(isinstance(each, dict) for each in old):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from _differ(f"{path}[{number}]", *pair)
    elif old != new:
        yield path, old, new


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if there is no GPU, or if it was lost."""
    args = _parse(arguments)
    if not (args.dry_run or torch.cuda.is_available()):
        print("tune: there is no GPU here that torch can use", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", torch.cuda.current_device())
    name = CPU if args.dry_run else torch.cuda.get_device_name(device)
    begin, table = time.monotonic(), for_device(name)
    print(f"{name}, torch {torch.__version__}, Triton {triton.__version__}: compiling", flush=True)
    bench = Bench(device, args.seconds)
    with torch.inference_mode(), bench.stream():
        found = replace(tune(bench, DRY_RUN if args.dry_run else SERVED, table, args.only or list(SWEEPS)), devices=(name,))
    for failure in bench.failed:
        print(f"  left out: {failure}")
    changed = changes(replace(table, devices=(name,)), found)
    print("\n".join(["changed:", *(f"  {line}" for line in changed)]) if changed else "nothing changed")
    path = args.output or table_path(name)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    print(f"written to {path}")
    result = {"device": name, "torch": torch.__version__, "triton": triton.__version__, "changed": changed}
    result |= {"seconds": round(time.monotonic() - begin), "failed": bench.failed, "unmeasured": bench.unmeasured}
    print(json.dumps({**result, "table": msgspec.to_builtins(found)}))
    return 1 if any(LOST in failure for failure in bench.failed) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/tuning/tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="what is not measured by then stays as it is")
    parser.add_argument("--output", type=Path, help="write the table here, where it is not used")
    parser.add_argument("--only", nargs="+", choices=SWEEPS, help="measure these parts")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU, with TRITON_INTERPRET=1: shows that it runs"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
