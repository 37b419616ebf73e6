"""Offline throughput of an engine on fixed workloads: `offline.py MODEL --engine quire,vllm [--workloads NAME ...]`.

Each engine runs in a process of its own, one after the other, on the same machine. Start-up (process to first token) is timed;
then every workload runs once to warm up and `--repeat` times for measurement, of which the best counts. Lengths are fixed,
temperature is 1.0, detokenizing is on only with --detokenize, threads are set by --threads for all engines. `transformers` runs
requests one after the other. In a conversation alone a turn is two calls, for its first token and for the
rest of its answer, so that the time to the first token is known: `ttft_ms` is its median over the turns behind the first.
Prefix caching is off, except for workloads.PREFIX_WORKLOADS: for these a second process has it on, and each run has new
prompts, so that it finds no prefix of an earlier run. `generate` is called once for a turn of all conversations.
Prints a table and a last line `RESULT {json}`; `--csv FILE` appends rows. Method and bias: README.md beside this file.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import workloads
from layout import add_layout_arguments, layout_in_words, layout_options, several

Ids = list[list[int]]
Run = Callable[[Ids, list[int]], tuple[float, Ids]]  # prompts, output lengths -> seconds, answers


def open_quire(args: argparse.Namespace) -> tuple[Run, Callable[[], None], int]:
    from quire import LLM, SamplingParams

    options = {"load_format": args.load_format, "dtype": args.dtype, "device": args.device}
    options |= {"enable_prefix_caching": args.prefix_caching, "gpu_memory_utilization": 0.9}
    options |= layout_options(args) | json.loads(args.options)
    llm = LLM(args.model, max_model_len=args.max_model_len, **options)

    def run(prompts: Ids, outputs: list[int]) -> tuple[float, Ids]:
        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, detokenize=args.detokenize) for n in outputs]
        begin = time.perf_counter()
        outs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [list(o.outputs[0].token_ids) for o in outs]
        assert [len(ids) for ids in answers] == outputs
        return seconds, answers

    return run, llm.shutdown, vocab_size(args.model)


def open_vllm(args: argparse.Namespace) -> tuple[Run, Callable[[], None], int]:
    from vllm import LLM, SamplingParams

    options = {"load_format": args.load_format, "dtype": args.dtype, "max_model_len": args.max_model_len}
    options |= {"enable_prefix_caching": args.prefix_caching, "gpu_memory_utilization": 0.9, "disable_log_stats": True}
    llm = LLM(model=args.model, **options | layout_options(args) | json.loads(args.options))

    def run(prompts: Ids, outputs: list[int]) -> tuple[float, Ids]:
        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, detokenize=args.detokenize) for n in outputs]
        begin = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [list(o.outputs[0].token_ids) for o in outs]
        assert [len(ids) for ids in answers] == outputs
        return seconds, answers

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

    def run(prompts: Ids, outputs: list[int]) -> tuple[float, Ids]:
        answers = []
        begin = time.perf_counter()
        with torch.inference_mode():
            for p, n in zip(prompts, outputs, strict=True):
                ids = torch.tensor([p])
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), min_new_tokens=n, max_new_tokens=n, do_sample=True,
                    temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
                assert out.shape[1] == len(p) + n
                answers.append(out[0, len(p) :].tolist())
                if tokenizer is not None:
                    tokenizer.decode(answers[-1])
        return time.perf_counter() - begin, answers

    return run, lambda: None, vocab_size(args.model)


def vocab_size(model: str) -> int:
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


ENGINES = {"quire": open_quire, "vllm": open_vllm, "transformers": open_transformers}


def run_engine(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: run one engine on all workloads with prefix caching, or on all without."""
    run, close, vocab = ENGINES[name](args)
    first, _ = run([[11] * 16], [1])
    result: dict[str, Any] = {
        "engine": name,
        "startup_s": round(time.time() - args.started, 1),
        "first_token_s": round(first, 3),
    }
    for workload in args.workloads:
        measure = measure_prefixes if args.prefix_caching else measure_alone
        result[workload] = measure(run, workload, vocab, args)
        print(f"{name:13} {workload:24} {json.dumps(result[workload])}", flush=True)
    close()
    return result


def measure_alone(run: Run, name: str, vocab: int, args: argparse.Namespace) -> dict[str, float]:
    n_in, n_out = workloads.lengths(name)
    prompts = workloads.prompts(n_in, vocab)
    if not args.cold:
        run(prompts[:64], [min(n, 8) for n in n_out[:64]])
    seconds = min(run(prompts, n_out)[0] for _ in range(args.repeat))
    return workloads.figures(seconds, n_in, n_out)


def measure_prefixes(run: Run, name: str, vocab: int, args: argparse.Namespace) -> dict[str, float]:
    workload = workloads.PREFIX_WORKLOADS[name]
    if not args.cold:
        converse(run, workload, vocab, seed=0)
    seconds, first = min(converse(run, workload, vocab, seed=100 * (i + 1)) for i in range(args.repeat))
    figures = workloads.figures(seconds, workload.input_lengths, workload.output_lengths, workload.turns)
    return figures | ({"ttft_ms": round(1e3 * statistics.median(first[1:]), 2)} if first else {})


def converse(run: Run, workload: workloads.PrefixWorkload, vocab: int, seed: int) -> tuple[float, list[float]]:
    """Seconds of all turns, without the time to build the next prompts; and, of a conversation alone, of each first token."""
    prompts = workloads.opening(workload, vocab, seed)
    total, first = 0.0, []
    is_alone = workload.conversations == 1
    for turn in range(1, workload.turns + 1):
        if is_alone:
            seconds, answers = run(prompts, [1])
            first.append(seconds)
            total += seconds
            prompts = [prompts[0] + answers[0]]
        seconds, answers = run(prompts, [workload.answer - is_alone] * workload.conversations)
        total += seconds
        said = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        prompts = workloads.next_turn(workload, said, vocab, seed + turn)
    return total, first


def machine() -> dict[str, str]:
    """The GPU, CPUs and package versions of the measurement."""
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
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(fields)
        today = datetime.date.today().isoformat()
        head = [today, where["gpu"], where["torch"], model]
        for result in results:
            writer.writerow([*head, result["engine"], "startup", result["startup_s"], "", "", ""])
            for name in workloads.NAMES:
                if r := result.get(name):
                    figures = [r["seconds"], r["output_tok_s"], r["total_tok_s"], r["ms_per_step_at_least"]]
                    writer.writerow([*head, result["engine"], name, *figures])


def print_table(results: list[dict[str, Any]]) -> None:
    names = [n for n in workloads.NAMES if any(n in r for r in results)]
    print(f"\n{'':26}" + "".join(f"{r['engine']:>16}" for r in results) + ("     first/last" if len(results) > 1 else ""))
    print(f"{'start to first token, s':26}" + "".join(f"{r['startup_s']:16.1f}" for r in results))
    for name in names:
        unit = "ms_per_step_at_least" if name.startswith("b") else "total_tok_s"
        values = [r[name][unit] if name in r else float("nan") for r in results]
        ratio = f"{results[-1][name]['seconds'] / results[0][name]['seconds']:15.2f}x" if len(values) > 1 else ""
        print(f"{name:26}" + "".join(f"{v:16.2f}" for v in values) + ratio + f"  ({unit})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--engine", default="quire", help="comma-separated: quire, vllm, transformers")
    parser.add_argument("--workloads", nargs="+", default=None, help=", ".join(workloads.NAMES))
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of every engine; without it each chooses for itself")
    parser.add_argument("--detokenize", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="no warm-up before a workload")
    parser.add_argument("--options", default="{}", help="more options of LLM, Quire's or vLLM's, as JSON")
    add_layout_arguments(parser)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--prefix-caching", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workloads is None:
        cpu = args.device == "cpu"
        args.workloads = workloads.CPU_NAMES if cpu else [*workloads.GPU_NAMES, *workloads.PREFIX_GPU_NAMES]
    if unknown := [name for name in args.workloads if name not in workloads.NAMES]:
        parser.error(f"no workload is named {unknown[0]!r}; there are {', '.join(workloads.NAMES)}")
    if args.child:
        # else a peer that imports a package `kernels` would find kernels.py beside this file
        sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
        print("CHILD " + json.dumps(run_engine(args.child, args)), flush=True)
        return
    results = [run_in_children(name, args) for name in args.engine.split(",")]
    print_table(results)
    where = machine()
    if args.csv:
        name = " ".join(filter(None, (Path(args.model).name, layout_in_words(args))))
        append_csv(args.csv, name, results, {**where, "gpu": several(where["gpu"], args)})
    print("RESULT " + json.dumps({"model": args.model, **layout_options(args), "machine": where, "results": results}))


def run_in_children(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The results of engine `name` on all workloads. Those with prefix caching have an engine of their own."""
    alone = [w for w in args.workloads if w in workloads.WORKLOADS]
    prefixes = [w for w in args.workloads if w in workloads.PREFIX_WORKLOADS]
    found = _spawn(name, args.threads, ["--prefix-caching"], prefixes) if prefixes else {}
    return {**found, **(_spawn(name, args.threads, [], alone) if alone else {})}


def _spawn(name: str, threads: int | None, more: list[str], chosen: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], *more, "--child", name, "--started", str(time.time())]
    command += ["--workloads", *chosen]
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
