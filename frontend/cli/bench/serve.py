"""`quire bench serve`: a load on any OpenAI-compatible server, with the flags and the result file of `vllm bench serve`.

Requests are due at times that depend on the seed (Poisson, or burstier or more even), or all at once; at most --max-concurrency
run. One process with one event loop handles some 50,000 streamed tokens a second on a fast core.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from quire.frontend.cli.api_address import ChatError, NotReadyError
from quire.frontend.cli.api_client import ChatServer, api_key_of
from quire.frontend.cli.bench import datasets, pooling
from quire.frontend.cli.bench.backends import CHAT, PATHS, POOLING
from quire.frontend.cli.bench.datasets import DatasetError, Request
from quire.frontend.cli.bench.drafts import ServerCounts, figures
from quire.frontend.cli.bench.metrics import Result, outcome, report, summary
from quire.frontend.cli.bench.progress import Progress
from quire.frontend.cli.bench.random_images import with_images
from quire.frontend.cli.bench.sse_client import Connections, Target, clock
from quire.ipc.messages.stats import SpeculationStats
from quire.ipc.sampling import BOUNDS

ASK_AGAIN_S = 1.0  # while a server is not ready yet
_DATE = "%Y%m%d-%H%M%S"
_SAMPLING = [name for name in BOUNDS if name != "seed"]  # those with a flag are sent; --seed is that of prompts and times


class Load:
    """Sends requests to a server, and collects their results."""

    def __init__(self, target: Target, args: argparse.Namespace, model: str, progress: Progress | None) -> None:
        self._target = target
        self._args = args
        self._models, self._chance = args.lora_modules or [model], random.Random(args.seed)
        self._progress = progress
        self._connections = Connections(target)
        self._slots = asyncio.Semaphore(args.max_concurrency or 1 << 30)
        self.interrupted = False

    async def run(self, requests: Sequence[Request], due: Sequence[float]) -> tuple[list[Result], float]:
        """Results in the requests' order, and the total seconds. When cancelled (Ctrl-C), the results so far."""
        begin, tasks = clock(), list[asyncio.Task[Result]]()
        try:
            for request, when in zip(requests, due, strict=True):
                if (early := begin + when - clock()) > 0:
                    await asyncio.sleep(early)
                tasks.append(asyncio.create_task(self._one(request)))
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.interrupted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks if not task.cancelled()], clock() - begin

    async def close(self) -> None:
        """Abort kept-alive connections, and give the loop a turn for it: its end might wait for open connections."""
        self._connections.abort()
        await asyncio.sleep(0)

    async def _one(self, request: Request) -> Result:
        async with self._slots:
            result = await self.ask(request)
        if self._progress is not None:
            self._progress.add(result)
        return result

    async def ask(self, request: Request) -> Result:
        begin, data = clock(), self._target.request(self._body(request))
        if self._args.backend in POOLING:
            return await self._ask_for_numbers(request, begin, data)
        answer = await self._connections.ask(data, self._args.timeout_s, keep_texts=self._args.save_detailed)
        num_out = answer.output_tokens or len(answer.gaps) + 1
        return Result(
            begin, answer.first, answer.end, answer.gaps, answer.prompt_tokens or request.prompt_len,
            0 if answer.error else num_out, answer.error, "".join(answer.texts or []),
        )  # fmt: skip

    async def _ask_for_numbers(self, request: Request, begin: float, data: bytes) -> Result:
        answer = await self._connections.ask(data, self._args.timeout_s, is_whole=True)
        count, error = 0, answer.error
        if not error and self._args.extra_body.get("encoding_format") not in ("bytes", "bytes_only"):
            try:
                count = pooling.prompt_tokens(answer.body)
            except ValueError as wrong:
                error = f"the answer cannot be read: {wrong}"
        return Result(begin, answer.first, answer.end, [], count or request.prompt_len, 0, error)

    def _body(self, request: Request) -> bytes:
        args = self._args
        if args.backend in POOLING:
            fields = {"model": self._chance.choice(self._models), **pooling.fields_of(args.backend, request)}
            return json.dumps({**fields, **args.extra_body}).encode()
        sampling = {name: getattr(args, name, None) for name in _SAMPLING}
        body: dict[str, Any] = {
            "model": self._chance.choice(self._models),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in sampling.items() if value is not None},
        }
        if args.ignore_eos:
            body["ignore_eos"] = True
        if args.backend == CHAT:
            messages = [{"role": "user", "content": _content(request)}]
            body |= {"messages": messages, "max_completion_tokens": request.output_len}
            if "logprobs" in body:
                body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        else:
            body |= {"prompt": request.prompt, "max_tokens": request.output_len}
        return json.dumps({**body, **args.extra_body}).encode()


def _content(request: Request) -> Any:
    if not request.images:
        return request.prompt
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in request.images]
    return [*parts, {"type": "text", "text": request.prompt}]


def due_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start, with gamma-distributed gaps of mean 1 / rate; burstiness 1 is Poisson, less is burstier."""
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng((seed, 2)).gamma(burstiness, 1 / (rate * burstiness), count)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def requests_of(args: argparse.Namespace, as_words: bool = False) -> list[Request]:
    """The prompts that the flags ask for. Raises DatasetError."""
    tokenizer = datasets.load_tokenizer(args.tokenizer)
    match args.dataset_name:
        case "sharegpt":
            return datasets.sharegpt_requests(args.dataset_path, args.num_prompts, args.output_len, args.seed, tokenizer)
        case "custom":
            output_len = args.output_len if args.output_len is not None else 256
            return datasets.custom_requests(args.dataset_path, args.num_prompts, output_len, tokenizer)
    input_len = args.input_len if args.input_len is not None else 1024
    options = {
        "range_ratio": args.random_range_ratio,
        "prefix_len": args.random_prefix_len,
        "seed": args.seed,
        "tokenizer": tokenizer,
        "as_words": as_words,
    }
    if args.dataset_name == "random-rerank":
        size, is_reranker = args.random_batch_size, not args.no_reranker
        return pooling.random_pairs(args.num_prompts, input_len, size, is_reranker, **options)
    requests = datasets.random_requests(
        args.num_prompts, input_len, args.output_len if args.output_len is not None else 128, **options
    )
    if args.dataset_name == "random-mm":
        width, height = args.random_mm_image_size
        requests = with_images(requests, args.random_mm_base_items_per_request, width, height, args.seed)
    return requests


def bench_serve(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 if the server cannot be reached or a request failed; 130 interrupted."""
    url = args.base_url or f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    ready_by = clock() + args.ready_check_timeout_sec
    begin = datetime.now()
    try:
        model = args.served_model_name or args.model or _first_model(args, url, ready_by)
        requests = requests_of(args, as_words=args.backend in (CHAT, *pooling.WORDS))
        requests = pooling.batched(requests, args.random_batch_size) if args.dataset_name == "random" else requests
        path = "/" + (args.endpoint or PATHS[args.backend]).removeprefix("/")
        target = Target.of(url, path, api_key_of(args))._replace(headers=tuple(args.header))
        server = ChatServer(url, api_key_of(args), args.header)
        file = result_path(args, model, begin) if args.save_result or args.save_detailed else None
    except (ChatError, DatasetError, ValueError) as error:
        print(f"quire bench serve: {error}", file=sys.stderr)
        return 1
    measured = uvloop.run(_measure(args, target, model, requests, ready_by, server))
    if measured.problem:
        print(f"quire bench serve: the first request failed: {measured.problem}", file=sys.stderr)
        return 1
    return _tell(args, measured, model, begin, file)


def _tell(args: argparse.Namespace, measured: "Measured", model: str, begin: datetime, file: Path | None) -> int:
    """Print the figures, and save them unless interrupted; returns the exit code."""
    results = measured.results
    found = summary(results, measured.seconds, args.percentile_metrics, args.metric_percentiles, args.goodput)
    found |= figures(measured.drafts)
    if args.backend in POOLING:
        found = {name: value for name, value in found.items() if name not in pooling.OF_OUTPUT}
    print(report(found, args.percentile_metrics, args.metric_percentiles))
    for reason in sorted({r.error for r in results if r.error})[:5]:
        print(f"failed: {reason}", file=sys.stderr)
    if measured.interrupted:
        unsaved = "; nothing is saved" if file is not None else ""
        print(f"interrupted: figures of {len(results)} requests, of {measured.asked}{unsaved}", file=sys.stderr)
        return 130
    if file is not None:
        file.write_text(json.dumps(_contents(args, begin, model, found, results)))
        print(f"saved: {file}")
    print(outcome(found))
    return 1 if found["failed"] else 0


def _first_model(args: argparse.Namespace, url: str, ready_by: float) -> str:
    """The server's first model, asked for until ready_by. Raises ChatError."""
    server = ChatServer(url, api_key_of(args), args.header)
    while True:
        try:
            return server.first_model()
        except NotReadyError:
            if clock() > ready_by:
                raise
        time.sleep(ASK_AGAIN_S)


class Measured(NamedTuple):
    """problem: why nothing was measured. interrupted: the results are only of requests that had ended by then."""

    results: list[Result]
    seconds: float
    problem: str = ""
    interrupted: bool = False
    drafts: SpeculationStats | None = None
    asked: int = 0


async def _measure(
    args: argparse.Namespace, target: Target, model: str, requests: Sequence[Request], ready_by: float, server: ChatServer
) -> Measured:
    """Send one request first, which must succeed, then the warm-ups, then the load."""
    warm = Load(target, args, model, None)
    first = await _first(warm, requests[0], ready_by)
    if not first.error:
        await warm.run([requests[i % len(requests)] for i in range(args.num_warmups)], [0.0] * args.num_warmups)
    await warm.close()
    if warm.interrupted:
        raise asyncio.CancelledError
    if first.error:
        return Measured([], 0.0, first.error)
    due = due_times(len(requests), args.request_rate, args.burstiness, args.seed)
    counts = ServerCounts(server)  # blocks the loop, on which nothing runs now
    with Progress(len(requests), args.disable_tqdm) as progress:
        load = Load(target, args, model, progress)
        results, seconds = await load.run(requests, due)
        await load.close()
    return Measured(results, seconds, interrupted=load.interrupted, drafts=counts.since(), asked=len(requests))


async def _first(load: Load, request: Request, ready_by: float) -> Result:
    """The first request; repeated until ready_by if the server, or its proxy, is not up yet."""
    while True:
        result = await load.ask(request)
        if not re.match(r"cannot connect|5\d\d:", result.error) or clock() > ready_by:
            return result
        await asyncio.sleep(ASK_AGAIN_S)


def result_path(args: argparse.Namespace, model: str, begin: datetime) -> Path:
    """The file for the figures, checked before they are measured. Raises ValueError if it cannot be written."""
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    default = f"{args.label or args.backend}-{_rate(args)}qps{limit}-{model.split('/')[-1]}-{begin:{_DATE}}.json"
    path = Path(args.result_dir or ".") / (args.result_filename or default)
    check_writable(path, make_folder=True)
    return path


def _rate(args: argparse.Namespace) -> float | str:
    """The request rate for JSON."""
    return "inf" if args.request_rate == float("inf") else args.request_rate


def check_writable(path: Path, make_folder: bool = False) -> None:
    """Raises ValueError if no file can be written there."""
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{path} cannot be written")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _contents(
    args: argparse.Namespace, begin: datetime, model: str, found: dict[str, Any], results: Sequence[Result]
) -> dict[str, Any]:
    """The contents of the result file, under vLLM's keys."""
    data: dict[str, Any] = {
        "date": f"{begin:{_DATE}}",
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": args.tokenizer,
        "num_prompts": len(results),
        **dict(args.metadata),
        "request_rate": _rate(args),
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **found,
    }
    if args.save_detailed:
        first = min((r.sent for r in results), default=0.0)
        data |= {
            "input_lens": [r.prompt_len for r in results],
            "output_lens": [r.output_len for r in results],
            "ttfts": [r.ttft if not r.error else 0.0 for r in results],
            "itls": [r.gaps for r in results],
            "start_times": [r.sent - first for r in results],
            "generated_texts": [r.text for r in results],
            "errors": [r.error for r in results],
        }
    return data


def timed(work: Any) -> tuple[Any, float]:
    """The result of `work`, and the seconds it took."""
    begin = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begin
