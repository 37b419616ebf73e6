"""Plots serve.py's results: throughput against latency, with a line per engine and a point per load.

    plot.py results_serve.csv [more.csv run.log ...] --out pictures [--model NAME] [--engines quire vllm]

It reads serve.py's --csv files, and logs with its `RESULT {json}` line. It writes one PNG per latency (ITL, TTFT, TPOT: median
solid, P99 dashed) for each model. An engine's points are joined in the order of their concurrency or rate; of several runs of
the same load the last counts. Only this file imports matplotlib.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LATENCIES = {"itl_ms": "inter-token latency, ms", "ttft_ms": "time to first token, ms", "tpot_ms": "time per output token, ms"}


def read(path: Path) -> list[Row]:
    """Rows of serve.py's CSV, or the loads of every RESULT line in a text. Raises ValueError if there is neither."""
    text = path.read_text()
    if path.suffix == ".csv":
        rows: list[Row] = list(csv.DictReader(text.splitlines()))
        if rows and "itl_ms_p50" not in rows[0]:
            raise ValueError(f"{path} is not of serve.py: it has no column itl_ms_p50")
        return [{k: number(v) for k, v in row.items()} for row in rows]
    lines = [line.removeprefix("RESULT ") for line in text.splitlines() if line.startswith(("RESULT {", "{"))]
    found = [row for line in lines for row in flat(json.loads(line))]
    if not found:
        raise ValueError(f"{path} holds no RESULT line of serve.py")
    return found


def flat(result: Row) -> list[Row]:
    """A RESULT's loads as rows like the CSV's."""
    rows = []
    for engine in result.get("results", []):
        for load in engine.get("loads", []):
            if "itl_ms" in load:
                points = {f"{name}_{p}": value for name in LATENCIES for p, value in load[name].items()}
                rows.append({**load, **points, "model": Path(result.get("model", "")).name, "engine": engine["engine"]})
    return rows


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def curves(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    """model -> engine -> its rows: the latest of each load, sorted by the load's size."""
    latest: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        latest[row["model"], row["engine"], row["load"]] = row
    found: dict[str, dict[str, list[Row]]] = {}
    for (model, engine, _), row in latest.items():
        found.setdefault(model, {}).setdefault(engine, []).append(row)
    for engines in found.values():
        for of_engine in engines.values():
            of_engine.sort(key=lambda r: (r["load"].split(":")[0], float(r["load"].split(":")[1])))
    return found


def draw(model: str, engines: dict[str, list[Row]], latency: str, out: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot.py needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for number_of, (engine, rows) in enumerate(sorted(engines.items())):
        for kind, marker in (("closed", "o"), ("poisson", "s")):
            mine = [r for r in rows if r["load"].startswith(kind)]
            x = [r["output_tok_s"] for r in mine]
            label = engine if kind == "closed" else None
            axes.plot(x, [r[f"{latency}_p50"] for r in mine], f"-{marker}", color=f"C{number_of}", label=label)
            axes.plot(x, [r[f"{latency}_p99"] for r in mine], f"--{marker}", color=f"C{number_of}", alpha=0.45, markersize=4)
            for r in mine:
                at = (r["output_tok_s"], r[f"{latency}_p50"])
                axes.annotate(r["load"].replace(":", " "), at, fontsize=7, xytext=(4, -9), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="output tokens/s", ylabel=LATENCIES[latency])
    axes.set_title(f"{model}: median solid, P99 dashed; round: N at once, square: requests/s", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
    print(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures")
    parser.add_argument("--model", help="only this one")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="only these")
    args = parser.parse_args()
    try:
        rows = [row for path in args.files for row in read(path) if args.engines is None or row["engine"] in args.engines]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if not rows:
        sys.exit(f"no row is of {' or '.join(args.engines)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for model, engines in curves(rows).items():
        if args.model in (None, model):
            for latency in LATENCIES:
                draw(model, engines, latency, args.out / f"{model or 'model'}-{latency.removesuffix('_ms')}.png")


if __name__ == "__main__":
    main()
