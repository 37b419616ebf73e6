"""Embedders and rerankers of published sizes, offline and over HTTP: `embedders.py [PART ...] [--engine quire|vllm]`.

    decoder    Qwen3-Embedding-0.6B's sizes: texts of 64, 512 and 20 tokens, and one text alone
    bert       BERT-base's: texts of 64 and 512 tokens; and, as `ceiling`, tokens/s of its matrix products alone through cuBLAS
    xlmr       XLM-RoBERTa-large's: texts of 512 tokens
    reranker   Qwen3-Reranker-0.6B's: 100 documents of 300 tokens a query
    http       BERT-base served by one frontend: 256 at once, texts of 64 tokens, one a request; and an idle server's latency

Weights are random (`--load-format dummy`) and folders are written here (embedder_shapes.py). Each part has an engine in a
process of its own; `start_s` is from that process's start to its first vector. Offline prompts are token ids, so nothing is
tokenized but the reranker's texts. Of `--repeat` runs the best counts. Each figure is printed at once, as a line of JSON; the
last line is `RESULT {json}`. A server that runs already is measured by embeddings_http.py. `--tiny` is for a try on a CPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import embeddings_http
from embedder_shapes import RERANKER, config_of, write
from servers import Server, end_by_signal, engine_command, machine
from tiny_words import WORDS

TEXTS = {"decoder": ((64, 4096), (512, 1024), (20, 8192), (64, 1)), "bert": ((64, 8192), (512, 2048)), "xlmr": ((512, 512),)}
PARTS = (*TEXTS, "reranker", "http")
ALONE = 30  # runs of one text, of which the median counts
CEILING_TOKENS = 16384
QUERIES, DOCUMENTS, DOCUMENT_TOKENS = 8, 100, 300
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, '
    "retrieve relevant passages that answer the query\n<Query>: {}\n<Document>: "
)
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def say(part: str, **figures: Any) -> dict[str, Any]:
    print(json.dumps({"part": part, **figures}), flush=True)
    return figures


def open_engine(args: argparse.Namespace, part: str, folder: Path) -> Any:
    options: dict[str, Any] = {"load_format": "dummy", "runner": "pooling", "gpu_memory_utilization": 0.8}
    options |= {"dtype": "float32" if args.tiny else "bfloat16", **json.loads(args.options)}
    if part == "decoder":
        options |= {"convert": "embed", "enable_prefix_caching": False}
    if part in ("decoder", "reranker"):
        options["max_model_len"] = 1024
    if part == "reranker":
        options |= {"hf_overrides": RERANKER}
    if args.engine == "vllm":
        from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

        return LLM(model=str(folder), disable_log_stats=True, **options)
    from quire import LLM as Quire

    return Quire(str(folder), **options)


def best(run: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def embedder(args: argparse.Namespace, part: str, folder: Path) -> dict[str, Any]:
    llm, rng = open_engine(args, part, folder), np.random.default_rng(3)
    vocabulary = config_of(part, args.tiny)["vocab_size"]

    def texts(count: int, length: int) -> list[Any]:
        return [{"prompt_token_ids": ids} for ids in rng.integers(10, vocabulary, (count, length)).tolist()]

    llm.embed(texts(1, 64), use_tqdm=False)
    found = {"start": say(part, start_s=round(time.time() - args.started, 2))}
    for length, asked in TEXTS[part]:
        count = min(asked, 16) if args.tiny else asked
        llm.embed(texts(min(count, 256), length), use_tqdm=False)
        runs = [texts(count, length) for _ in range(ALONE if asked == 1 else args.repeat)]
        times = [best(lambda given=given: llm.embed(given, use_tqdm=False), 1) for given in runs]  # type: ignore[misc]
        if asked == 1:
            found["alone"] = say(part, tokens=length, texts=1, ms=round(1e3 * float(np.median(times)), 2))
            continue
        figures = {"texts_per_s": round(count / min(times)), "tokens_per_s": round(count * length / min(times))}
        found[f"{length}x{count}"] = say(part, tokens=length, texts=count, **figures)
    if part == "bert":
        found["ceiling"] = ceiling(args, found[f"512x{min(2048, 16) if args.tiny else 2048}"]["tokens_per_s"])
    return found


def ceiling(args: argparse.Namespace, reached: int) -> dict[str, Any]:
    """Tokens/s of an encoder's matrix products alone, each layer's with weights of its own."""
    import torch

    config, is_cuda = config_of("bert", args.tiny), torch.cuda.is_available()
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    options: Any = {"device": "cuda" if is_cuda else "cpu", "dtype": torch.bfloat16 if is_cuda else torch.float32}
    tokens = 512 if args.tiny else CEILING_TOKENS
    shapes = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)] * layers
    weights = [torch.randn(shape, **options) for shape in shapes]
    inputs = {size: torch.randn(tokens, size, **options) for size in (hidden, inner)}
    outputs = {size: torch.empty(tokens, size, **options) for size in {out for out, _ in shapes}}

    def products() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.T, out=outputs[weight.shape[0]])
        if is_cuda:
            torch.cuda.synchronize()

    products()
    rate = round(tokens / best(products, 2 if args.tiny else 10))
    return say("bert", ceiling_tokens_per_s=rate, of_ceiling=round(reached / rate, 3))


def words_of(folder: Path, tokens: int) -> int:
    """The number of words that have about so many tokens."""
    from tokenizers import Tokenizer

    sample = " ".join(WORDS)
    each = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(sample, add_special_tokens=False)) / len(WORDS)
    return max(round(tokens / each), 1)


def reranker(args: argparse.Namespace, part: str, folder: Path) -> dict[str, Any]:
    """Quire has the template of these models; for vLLM texts bring it, as its recipe says."""
    llm, rng = open_engine(args, part, folder), np.random.default_rng(4)
    length, documents = (20, 4) if args.tiny else (words_of(folder, DOCUMENT_TOKENS), DOCUMENTS)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS, words).tolist())

    def score(count: int) -> None:
        query, texts = text(8), [text(length) for _ in range(count)]
        if args.engine == "vllm":
            query, texts = BEFORE.format(query), [each + BEHIND for each in texts]
        assert len(llm.score(query, texts, **({"use_tqdm": False} if args.engine == "vllm" else {}))) == count

    score(1)
    found = {"start": say(part, start_s=round(time.time() - args.started, 2))}
    score(documents)
    queries = 2 if args.tiny else QUERIES
    seconds = best(lambda: [score(documents) for _ in range(queries)], args.repeat)
    return found | {"queries": say(part, documents=documents, queries_per_s=round(queries / seconds, 2))}


def http(args: argparse.Namespace, part: str, folder: Path) -> dict[str, Any]:
    options = f"--runner pooling --dtype {'float32' if args.tiny else 'bfloat16'} {args.serve_options}"
    how: dict[str, Any] = {"port": args.port, "load_format": "dummy", "max_model_len": 512, "memory": 0.8, "site": ""}
    command = engine_command(args.engine, str(folder), options=options, **how)
    words = words_of(folder, 62)
    with Server(command, Path(tempfile.gettempdir()) / "embedders_server.log") as server:
        found = {"start": say(part, healthy_s=server.wait_until_healthy(args.timeout_s))}
        given = ["--url", command.url, "--model", command.model, "--words", str(words)]
        for name, more in (
            ("many", ["--requests", "64"] if args.tiny else ["--requests", "16384"]),
            ("idle", ["--concurrency", "1", "--processes", "1", "--requests", "20" if args.tiny else "300"]),
        ):
            asked = embeddings_http.arguments([*given, *more])
            warm = ["--requests", "16" if args.tiny else "1024", "--seed", "warm-up"]
            embeddings_http.measure(embeddings_http.arguments([*given, *more, *warm]))
            found[name] = say(part, load=name, words=words, **embeddings_http.measure(asked))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--engine", default="quire", choices=["quire", "vllm"])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--options", default="{}", help="more options of LLM, Quire's or vLLM's, as JSON")
    parser.add_argument("--serve-options", default="", help="more options of the server")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folders", type=Path, default=Path(tempfile.gettempdir()) / "embedder_shapes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part is named {min(unknown)}; there are {', '.join(PARTS)}")
    if args.child:
        if args.child != "http":  # a peer that imports a package `kernels` would find kernels.py beside this file
            sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
        end_by_signal()
        run = {"reranker": reranker, "http": http}.get(args.child, embedder)
        print("CHILD " + json.dumps(run(args, args.child, args.folders)), flush=True)
        return
    results = {part: _in_child(args, part) for part in args.parts or PARTS}
    print("RESULT " + json.dumps({"engine": args.engine, "machine": machine(), **results}))


def _in_child(args: argparse.Namespace, part: str) -> dict[str, Any]:
    folder = write(args.folders, "bert" if part == "http" else part, args.tiny)
    command = [sys.executable, __file__, *sys.argv[1:], "--child", part, "--folders", str(folder)]
    found: dict[str, Any] = {"error": "it did not finish"}
    with subprocess.Popen([*command, "--started", str(time.time())], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("CHILD "):
                found = json.loads(line[6:])
            elif line.startswith('{"part"'):
                print(line, end="", flush=True)
    return found


if __name__ == "__main__":
    main()
