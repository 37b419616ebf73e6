"""Load on a server of vectors over HTTP: texts a second and latency, by a client of several processes.

    python benchmarks/embeddings_http.py --url http://127.0.0.1:8000 --model NAME                     # one text a request
    python benchmarks/embeddings_http.py --url ... --model NAME --texts 16 --words 400                # 16 long texts a request
    python benchmarks/embeddings_http.py --url ... --model NAME --concurrency 1 --processes 1         # an idle server's latency
    python benchmarks/embeddings_http.py --url ... --model NAME --rerank --texts 100 --words 250      # documents of a query

It asks any server with OpenAI's /v1/embeddings, or /rerank: Quire, vLLM, Infinity. Each process keeps its share of the
concurrent connections open and sends the next request when an answer has come. Texts are seeded words, different in all
requests, so nothing is found in a cache. The servers' own counts of tokens are summed. Prints one JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from typing import Any
from urllib.parse import urlsplit

from tiny_words import WORDS


def body_of(args: argparse.Namespace, rng: random.Random) -> bytes:
    texts = [" ".join(rng.choices(WORDS, k=args.words)) for _ in range(args.texts)]
    fields: dict[str, Any] = {"model": args.model}
    if args.rerank:
        fields |= {"query": " ".join(rng.choices(WORDS, k=8)), "documents": texts, "return_documents": False}
    else:
        fields |= {"input": texts[0] if args.texts == 1 else texts, "encoding_format": args.encoding_format}
    return json.dumps(fields).encode()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> int:
    """Tokens of the prompts, by the server's count. Raises RuntimeError for an error."""
    writer.write(head % len(body) + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines[1:] if b": " in line)
    if b"content-length" in headers:
        answer = await reader.readexactly(int(headers[b"content-length"]))
    else:
        answer = b""
        while size := int(await reader.readline(), 16):
            answer += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    if b" 200 " not in lines[0]:
        raise RuntimeError(f"{lines[0].decode()}: {answer[:200].decode(errors='replace')}")
    at = answer.rfind(b'"prompt_tokens":')  # the whole answer would take longer to read than it took to make
    return int(answer[at + 16 :].lstrip().split(b",")[0].split(b"}")[0]) if at >= 0 else 0


async def connection(args: argparse.Namespace, seed: str, count: int, latencies: list[float]) -> int:
    url, rng, tokens = urlsplit(args.url), random.Random(seed), 0
    path = "/rerank" if args.rerank else "/v1/embeddings"
    key = f"authorization: Bearer {args.api_key}\r\n" if args.api_key else ""
    head = f"POST {path} HTTP/1.1\r\nhost: {url.netloc}\r\n{key}content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection(url.hostname, url.port or 80, limit=1 << 26)
    for _ in range(count):
        body = body_of(args, rng)
        began = time.perf_counter()
        tokens += await ask(reader, writer, head.encode(), body)
        latencies.append(time.perf_counter() - began)
    writer.close()
    return tokens


def client(args: argparse.Namespace, number: int, results: Any) -> None:
    """One process: its share of the connections, and of the requests."""
    connections = max(args.concurrency // args.processes, 1)
    each = max(args.requests // (args.processes * connections), 1)

    async def run() -> tuple[list[float], int, float, float]:
        latencies: list[float] = []
        began = time.time()
        runs = (connection(args, f"{args.seed} {number} {i}", each, latencies) for i in range(connections))
        tokens = sum(await asyncio.gather(*runs))
        return latencies, tokens, began, time.time()

    results.put(asyncio.run(run()))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=client, args=(args, i, results)) for i in range(args.processes)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    latencies = sorted(latency for own, *_ in found for latency in own)
    seconds = max(end for *_, end in found) - min(began for _, _, began, _ in found)
    return {
        "texts_per_s": round(len(latencies) * args.texts / seconds, 1),
        "requests_per_s": round(len(latencies) / seconds, 1),
        "tokens_per_s": round(sum(tokens for _, tokens, *_ in found) / seconds),
        "p50_ms": round(1e3 * latencies[len(latencies) // 2], 2),
        "p99_ms": round(1e3 * latencies[int(0.99 * (len(latencies) - 1))], 2),
        "requests": len(latencies),
    }


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--texts", type=int, default=1, help="of a request")
    parser.add_argument("--words", type=int, default=50, help="of a text; some 1.2 tokens each")
    parser.add_argument("--encoding-format", default="float", choices=["float", "base64"])
    parser.add_argument("--rerank", action="store_true", help="documents of a query")
    parser.add_argument("--warmup", type=int, default=256, help="requests that do not count")
    parser.add_argument("--seed", default="0")
    return parser.parse_args(given)


if __name__ == "__main__":
    asked = arguments()
    measure(argparse.Namespace(**{**vars(asked), "requests": asked.warmup, "seed": "warm-up"}))
    print(json.dumps({**{name: getattr(asked, name) for name in ("concurrency", "texts", "words")}, **measure(asked)}))
