"""AsyncClient: requests to an engine core from asyncio, straight over its socket, as text in and text out.

Skeleton: signatures are final, bodies follow.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from quire.frontend.outputs import Delta, RequestMetrics, RequestOutput, TokenLogprobDict
from quire.frontend.tokenizer import Tokenizer
from quire.ipc.messages import Beat, Welcome
from quire.ipc.sampling import SamplingParams


class ClientError(Exception):
    """Base of what a request can fail with; the text is for the user and holds nothing secret."""


class InvalidRequest(ClientError, ValueError):
    """The request itself is wrong: HTTP 400. A ValueError too, so that Python callers need not know this class."""


class TooLong(InvalidRequest):
    """The prompt leaves no room for a token in the context (or the KV cache): HTTP 400."""


class Overloaded(ClientError):
    """The core's waiting queue is full: HTTP 503 with Retry-After."""


class EngineDown(ClientError):
    """There is no core, or it was lost while the request ran: HTTP 503 with Retry-After. The client reconnects by itself."""


class EngineError(ClientError):
    """The engine failed on this request (a dead worker): HTTP 500."""


class Stream:
    """The tokens of one submitted request: an async iterator of `list[Delta]`, at most one Delta per child and turn.

    Each turn yields all that has arrived since the last, so a slow consumer holds at most the request's whole output.
    Iteration ends when every child has finished, and raises the request's ClientError if it failed. Dropping the
    last reference to a Stream that has not ended aborts the request.
    """

    id: int  # unique within the client
    request_name: str
    num_prompt_tokens: int
    num_cached_tokens: int | None  # known with the first token
    prompt_logprobs: list[TokenLogprobDict | None] | None  # complete with the first token; None unless asked for
    metrics: RequestMetrics
    finished: bool

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> list[Delta]: ...

    async def collect(self) -> list[Delta]:
        """Wait for the end and return one merged Delta per child, by index: cheaper than iterating."""
        ...

    def cancel(self) -> None:
        """Abort the request. Idempotent, never blocks, no error after the end. Unfinished children end with "abort"."""
        ...


class AsyncClient:
    """One connection to a core. `async with AsyncClient("ipc:///run/quire.sock") as client:` or `await client.connect()`."""

    tokenizer: Tokenizer  # of the current core
    welcome: Welcome  # limits, served names, eos ids of the current core
    beat: Beat | None  # latest
    beat_time: float  # time.monotonic() when it came
    is_connected: bool

    async def connect(self, timeout_s: float | None = 30.0) -> None:
        """Connect and fetch the files. Raises EngineDown when there is no core within the time."""
        ...

    async def close(self) -> None: ...

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_name: str = "",
    ) -> Stream:
        """Check and send one request, without waiting. Raises InvalidRequest, TooLong, EngineDown."""
        ...

    def generate(
        self,
        prompt: str | Sequence[int] | dict[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]: ...

    def chat(
        self, messages: list[dict[str, Any]], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]: ...

    def abort(self, request_id: str | int) -> None: ...

    def health(self) -> str | None:
        """None if the engine is well, else what is wrong (a fixed text), for /health."""
        ...
