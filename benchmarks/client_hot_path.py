"""Host cost of the frontend's text side per token: decode a step message, dispatch it, detokenize, wake and run consumers.

No core, no sockets, no HTTP: encoded StepOutputs are decoded and given to the Dispatcher in an event loop in which one task per
stream iterates, as in the HTTP routes. So it leaves out the ZeroMQ receive (some 10 us a message) and SSE.
`python benchmarks/client_hot_path.py [--streams 256] [--steps 400]`; the last line is one JSON object of us per token.
"""

import argparse
import asyncio
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from quire.frontend.client.dispatch import Dispatcher
from quire.frontend.client.stream import RequestState, Stream
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import CoreMessage, Finished, StepOutputs, TokenLogprobs
from quire.ipc.sampling import SamplingParams


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE of 4,000 tokens, trained on this repository's own text."""
    texts = [p.read_text() for p in sorted((Path(__file__).parent.parent / "ipc").glob("*.py"))]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False)
    )
    return Tokenizer(backend)


def messages(keys: list[int], vocab_size: int, steps: int, logprobs: int | None) -> list[bytes]:
    rng = np.random.default_rng(0)
    wire_keys = np.array(keys, dtype="<i8").tobytes()
    encoded = []
    for step in range(steps):
        tokens = rng.integers(1, vocab_size, len(keys), dtype="<i4")
        rows = []
        if logprobs is not None:
            top = rng.integers(1, vocab_size, logprobs, dtype="<i4").tobytes()
            rows = [TokenLogprobs(-1.0, 3, top, bytes(4 * logprobs)) for _ in keys]
        finished = [Finished(k, "length") for k in keys] if step == steps - 1 else []
        encoded.append(msgspec.msgpack.encode(StepOutputs(1, step, wire_keys, tokens.tobytes(), finished, [], rows)))
    return encoded


async def run(tokenizer: Tokenizer, params: SamplingParams, streams: int, steps: int, consume: Callable) -> float:
    """us per token, everything included."""
    dispatcher = Dispatcher(lambda message: None)
    states = [RequestState(i, "", np.array([5], dtype=np.int32), params, tokenizer, 0.0) for i in range(streams)]
    for state in states:
        dispatcher.add(state)
    keys = [state.sequences[0].key for state in states]
    wire = messages(keys, tokenizer.vocab_size, steps, params.logprobs)
    decoder = msgspec.msgpack.Decoder(CoreMessage)
    tasks = [asyncio.create_task(consume(Stream(state, dispatcher.cancel))) for state in states]
    await asyncio.sleep(0)
    start = time.perf_counter()
    for data in wire:
        dispatcher.outputs(decoder.decode(data))
        await asyncio.sleep(0)  # every consumer gets its turn
    counts = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start
    assert counts == [steps] * streams
    dispatcher.check()
    return seconds / (streams * steps) * 1e6


async def iterate(stream: Stream) -> int:
    tokens = 0
    async for deltas in stream:
        for delta in deltas:
            tokens += len(delta.token_ids)
    return tokens


async def collect(stream: Stream) -> int:
    return sum([len(delta.token_ids) for delta in await stream.collect()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    base = {"max_tokens": args.steps}
    cases = {
        "iterate": (SamplingParams(**base), iterate),
        "iterate_2_stop_strings": (SamplingParams(**base, stop=["\n\n\n\n", "<|user|>"]), iterate),
        "iterate_logprobs_5": (SamplingParams(**base, logprobs=5), iterate),
        "iterate_ids_only": (SamplingParams(**base, detokenize=False), iterate),
        "collect": (SamplingParams(**base), collect),
    }
    result: dict[str, object] = {"python": platform.python_version(), "streams": args.streams, "steps": args.steps}
    for name, (params, consume) in cases.items():
        best = min(uvloop.run(run(tokenizer, params, args.streams, args.steps, consume)) for _ in range(3))
        result[name + "_us_per_token"] = round(best, 2)
        print(f"{name}: {best:.2f} us per token, {1e6 / best:,.0f} tokens/s", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
