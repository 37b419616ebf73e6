"""Offline throughput of an engine on fixed workloads: `offline.py MODEL --engine quire,vllm [--workloads NAME ...]`.

Each engine runs in a process of its own, one after the other, on the same machine: start-up (process to first token) is timed,
then every workload once warm and `--repeat` times measured, the best counts. Prefix caching is off, lengths are fixed,
temperature 1.0, detokenizing on only with --detokenize, threads by --threads (all engines alike). `transformers`
runs requests one after the other.
Prints a table and a last line `RESULT {json}`; `--csv FILE` appends rows. Method and bias: README.md beside this file.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import workloads

# or kernels.py beside us would be taken for the package of this name that a peer may look for
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

Run = Callable[[list[list[int]], list[int]], float]  # prompts, output lengths -> seconds


def open_quire(args: argparse.Namespace) -> tuple[Run, Callable[[], None], int]:
    from quire.frontend.client.llm import LLM, SamplingParams

    options = {"load_format": args.load_format, "enable_prefix_caching": False, "dtype": args.dtype, "device": args.device}
    options |= json.loads(args.options)
    llm = LLM(args.model, max_model_len=args.max_model_len, gpu_memory_utilization=0.9, **options)

    def run(prompts: list[list[int]], outputs: list[int]) -> float:
        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, detokenize=args.detokenize) for n in outputs]
        begin = time.perf_counter()
        outs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert [len(o.outputs[0].token_ids) for o in outs] == outputs
        return seconds

    return run, llm.shutdown, vocab_size(args.model)


def open_vllm(args: argparse.Namespace) -> tuple[Run, Callable[[], None], int]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        disable_log_stats=True,
        dtype=args.dtype,
    )

    def run(prompts: list[list[int]], outputs: list[int]) -> float:
        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, detokenize=args.detokenize) for n in outputs]
        begin = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert [len(o.outputs[0].token_ids) for o in outs] == outputs
        return seconds

    return run, lambda: None, vocab_size(args.model)


def open_transformers(args: argparse.Namespace) -> tuple[Run, Callable[[], None], int]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    if args.load_format == "dummy":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=dtype).train(False)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.detokenize else None

    def run(prompts: list[list[int]], outputs: list[int]) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            for p, n in zip(prompts, outputs, strict=True):
                ids = torch.tensor([p])
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), min_new_tokens=n, max_new_tokens=n, do_sample=True,
                    temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
                assert out.shape[1] == len(p) + n
                if tokenizer is not None:
                    tokenizer.decode(out[0, len(p) :])
        return time.perf_counter() - begin

    return run, lambda: None, vocab_size(args.model)


def vocab_size(model: str) -> int:
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


ENGINES = {"quire": open_quire, "vllm": open_vllm, "transformers": open_transformers}


def run_engine(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: one engine, all workloads."""
    run, close, vocab = ENGINES[name](args)
    first = run([[11] * 16], [1])
    result: dict[str, Any] = {
        "engine": name,
        "startup_s": round(time.time() - args.started, 1),
        "first_token_s": round(first, 3),
    }
    for workload in args.workloads:
        n_in, n_out = workloads.lengths(workload)
        prompts = workloads.prompts(n_in, vocab)
        if not args.cold:
            run(prompts[:64], [min(n, 8) for n in n_out[:64]])
        seconds = min(run(prompts, n_out) for _ in range(args.repeat))
        result[workload] = workloads.figures(seconds, n_in, n_out)
        print(f"{name:13} {workload:22} {json.dumps(result[workload])}", flush=True)
    close()
    return result


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    found = {"gpu": gpu, "cpus": str(os.cpu_count()), "torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "vllm", "transformers"):
        try:
            from importlib.metadata import version

            found[package] = version(package)
        except ImportError:
            continue
    return found


def append_csv(path: Path, model: str, results: list[dict[str, Any]], where: dict[str, str]) -> None:
    """One row for each engine and workload."""
    fields = ["date", "gpu", "torch", "model", "engine", "workload", "seconds", "output_tok_s", "total_tok_s", "ms_per_step"]
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(fields)
        today = datetime.date.today().isoformat()
        head = [today, where["gpu"], where["torch"], Path(model).name]
        for result in results:
            writer.writerow([*head, result["engine"], "startup", result["startup_s"], "", "", ""])
            for name in workloads.WORKLOADS:
                if r := result.get(name):
                    figures = [r["seconds"], r["output_tok_s"], r["total_tok_s"], r["ms_per_step_at_least"]]
                    writer.writerow([*head, result["engine"], name, *figures])


def print_table(results: list[dict[str, Any]]) -> None:
    names = [n for n in workloads.WORKLOADS if any(n in r for r in results)]
    print(f"\n{'':24}" + "".join(f"{r['engine']:>16}" for r in results) + ("     first/last" if len(results) > 1 else ""))
    print(f"{'start to first token, s':24}" + "".join(f"{r['startup_s']:16.1f}" for r in results))
    for name in names:
        unit = "ms_per_step_at_least" if name.startswith("b") else "total_tok_s"
        values = [r[name][unit] if name in r else float("nan") for r in results]
        ratio = f"{results[-1][name]['seconds'] / results[0][name]['seconds']:15.2f}x" if len(values) > 1 else ""
        print(f"{name:24}" + "".join(f"{v:16.2f}" for v in values) + ratio + f"  ({unit})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--engine", default="quire", help="comma-separated: quire, vllm, transformers")
    parser.add_argument("--workloads", nargs="+", default=None, help=", ".join(workloads.WORKLOADS))
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of every engine; without it each chooses for itself")
    parser.add_argument("--detokenize", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="no warm-up before a workload")
    parser.add_argument("--options", default="{}", help="more options of LLM for quire, as JSON")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workloads is None:
        args.workloads = workloads.CPU_NAMES if args.device == "cpu" else workloads.GPU_NAMES
    if args.child:
        print("CHILD " + json.dumps(run_engine(args.child, args)), flush=True)
        return
    results = [_spawn(name, args.threads) for name in args.engine.split(",")]
    print_table(results)
    where = machine()
    if args.csv:
        append_csv(args.csv, args.model, results, where)
    print("RESULT " + json.dumps({"model": args.model, "machine": where, "results": results}))


def _spawn(name: str, threads: int | None) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name, "--started", str(time.time())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)} if threads else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if not line.startswith("CHILD "):
                print(line, end="", flush=True)
    found = [line for line in lines if line.startswith("CHILD ")]
    if not found:
        sys.exit(f"{name} did not finish (exit code {child.returncode})")
    return json.loads(found[-1][6:])


if __name__ == "__main__":
    main()
