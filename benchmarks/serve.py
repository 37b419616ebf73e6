"""Load on any OpenAI-compatible server, by several client processes; or servers started, measured and stopped, for comparison.

    serve.py --url http://127.0.0.1:8000 --model NAME --concurrency 256 --num-requests 2000 --input-len 256 --output-len 128
    serve.py --url http://h:8001 http://h:8002 --model NAME                                   several frontends of one engine
    serve.py --url ... --model NAME --rate 20 --num-requests 600                              Poisson arrivals
    serve.py --url ... --model NAME --loads single:1:12 closed:256:2000 poisson:20:600
    serve.py --start "quire serve MODEL --port 8000" --model MODEL --loads ...                start-up and stop are timed, too
    serve.py --table quire vllm --model MODEL_DIR                                             one engine after the other
    serve.py --sink 50000 --concurrency 256                                                   the generator's own limit

Figures are defined in load_stats.py, loads in load_generator.py. Before each load the server is warmed up with short requests
of the same concurrency. --sink streams pre-made events at that many tokens/s and reports how the generator copes: test it at
twice the rate to be measured. The last line is `RESULT {json}`; --csv appends a row per load. Method: README.md.
"""

import argparse
import csv
import datetime
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from layout import add_layout_arguments, layout_flags, layout_in_words, layout_options, several
from load_generator import MAX_ID, Load, Options, run_load
from servers import Command, Server, end_by_signal, engine_command, machine
from sse_sink import Sink

TABLE_LOADS = ["single:1:12", "closed:256:2000", "poisson:20:600"]
WARM_UP_TOKENS = 16
DEFAULT_URL = "http://127.0.0.1:8000"
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
POINTS = ("mean", "p50", "p90", "p99")
FIELDS = [
    "date", "gpu", "torch", "model", "engine", "load", "input_len", "output_len", "range_ratio", "requests", "failures",
    "duration_s", "request_s", "output_tok_s", "total_tok_s", *(f"{x}_{p}" for x in LATENCIES for p in POINTS),
    "health_s", "first_token_s", "stop_s",
]  # fmt: skip


def measure(loads: list[Load], options: Options, engine: str, warm_up: bool, found: list[dict[str, Any]]) -> None:
    """Run the loads one after the other, and add their summaries to `found`."""
    for number, load in enumerate(loads):
        if warm_up:
            count = min(load.concurrency or 32, load.num_requests)
            short = replace(load, kind="closed", concurrency=count, num_requests=count, output_len=WARM_UP_TOKENS, rate=0.0)
            run_load(short, replace(options, seed=options.seed + 10_000 + number))
        summary = {"engine": engine, **run_load(load, replace(options, seed=options.seed + number))}
        print_summary(summary)
        found.append(summary)


def print_summary(s: dict[str, Any]) -> None:
    print(f"\n== {s['engine']}, {s['load']}: {s['input_len']} in, {s['output_len']} out, +-{s['range_ratio']:.0%}")
    print(f"   {s['requests']} requests, {s['failures']} failed", *s["errors"], sep="\n      ")
    if "duration_s" not in s:
        return
    print(f"   {s['duration_s']:.2f} s: {s['request_s']:.2f} requests/s, {s['output_tok_s']:,.0f} output tokens/s, ", end="")
    print(f"{s['total_tok_s']:,.0f} tokens/s in all")
    print(f"   {'ms':8}" + "".join(f"{p:>10}" for p in (*POINTS, "max")))
    for name in (*LATENCIES, "send_lag_ms"):
        print(f"   {name[:-3]:8}" + "".join(f"{s[name][p]:10.2f}" for p in (*POINTS, "max")))
    g = s["generator"]
    print(f"   generator: {g['processes']} processes, {g['us_per_chunk']} us a chunk, the busiest {g['busiest']:.0%} of a core")
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------------------------ modes
def start_and_measure(
    command: Command, loads: list[Load], options: Options, args: argparse.Namespace, result: dict[str, Any]
) -> None:
    """Start a server, measure it, stop it, and fill `result`. One that does not start is reported, and the next follows."""
    urls = options.urls if options.url == command.url else ()  # with --start
    options = replace(options, url=command.url, urls=urls, model=command.model)
    print(f"\n#### {command.name}: {' '.join(command.arguments)}", flush=True)
    log = Path(args.log_dir or tempfile.mkdtemp(prefix="serve-")) / f"{command.name}.log"
    try:
        server = Server(command, log)
    except RuntimeError as error:
        result["error"] = str(error)
        print(error, flush=True)
        return
    try:
        result |= server.wait_until_ready(args.start_timeout, options.api_key)
        print(f"/health after {result['health_s']} s, first token after {result['first_token_s']} s (log: {log})", flush=True)
        measure(loads, options, command.name, not args.cold, result["loads"])
    except RuntimeError as error:
        result["error"] = str(error)
        print(error, flush=True)
    finally:
        result["stop_s"] = server.stop()
    print(f"stopped after {result['stop_s']} s", flush=True)


def measure_generator(rate: float, load: Load, options: Options, sinks: int) -> dict[str, Any]:
    """Measure the generator with the sink: the offered and the received rate, and the rate at its processes' limit."""
    interval_s = load.concurrency / rate
    sink = Sink(interval_s, sinks)
    try:
        found = run_load(load, replace(options, url=sink.url, urls=(), model="sink", ignore_eos=True))
    finally:
        about_sink = sink.stop()
    print_summary({"engine": "sink", **found})
    g = found["generator"]
    ceiling = g["processes"] * 1e6 / g["us_per_chunk"]
    steady = load.concurrency / (found["itl_ms"]["mean"] / 1e3)
    itl = found["itl_ms"]
    print(
        f"\noffered {rate:,.0f} tokens/s ({1e3 * interval_s:.2f} ms between two of a request; the sink's own steps took "
        f"{about_sink['step_ms']} ms, {about_sink['busy']:.0%} of a core)\n"
        f"taken   {steady:,.0f} tokens/s while streaming, ITL p50 {itl['p50']} ms, p99 {itl['p99']} ms\n"
        f"ceiling {ceiling:,.0f} tokens/s at {g['us_per_chunk']} us a chunk on {g['processes']} processes of a core each"
    )
    return {
        "offered_tok_s": rate,
        "taken_tok_s": round(steady, 1),
        "ceiling_tok_s": round(ceiling),
        "sink": about_sink,
        **found,
    }


def append_csv(path: Path, model: str, results: list[dict[str, Any]], where: dict[str, Any]) -> None:
    """Append one row per load; start-up times are repeated in each."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
        if new:
            writer.writeheader()
        head = {"date": datetime.date.today().isoformat(), "gpu": where["gpu"], "torch": where.get("torch", ""), "model": model}
        for result in results:
            for load in result["loads"]:
                if "duration_s" in load:
                    points = {f"{x}_{p}": load[x][p] for x in LATENCIES for p in POINTS}
                    writer.writerow({**head, **{k: v for k, v in result.items() if k != "loads"}, **load, **points})


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the engines' figures in columns."""
    rows: list[tuple[str, list[float]]] = [
        ("start to /health, s", [r.get("health_s", float("nan")) for r in results]),
        ("start to first token, s", [r.get("first_token_s", float("nan")) for r in results]),
    ]
    by_name = [{load["load"]: load for load in r["loads"] if "duration_s" in load} for r in results]
    for name in dict.fromkeys(load for loads in by_name for load in loads):
        found = [loads.get(name) for loads in by_name]
        rows.append((f"{name} output tok/s", [f["output_tok_s"] if f else float("nan") for f in found]))
        for what, point in (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99"), ("tpot_ms", "mean")):
            values = [f[what][point] if f else float("nan") for f in found]
            rows.append((f"{name} {what.removesuffix('_ms').upper()} {point}, ms", values))
    print(f"\n{'':34}" + "".join(f"{r['engine']:>14}" for r in results))
    for title, values in rows:
        print(f"{title:34}" + "".join(f"{v:14,.2f}" for v in values))


def main() -> None:
    args = parse_arguments()
    ratio = args.range_ratio
    if args.loads:
        loads = [Load.parse(text, args.input_len, args.output_len, ratio) for text in args.loads]
    else:
        kind = f"poisson:{args.rate}" if args.rate else f"closed:{args.concurrency}"
        loads = [Load.parse(f"{kind}:{args.num_requests}", args.input_len, args.output_len, ratio)]
    urls = tuple(args.url or [DEFAULT_URL])
    options = Options(
        url=urls[0], urls=urls, model=args.model, endpoint=args.endpoint, temperature=args.temperature,
        ignore_eos=not args.no_ignore_eos, vocab_size=args.vocab_size, api_key=args.api_key, timeout_s=args.timeout,
        seed=args.seed, processes=args.processes,
    )  # fmt: skip
    where = machine()
    end_by_signal()
    results: list[dict[str, Any]] = []
    if args.sink:
        results.append(measure_generator(args.sink, loads[0], options, args.sink_processes))
        print("RESULT " + json.dumps({"machine": where, "results": results}))
        return
    try:
        run(args, loads, options, results)
    finally:  # also after an interrupted run
        print_table(results)
        if args.csv:
            name = " ".join(filter(None, (Path(args.model).name, layout_in_words(args))))
            append_csv(args.csv, name, results, {**where, "gpu": several(where["gpu"], args)})
        found = {"model": args.model, **layout_options(args), "machine": where, "results": results}
        print("RESULT " + json.dumps(found), flush=True)
    if any("error" in r or any(load["failures"] for load in r["loads"]) for r in results):
        sys.exit(1)


def _options_of(args: argparse.Namespace) -> dict[str, str]:
    return {"quire": args.quire_options, "vllm": args.vllm_options, "vllm-rust": args.vllm_options}


def run(args: argparse.Namespace, loads: list[Load], options: Options, results: list[dict[str, Any]]) -> None:
    """Measure one server after the other, each with a new entry in `results`."""
    commands: list[Command] = []
    if args.table:
        shared = {"port": args.port, "load_format": args.load_format, "max_model_len": args.max_model_len}
        layout = " ".join(layout_flags(args))
        more = {name: f"{layout} {options}" for name, options in _options_of(args).items()}
        commands = [
            engine_command(e, args.model, memory=args.gpu_memory_utilization, site=args.vllm_site, options=more[e], **shared)
            for e in args.table
        ]
    elif args.start:
        commands = [Command.of_text(args.start, args.url[0] if args.url else None, args.model, args.name)]
    else:
        results.append({"engine": args.name, "loads": []})
        measure(loads, options, args.name, not args.cold, results[0]["loads"])
    for command in commands:
        results.append({"engine": command.name, "loads": []})
        start_and_measure(command, loads, options, args, results[-1])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--url", nargs="+", help=f"of several, each gets the requests of some processes (default: {DEFAULT_URL}; with --start,"
        " its --port on this machine)",
    )  # fmt: skip
    what.add_argument("--model", default="", help="the name it is served under; with --table, the model's folder")
    what.add_argument("--name", default="server", help="what to call the server in the results")
    what.add_argument("--endpoint", default="completions", choices=["completions", "chat"])
    what.add_argument("--api-key")
    what.add_argument("--start", metavar="COMMAND", help="start the server with this command, and stop it at the end")
    what.add_argument("--table", nargs="+", metavar="ENGINE", choices=["quire", "vllm", "vllm-rust"])
    what.add_argument("--sink", type=float, metavar="TOKENS_PER_S", help="measure the generator itself")
    load = parser.add_argument_group("load")
    load.add_argument("--loads", nargs="+", metavar="LOAD", help="closed:N:REQUESTS, poisson:RATE:REQUESTS, single:1:REQUESTS")
    load.add_argument("--concurrency", type=int, default=256)
    load.add_argument("--rate", type=float, default=0.0, help="requests a second, Poisson, instead of --concurrency")
    load.add_argument("--num-requests", type=int, default=2000)
    load.add_argument("--input-len", type=int, default=256)
    load.add_argument("--output-len", type=int, default=128)
    load.add_argument("--range-ratio", type=float, default=0.5, help="lengths are length * (1 +- this), but for single")
    load.add_argument("--temperature", type=float, default=1.0)
    load.add_argument("--no-ignore-eos", action="store_true")
    load.add_argument("--vocab-size", type=int, default=MAX_ID, help="prompts' ids are below this (default: %(default)s)")
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--timeout", type=float, default=600.0, help="of one request, s")
    load.add_argument("--cold", action="store_true", help="no warm-up before a load")
    load.add_argument("--processes", type=int, default=4, help="of the generator (default: %(default)s)")
    load.add_argument("--sink-processes", type=int, default=2)
    engines = parser.add_argument_group("engines started by --table and --start")
    engines.add_argument("--port", type=int, default=8000)
    engines.add_argument("--load-format", default="dummy")
    engines.add_argument("--max-model-len", type=int, default=8192)
    add_layout_arguments(engines)
    engines.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    engines.add_argument("--quire-options", default="", help="appended to `quire serve`")
    engines.add_argument("--vllm-options", default="", help="appended to `vllm serve`")
    engines.add_argument("--vllm-site", default="", help="folder where vLLM is installed (default: this Python's own)")
    engines.add_argument("--start-timeout", type=float, default=300.0)
    engines.add_argument("--log-dir", help="where servers' output goes (default: a new folder)")
    parser.add_argument("--csv", type=Path, help="append a row a load")
    args = parser.parse_args()
    if args.table and not args.loads:
        args.loads = TABLE_LOADS
    if args.rate and args.sink:
        parser.error("--sink is for a closed loop")
    if not args.model and not args.sink:
        parser.error("--model is needed")
    return args


if __name__ == "__main__":
    main()
