"""The flags of `quire bench`: those of `vllm bench` that apply to Quire. It needs only argparse."""

import argparse
import sys
from typing import Any

from quire.frontend.cli.bench.backends import PATHS, POOLING
from quire.frontend.cli.vllm_compat import without_vllms
from quire.ipc.config import add_engine_arguments
from quire.ipc.process.command import CommandParser
from quire.ipc.process.flags import JsonObject

_METRICS = ("ttft", "tpot", "itl", "e2el")


def add_bench(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    bench = commands.add_parser("bench", help="measure a server or an engine", description="Measure a server or an engine.")
    bench.set_defaults(run=None, parser=bench)
    kinds = bench.add_subparsers(dest="measure", metavar="WHAT")
    _add_serve(kinds.add_parser("serve", help="measure any OpenAI-compatible server under load", description=_SERVE))
    for name, text, add in (
        ("throughput", "tokens a second of an engine", _add_throughput),
        ("latency", "seconds for one batch of an engine", _add_latency),
        ("startup", "seconds to an engine's first token", _add_startup),
    ):
        parser = kinds.add_parser(name, help=text, description=f"Starts an engine to measure the {text}.")
        group = parser.add_argument_group("benchmark")
        group.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL without the flag")
        add(group)
        add_engine_arguments(parser)
        parser.set_defaults(run=_offline, parser=parser, prepare=without_vllms, notes=())


_SERVE = "Measures any OpenAI-compatible server under load: throughput, and percentiles of TTFT, TPOT and ITL."


def _add_serve(parser: CommandParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--backend",
        "--endpoint-type",
        choices=list(PATHS),
        default="openai",
        help="openai-chat: chats; openai-embeddings, openai-embeddings-chat, infinity-embeddings, vllm-pooling and "
        "vllm-rerank: vectors and scores; the others: completions (default: %(default)s)",
    )
    server.add_argument("--base-url", "--url", help="address of the server (default: made of --host and --port)")
    server.add_argument("--host", default="127.0.0.1", help="host of the server (default: %(default)s)")
    server.add_argument("--port", type=int, default=8000, help="port of the server (default: %(default)s)")
    server.add_argument("--endpoint", metavar="PATH", help="path of the route (default: that of --backend)")
    server.add_argument("--model", help="name of the model (default: the server's first)")
    server.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME",
        help="LoRA adapters: each request names one, by chance (default: none)",
    )
    server.add_argument("--served-model-name", help="the name in requests, if --model is a folder (default: --model)")
    server.add_argument("--api-key", help="the server's key (default: OPENAI_API_KEY of the environment, or none)")
    server.add_argument(
        "--header", type=_pair, nargs="*", default=[], metavar="NAME=VALUE", help="more headers (default: none)"
    )
    prompts = parser.add_argument_group("prompts")
    _add_dataset(prompts)
    prompts.add_argument(
        "--random-batch-size",
        type=_count,
        default=1,
        metavar="N",
        help="random texts of a request for vectors, or documents of one for scores (default: 1)",
    )
    prompts.add_argument(
        "--no-reranker",
        action="store_true",
        help="random-rerank for a model that embeds: the query is as long as a document",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=_positive, default=float("inf"), help="requests a second (default: inf: at once)")
    load.add_argument("--burstiness", type=_positive, default=1.0, help="1: Poisson arrivals; below 1: burstier (default: 1)")
    load.add_argument("--max-concurrency", type=_natural, help="the most requests at a time (default: no limit)")
    load.add_argument("--num-warmups", type=_natural, default=0, help="requests sent before, which do not count (default: 0)")
    load.add_argument("--ready-check-timeout-sec", type=float, default=0.0, help="seconds to wait for a server (default: 0)")
    load.add_argument("--timeout-s", type=_positive, default=6 * 3600.0, help="most seconds for one request (default: 6 hours)")
    load.add_argument("--seed", type=_natural, default=0, help="seed of prompts and arrival times (default: 0)")
    _add_sampling(load)
    for name in ("--min-p", "--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        load.add_argument(name, type=float, help="as in a request (default: the server's)")
    load.add_argument("--logprobs", type=int, help="number of logprobs (default: none)")
    load.add_argument("--ignore-eos", action="store_true", help="generate the whole output length, past end-of-sequence tokens")
    load.add_argument("--extra-body", action=JsonObject, default={}, metavar="JSON", help="more fields (default: none)")
    _add_results(parser.add_argument_group("results"))
    parser.set_defaults(run=_serve, parser=parser, prepare=without_vllms, notes=())


def _add_dataset(group: Any) -> None:
    group.add_argument(
        "--num-prompts", "--num-prompt", type=_count, default=1000, help="requests to make (default: %(default)s)"
    )
    group.add_argument(
        "--dataset-name",
        choices=["random", "random-mm", "random-rerank", "sharegpt", "custom"],
        default="random",
        help="random tokens, the same with images (chats alone), random queries with documents (vllm-rerank alone), a "
        "ShareGPT file, or JSON lines with a prompt each (default: %(default)s)",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="file of the dataset, for sharegpt and custom (default: none)")
    group.add_argument(
        "--input-len", "--random-input-len", "--random-input", type=_count, help="tokens of a random prompt (default: 1024)"
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--random-output",
        "--sharegpt-output-len",
        "--custom-output-len",
        type=_count,
        help="tokens of an answer (default: 128; sharegpt: the answer's)",
    )
    group.add_argument("--random-range-ratio", type=_ratio, default=0.0, help="spread of lengths, 0 to 1 (default: 0)")
    group.add_argument(
        "--random-mm-base-items-per-request", type=_count, default=1, metavar="N", help="images of a prompt (default: 1)"
    )
    group.add_argument(
        "--random-mm-image-size", type=_size, default=(512, 512), metavar="WxH", help="their pixels (default: 512x512)"
    )
    group.add_argument("--random-prefix-len", type=_natural, default=0, help="tokens that all prompts begin with (default: 0)")


def _add_sampling(group: Any) -> None:
    group.add_argument("--temperature", type=float, help="as in a request (default: the server's, or 1 for an engine)")
    group.add_argument("--top-p", type=float, help="as in a request (default: the server's)")
    group.add_argument("--top-k", type=int, help="as in a request (default: the server's)")


def _add_results(group: Any) -> None:
    group.add_argument("--tokenizer", help="folder or hub id, to make prompts of an exact length as text (default: token ids)")
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        metavar="LIST",
        help="some of ttft, tpot, itl, e2el (default: ttft,tpot,itl; of vectors and scores e2el)",
    )
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=[99.0],
        metavar="LIST",
        help="percentiles of them (default: 99)",
    )
    group.add_argument(
        "--goodput",
        type=_limits,
        nargs="+",
        default={},
        action=_Goodput,
        metavar="NAME:MS",
        help="the most ms that a good request takes, for ttft, tpot or e2el (default: none)",
    )
    group.add_argument("--save-result", action="store_true", help="write the figures to a file, as JSON")
    group.add_argument("--save-detailed", action="store_true", help="include times and texts of every request")
    group.add_argument("--result-dir", metavar="FOLDER", help="folder of that file (default: this one)")
    group.add_argument("--result-filename", metavar="NAME", help="name of that file (default: made of model, rate and date)")
    group.add_argument(
        "--metadata",
        type=_pair,
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="for the file (default: none)",
    )
    group.add_argument("--label", help="label in that file, in place of the backend (default: none)")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_throughput(group: Any) -> None:
    _add_dataset(group)
    _add_sampling(group)
    _add_output(group)
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_latency(group: Any) -> None:
    group.add_argument("--input-len", type=_count, default=32, help="tokens of a prompt (default: %(default)s)")
    group.add_argument("--output-len", type=_count, default=128, help="tokens of an answer (default: %(default)s)")
    group.add_argument("--batch-size", type=_count, default=8, help="prompts at once (default: %(default)s)")
    group.add_argument("--num-iters-warmup", type=_natural, default=10, help="rounds before, which do not count (default: 10)")
    group.add_argument("--num-iters", type=_count, default=30, help="rounds (default: %(default)s)")
    _add_output(group)


def _add_startup(group: Any) -> None:
    group.add_argument("--num-iters-cold", type=_natural, default=1, help="starts without compiled kernels (default: 1)")
    group.add_argument("--num-iters-warm", type=_natural, default=3, help="starts with compiled kernels (default: 3)")
    _add_output(group)


def _add_output(group: Any) -> None:
    group.add_argument("--output-json", metavar="FILE", help="file for the figures (default: none)")


# -------------------------------------------------------------------------------------------------------------- values
class _Goodput(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, dict(values))


def _limits(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not value.replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a limit is like ttft:500, in ms, of ttft, tpot or e2el")
    return name, float(value)


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not set(names) <= set(_METRICS):
        raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(_METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= p <= 100 for p in found):
        raise argparse.ArgumentTypeError(f"{text!r}: percentiles are numbers up to 100, with commas between them")
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return int(text)


def _positive(text: str) -> float:
    if not (value := _number(text)) > 0:  # excludes nan, too
        raise argparse.ArgumentTypeError(f"{text!r} is no number greater than 0")
    return value


def _ratio(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 0 and 1")
    return value


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) <= 16384 and 0 < int(height) <= 16384):
        raise argparse.ArgumentTypeError(f"{text!r} is no size of an image, as 1024x768")
    return int(width), int(height)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


# ---------------------------------------------------------------------------------------------------------------- run
def _serve(args: argparse.Namespace) -> int:
    from quire.frontend.cli.bench.serve import bench_serve

    _check(args)
    _check_pooling(args)
    if args.percentile_metrics is None:
        args.percentile_metrics = ["e2el"] if args.backend in POOLING else ["ttft", "tpot", "itl"]
    _say_notes(args)
    return bench_serve(args)


def _offline(args: argparse.Namespace) -> int:
    from quire.frontend.cli.bench.offline import run

    _check(args)
    if args.model is not None and args.model_flag is not None:
        args.parser.error("the model is given twice")
    args.model = args.model or args.model_flag
    _say_notes(args)
    return run(args)


def _say_notes(args: argparse.Namespace) -> None:
    if args.notes:
        print(f"{args.parser.prog}: nothing is needed here for {', '.join(args.notes)}", file=sys.stderr)


def _check(args: argparse.Namespace) -> None:
    name = getattr(args, "dataset_name", "random")
    if name == "random-mm" and getattr(args, "backend", None) != "openai-chat":
        args.parser.error("--dataset-name random-mm is for `bench serve --backend openai-chat`: images are parts of messages")
    if not name.startswith("random") and args.dataset_path is None:
        args.parser.error(f"--dataset-name {args.dataset_name} needs --dataset-path")
    if name == "random-rerank" and getattr(args, "backend", None) != "vllm-rerank":
        args.parser.error("--dataset-name random-rerank is for `bench serve --backend vllm-rerank`: a query with documents")


def _check_pooling(args: argparse.Namespace) -> None:
    if args.backend == "vllm-rerank" and args.dataset_name != "random-rerank":
        args.parser.error("--backend vllm-rerank needs --dataset-name random-rerank: queries with documents")
    if args.no_reranker and args.dataset_name != "random-rerank":
        args.parser.error("--no-reranker is for --dataset-name random-rerank")
    if args.random_batch_size > 1 and (args.backend not in POOLING or args.backend == "openai-embeddings-chat"):
        args.parser.error(f"--random-batch-size is for vectors and scores, not for --backend {args.backend}")
