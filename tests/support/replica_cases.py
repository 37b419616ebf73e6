"""For tests of Replicas: cores in threads, a client of all of them, and helpers for both."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import toy_tokenizers
from fake_core import FakeCore
from own_loop import heard, in_own_loop

from quire.frontend.client.stream import Stream
from quire.frontend.replicas.replicas import Replicas
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import AddRequest, RequestError
from quire.ipc.messages.stats import CacheInfo
from quire.ipc.sampling import SamplingParams

TOKENIZER = Tokenizer.from_files(toy_tokenizers.files())
THE, CAT, WORLD = (TOKENIZER.encode(t)[0] for t in (" the", " cat", " world"))
ENDLESS = SamplingParams(max_tokens=None)
CACHE = CacheInfo(4, 1000, True, 0.9, "auto")  # blocks of 4 tokens


def with_cores(*options: dict[str, Any]) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run the test in a loop of its own with FakeCores, and a client of all of them; at its end nothing is left behind."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def run(**kwargs: Any) -> None:
            with tempfile.TemporaryDirectory() as folder:
                places = [{"cache": CACHE, "address": f"ipc://{folder}/{i}"} for i in range(len(options))]
                cores = [FakeCore(**{**place, **each}) for place, each in zip(places, options, strict=True)]
                try:
                    async with Replicas([core.address for core in cores], [None] * len(cores)) as client:
                        await test(cores, client, **kwargs)
                        client.check()
                finally:
                    for core in cores:
                        core.stop()

        return in_own_loop(test, run)

    return decorate


def engine_of(client: Replicas, stream: Stream) -> int:
    return client._sent[stream.id].engine if stream.id in client._sent else -1  # -1: its engine was lost, and it waits


async def refuse(core: FakeCore) -> AddRequest:
    request = await heard(core, AddRequest)
    core.say(RequestError(core.epoch, request.id, "overloaded", "too many requests are waiting; try again later"))
    return request


async def ended(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.cancel()
    await asyncio.sleep(0)
