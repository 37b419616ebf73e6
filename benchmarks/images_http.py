"""Images over HTTP: what does an image cost any OpenAI-compatible server, Quire or vLLM? By several processes of clients.

    python benchmarks/images_http.py --url http://127.0.0.1:8000 --model NAME                # all parts
    python benchmarks/images_http.py --url ... --model NAME --parts pages --count 512        # one part

Parts, each printed as soon as it is known:

    idle     TTFT of a 1024 x 1024 JPEG, one request at a time, median of 20; the same of a text of as many tokens
    pages    PNG pages of 1275 x 1650 with text on them, all different, 64 at once, one token out: pages/s
    answers  512 x 512 JPEG, 64 tokens of text in, 128 out, 64 at once: requests/s
    again    TTFT of an image that was sent before, over that of a text that was sent before; median of 20
    beside   64 streams of text beside five 1024 x 1024 JPEGs a second: P99 ITL and TTFT of the text, over the same beside
             texts of as many tokens

Images and requests are made before the clock runs, by the processes that send them, from the seed. A text of as many tokens is
random ids to /v1/completions, as many as the server counted for the image's prompt, so no tokenizer is needed and no cache
holds it. Biases: prompts of images take the way through the chat template, and those of text do not; with `--load-format
dummy` the answers' ids are arbitrary, so all requests ignore the end of the sequence.

Prints a line for each part, and ends in one line `RESULT {json}`. Exits with 1 if a request failed.
"""

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from sse_client import Answer, Connections, Target, clock
from tiny_words import WORDS

TIMEOUT_S = 600.0
IDS = (1000, 30_000)  # of random prompts: ordinary ones in all vocabularies of these models
BESIDE_RATE = 5.0  # images a second
ANSWER_IN = 64  # tokens of text beside an image
BESIDE_STREAMS, BESIDE_IN, BESIDE_OUT = 64, 256, 256


# ------------------------------------------------------------------------------------------------------------------ images
def photo(rng: np.random.Generator, side: int) -> bytes:
    """A JPEG of smooth noise with some grain, which compresses about as photos do."""
    coarse = rng.integers(0, 256, (max(side // 16, 1),) * 2 + (3,), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC), np.int16)
    grain = rng.integers(-6, 7, (side, side, 1), dtype=np.int16)
    return _encoded(Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)), "JPEG", quality=90)


def page(rng: np.random.Generator, width: int = 1275, height: int = 1650) -> bytes:
    """A PNG of words on white."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for y in range(60, height - 60, 22):
        draw.text((60, y), " ".join(rng.choice(WORDS, max(width // 45, 1))), fill="black")
    return _encoded(image, "PNG")


def _encoded(image: Image.Image, form: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


# ---------------------------------------------------------------------------------------------------------------- requests
class Asker:
    """Makes requests, and sends them. rng: of this process alone."""

    def __init__(self, args: argparse.Namespace, seed: tuple[int, ...]) -> None:
        self.model, self.rng = args.model, np.random.default_rng((args.seed, *seed))
        self.target = Target.of(args.url, "/v1/chat/completions", args.api_key)
        self.completions = self.target._replace(path=self.target.path.replace("/chat/completions", "/completions"))
        self._connections = Connections(self.target)

    def image(self, data: bytes, form: str, text: str, out: int) -> bytes:
        url = f"data:image/{form};base64,{base64.b64encode(data).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        return self.target.request(self._body({"messages": [{"role": "user", "content": parts}]}, out))

    def text(self, tokens: int, out: int) -> bytes:
        ids = self.rng.integers(*IDS, max(tokens, 1)).tolist()
        return self.completions.request(self._body({"prompt": ids}, out))

    def chat(self, text: str, out: int) -> bytes:
        return self.target.request(self._body({"messages": [{"role": "user", "content": text}]}, out))

    def words(self, length: int) -> str:
        return " ".join(self.rng.choice(WORDS, length))[:length]

    def _body(self, fields: dict[str, Any], out: int) -> bytes:
        fields |= {"model": self.model, "max_tokens": out, "temperature": 0, "ignore_eos": True, "stream": True}
        return json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()

    async def ask(self, data: bytes) -> Answer:
        """Raises RuntimeError for an error."""
        answer = await self._connections.ask(data, TIMEOUT_S)
        if answer.error:
            raise RuntimeError(answer.error)
        return answer

    def close(self) -> None:
        self._connections.abort()


def ttft_ms(answer: Answer) -> float:
    return 1e3 * (answer.first - answer.sent)


def at(values: list[float], part: float) -> float:
    """A quantile of at least one value."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


# ------------------------------------------------------------------------------------------------ parts with one connection
async def idle(args: argparse.Namespace) -> dict[str, Any]:
    asker = Asker(args, (1,))
    side = args.side or 1024
    images = [asker.image(photo(asker.rng, side), "jpeg", "What is this?", 1) for _ in range(args.warmup + args.repeats)]
    answers = [await asker.ask(each) for each in images][args.warmup :]
    tokens = answers[0].prompt_tokens
    texts = [await asker.ask(asker.text(tokens, 1)) for _ in range(args.warmup + args.repeats)][args.warmup :]
    asker.close()
    image, text = (statistics.median(map(ttft_ms, each)) for each in (answers, texts))
    return {"image_ttft_ms": image, "text_ttft_ms": text, "image_over_text": image / text, "tokens": tokens}


async def again(args: argparse.Namespace) -> dict[str, Any]:
    asker = Asker(args, (2,))
    image = asker.image(photo(asker.rng, args.side or 1024), "jpeg", "What is this?", 1)
    tokens = (await asker.ask(image)).prompt_tokens
    text = asker.text(tokens, 1)
    await asker.ask(text)
    seen = [await asker.ask(image) for _ in range(args.repeats)]
    known = [await asker.ask(text) for _ in range(args.repeats)]
    asker.close()
    image_ms, text_ms = (statistics.median(map(ttft_ms, each)) for each in (seen, known))
    return {"image_ttft_ms": image_ms, "text_ttft_ms": text_ms, "image_over_text": image_ms / text_ms, "tokens": tokens}


# ------------------------------------------------------------------------------------------------ parts with many processes
class Share(NamedTuple):
    """The part of a process of clients: so many requests, so many of them at once."""

    part: str
    number: int
    count: int
    at_once: int
    tokens: int = 0  # texts: of each; answers: characters of an image's text


Times = list[tuple[float, float, float, list[float], int]]  # of each request: sent, first, end, gaps, tokens of its prompt


async def closed(asker: Asker, requests: list[bytes], at_once: int) -> Times:
    """All requests, so many at a time."""
    left, found = iter(requests), Times()

    async def connection() -> None:
        for data in left:
            answer = await asker.ask(data)
            found.append((answer.sent, answer.first, answer.end, answer.gaps, answer.prompt_tokens))

    await asyncio.gather(*(connection() for _ in range(at_once)))
    return found


async def opened(asker: Asker, requests: list[bytes], rate: float) -> Times:
    """A request each 1 / rate seconds, whatever has become of those before."""
    found, began = Times(), clock()

    async def one(index: int, data: bytes) -> None:
        await asyncio.sleep(max(began + index / rate - clock(), 0.0))
        answer = await asker.ask(data)
        found.append((answer.sent, answer.first, answer.end, answer.gaps, answer.prompt_tokens))

    await asyncio.gather(*(one(index, data) for index, data in enumerate(requests)))
    return found


def requests_of(asker: Asker, share: Share, side: int) -> Iterator[bytes]:
    for _ in range(share.count):
        if share.part == "texts":
            yield asker.text(share.tokens, 1)
        elif share.part == "pages":
            yield asker.image(page(asker.rng, *((side, side) if side else ())), "png", "Read this page.", 1)
        elif share.part == "answers":
            yield asker.image(photo(asker.rng, side or 512), "jpeg", asker.words(share.tokens), 128)
        elif share.part == "streams":
            yield asker.text(BESIDE_IN, BESIDE_OUT)
        else:
            yield asker.image(photo(asker.rng, side or 1024), "jpeg", "What is this?", 1)


def client(args: argparse.Namespace, share: Share, ready: Any, results: Any) -> None:
    """One process: it makes its requests, waits for the others, and sends them."""
    try:
        asker = Asker(args, (3, share.number, len(share.part), share.tokens))
        requests = list(requests_of(asker, share, args.side))
        ready.wait(TIMEOUT_S)
        run = (
            opened(asker, requests, BESIDE_RATE)
            if share.part in ("images", "texts")
            else closed(asker, requests, share.at_once)
        )
        results.put((share.part, asyncio.run(run)))
    except Exception as error:  # whatever it is, the parent ends with its text instead of waiting for ever
        ready.abort()
        results.put((share.part, repr(error)[:500]))


def run_shares(args: argparse.Namespace, shares: list[Share]) -> dict[str, Times]:
    """The times of all requests by part. Raises RuntimeError if one failed."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(len(shares)), context.Queue()
    processes = [context.Process(target=client, args=(args, share, ready, results)) for share in shares]
    for process in processes:
        process.start()
    found: dict[str, Times] = {}
    errors = []
    for _ in processes:
        part, times = results.get()
        if isinstance(times, str):
            errors.append(times)
        else:
            found.setdefault(part, []).extend(times)
    for process in processes:
        process.join()
    if errors:
        raise RuntimeError(next((error for error in errors if "BrokenBarrier" not in error), errors[0]))
    return found


def split(args: argparse.Namespace, part: str, count: int, at_once: int, first: int = 0, tokens: int = 0) -> list[Share]:
    """So many requests for the processes, each with its share of those at once."""
    number = max(min(args.processes, at_once, count), 1)

    def own(total: int, index: int) -> int:
        return total * (index + 1) // number - total * index // number

    return [Share(part, first + index, own(count, index), own(at_once, index), tokens) for index in range(number)]


def rate_of(args: argparse.Namespace, part: str, name: str, tokens: int = 0) -> dict[str, Any]:
    if args.warmup:
        warm = argparse.Namespace(**{**vars(args), "seed": args.seed + 1_000_000})
        run_shares(warm, split(warm, part, min(args.concurrency, args.count), args.concurrency, tokens=tokens))
    times = run_shares(args, split(args, part, args.count, args.concurrency, tokens=tokens))[part]
    seconds = max(end for _, _, end, _, _ in times) - min(sent for sent, *_ in times)
    ttft = [1e3 * (first - sent) for sent, first, *_ in times]
    found = {name: len(times) / seconds, "seconds": seconds, "requests": len(times), "tokens": times[0][4]}
    return found | {"ttft_ms_p50": at(ttft, 0.5), "ttft_ms_p99": at(ttft, 0.99)}


async def characters_of(args: argparse.Namespace, tokens: int) -> int:
    """About how many characters have so many tokens, by the server's count."""
    asker = Asker(args, (4,))
    none, some = [(await asker.ask(asker.chat(text, 1))).prompt_tokens for text in ("a", asker.words(1000))]
    asker.close()
    return max(round(1000 * tokens / max(some - none, 1)), 1)


def pages(args: argparse.Namespace) -> dict[str, Any]:
    return rate_of(args, "pages", "pages_per_s")


def answers(args: argparse.Namespace) -> dict[str, Any]:
    return rate_of(args, "answers", "requests_per_s", asyncio.run(characters_of(args, ANSWER_IN)))


def beside(args: argparse.Namespace) -> dict[str, Any]:
    """Streams with images beside them, then the same streams with texts in the images' places."""
    streams = min(args.concurrency, BESIDE_STREAMS)
    shares = split(args, "streams", max(args.count, streams), streams, first=100)
    images = max(int(args.seconds * BESIDE_RATE), 1)
    with_images = run_shares(args, [*shares, Share("images", 99, images, 0)])
    tokens = with_images["images"][0][4]
    other = argparse.Namespace(**{**vars(args), "seed": args.seed + 1})
    with_texts = run_shares(other, [*shares, Share("texts", 98, images, 0, tokens)])
    found: dict[str, Any] = {"tokens": tokens, "streams": len(with_images["streams"]), "images": images}
    for name, part, times in (("images", "images", with_images), ("text", "texts", with_texts)):
        begin, end = (pick(times[part]) for pick in (_first_sent, _last_end))
        own = [each for each in times["streams"] if each[0] >= begin and each[2] <= end] or times["streams"]
        ttft, gaps = [1e3 * (first - sent) for sent, first, *_ in own], [1e3 * gap for each in own for gap in each[3]]
        found |= {f"itl_ms_p99_beside_{name}": at(gaps, 0.99) if gaps else 0.0, f"ttft_ms_beside_{name}": at(ttft, 0.5)}
        found |= {f"ttft_ms_p99_beside_{name}": at(ttft, 0.99), f"streams_beside_{name}": len(own)}
    for name in ("itl_ms_p99", "ttft_ms", "ttft_ms_p99"):
        found[f"{name}_ratio"] = found[f"{name}_beside_images"] / max(found[f"{name}_beside_text"], 1e-9)
    return found


def _first_sent(times: Times) -> float:
    return min(sent for sent, *_ in times)


def _last_end(times: Times) -> float:
    return max(end for _, _, end, _, _ in times)


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "idle": lambda args: asyncio.run(idle(args)),
    "pages": pages,
    "answers": answers,
    "again": lambda args: asyncio.run(again(args)),
    "beside": beside,
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s, in this order")
    parser.add_argument("--repeats", type=int, default=20, help="requests one at a time, of which the median counts")
    parser.add_argument("--count", type=int, default=512, help="pages, answers, and streams of text")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long images come beside streams")
    parser.add_argument("--processes", type=int, default=8, help="of clients")
    parser.add_argument("--warmup", type=int, default=3, help="requests one at a time that do not count; 0: no warm-up at all")
    parser.add_argument("--side", type=int, default=0, help="pixels of all images' sides, for a try")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return args


def shown(found: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items())


def main(given: list[str] | None = None) -> int:
    args, results, failed = arguments(given), {}, 0
    for part in args.parts:
        try:
            results[part] = PARTS[part](args)
        except RuntimeError as error:
            results[part], failed = {"error": str(error)[:500]}, 1
        print(f"{part:8} {shown(results[part])}", flush=True)
    print("RESULT", json.dumps({"model": args.model, "processes": args.processes, **results}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
