"""A Dispatcher and its streams without sockets, to test what consumers get from arriving messages."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import toy_tokenizers
from fake_core import outputs

from quire.frontend.client.dispatch import Dispatcher
from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import RequestState, Stream
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import FrontendMessage, sequence_key
from quire.ipc.sampling import SamplingParams

TOKENIZER = Tokenizer(toy_tokenizers.byte_level())
EOS = TOKENIZER.backend.token_to_id("</s>")
PROMPT = TOKENIZER.encode("hello")
THE, CAT, COMMA, WORLD, BANG = (TOKENIZER.encode(t)[0] for t in (" the", " cat", ",", " world", "!"))


class Bench:
    """A Dispatcher, what it has told the core, and streams of requests 1, 2, ..."""

    def __init__(self) -> None:
        self.sent: list[FrontendMessage] = []
        self.dispatcher = Dispatcher(self.sent.append)
        self.dispatcher.begin(1, [EOS])
        self.count = 0

    def submit(self, prompt: list[int] = PROMPT, **params: Any) -> Stream:
        self.count += 1
        state = RequestState(self.count, f"r{self.count}", np.array(prompt, np.int32), SamplingParams(**params), TOKENIZER, 0.0)
        self.dispatcher.add(state)
        return Stream(state, self.dispatcher.cancel)

    def arrive(self, tokens: list[tuple[int, int]], *args: Any, **more: Any) -> None:
        """Tokens of (request, token), or of (key, token) for keys beyond 255."""
        keyed = [(key(r) if r < 256 else r, t) for r, t in tokens]
        ends = {key(r) if r < 256 else r: reason for r, reason in (args[0] if args else {}).items()}
        stops = {key(r) if r < 256 else r: token for r, token in more.pop("stops", {}).items()}
        self.dispatcher.outputs(outputs(keyed, ends, stops=stops, **more))
        self.dispatcher.check()


def key(request: int, child: int = 0) -> int:
    return sequence_key(request, child)


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(**kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(Bench(), **kwargs), 100))

    run.__name__ = test.__name__
    parameters = list(inspect.signature(test).parameters.values())[1:]  # pytest's: all but the bench
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


async def rest(stream: Stream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]
