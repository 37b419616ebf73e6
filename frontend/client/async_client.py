"""AsyncClient: requests to an engine core from asyncio, straight over its socket, as text in and text out.

It checks and numbers requests, hands what arrives to their `Stream`s (dispatch.py, stream.py) and keeps the latest Beat; when
the core is lost, all that runs fails and the link reconnects. All methods belong to the event loop's thread.

    async with AsyncClient("ipc:///run/quire.sock") as client:
        async for output in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import msgspec
import numpy as np

from quire.frontend.client.dispatch import Dispatcher
from quire.frontend.client.encoding import checked_ids, encode_prompt
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.prompt import Prompt, split_prompt
from quire.frontend.client.request_outputs import request_outputs
from quire.frontend.client.stream import (
    ERRORS,
    ClientError,
    EngineDown,
    EngineError,
    InvalidRequest,
    Overloaded,
    RequestState,
    Stream,
    TooLong,
)
from quire.frontend.client.utility_calls import A, UtilityCalls
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.limits import output_room
from quire.ipc.links.curve import FrontendKeys
from quire.ipc.links.frontend_to_core import FrontendToCore, LinkBusy, LinkDown
from quire.ipc.messages import (
    AddRequest,
    Beat,
    Candidates,
    CoreMessage,
    FrontendMessage,
    Generate,
    PromptLogprobs,
    RequestError,
    StepOutputs,
    TokenInputs,
    UtilityResult,
    Welcome,
)
from quire.ipc.process.cpus import cpu_share
from quire.ipc.sampling import SamplingParams, check_against
from quire.ipc.utilities import UtilityCall

__all__ = ["AsyncClient", "ClientError", "EngineDown", "EngineError", "InvalidRequest", "Overloaded", "Prompt", "Stream",
           "TooLong"]  # fmt: skip

BEAT_TIMEOUT_S = 2.0
WATCH_S = 2e-2  # so long a lone request's first answer is looked for without sleep
FEW_CORES = 4  # with no more than these the engine's own processes, which spin, too, are given precedence


class AsyncClient:
    """One connection to a core. `async with AsyncClient(address)`, or `connect` and `close`.

    welcome: limits, served names, end-of-sequence ids of the present or last core. tokenizer: its tokenizer. beat: the latest
    Beat, which came at beat_time (time.monotonic()).
    """

    def __init__(self, address: str, keys: FrontendKeys | None = None) -> None:
        self.address = address
        self.beat: Beat | None = None
        self.beat_time = 0.0
        self._keys = keys
        self._link: FrontendToCore | None = None
        self._connecting = asyncio.Lock()
        self._num_closed = 0
        self._welcome: Welcome | None = None
        self._tokenizer: Tokenizer | None = None
        self._digests: dict[str, str] = {}  # of the files that the tokenizer was made of
        self._broken: str | None = None  # what is wrong with the core's files
        self._may_spin = False
        self._next_id = 0
        self._dispatcher = Dispatcher(self._tell)
        self._utilities = UtilityCalls()
        self._unsent: deque[FrontendMessage] = deque()  # Abort and Finish that found the link busy

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self, timeout_s: float | None = 30.0) -> None:
        """Connect and fetch the files. Raises EngineDown without a core in time, ValueError if its tokenizer is unreadable.

        Nothing to do where it is connected already, or reconnecting. Several callers at once share one connection.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._connecting.acquire()
        except TimeoutError:
            raise EngineDown(f"the client has been connecting to {self.address} for {timeout_s:g} s") from None
        try:
            if self._link is None:
                await self._connect(timeout_s)
        finally:
            self._connecting.release()

    async def _connect(self, timeout_s: float | None) -> None:
        num_closed = self._num_closed
        try:
            link = await FrontendToCore.connect(
                self.address,
                on_message=self._on_message,
                on_lost=self._on_lost,
                on_connected=self._on_connected,
                keys=self._keys,
                timeout_s=timeout_s,
            )
        except LinkDown as error:
            raise EngineDown(str(error)) from error
        if self._num_closed != num_closed:
            await link.close()
            raise EngineDown("the client was closed")
        self._link = link
        assert link.welcome is not None
        self._on_connected(link.welcome)  # the first call came before we had the link
        if self._broken is not None:
            await self.close()
            raise ValueError(self._broken)

    async def close(self) -> None:
        """Abort what runs and disconnect. May be called again."""
        self._num_closed += 1
        link, self._link = self._link, None
        if link is not None:
            await link.close()
            self._dispatcher.fail_all(EngineDown("the client was closed"))
            self._utilities.fail_all(EngineDown("the client was closed"))

    # ------------------------------------------------------------------------------------------------- what is known
    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.connected

    @property
    def welcome(self) -> Welcome:
        if self._welcome is None:
            raise EngineDown("not connected yet")
        return self._welcome

    @property
    def tokenizer(self) -> Tokenizer:
        """The present or last core's tokenizer. Raises InvalidRequest if it has none: such an engine takes token ids only."""
        if self._tokenizer is None:
            raise InvalidRequest("the engine has no tokenizer: give token ids")
        return self._tokenizer

    @property
    def num_requests(self) -> int:
        """Requests submitted through this client that have not ended."""
        return len(self._dispatcher.requests)

    def health(self) -> str | None:
        """None if the engine is well, else what is wrong, in a fixed text."""
        if not self.is_connected:
            return "there is no connection to the engine"
        if self._broken is not None:
            return "the engine's tokenizer cannot be read"
        if time.monotonic() - self.beat_time > BEAT_TIMEOUT_S:
            return "the engine does not answer"
        if self.beat is not None and not self.beat.ready:
            return "the engine's workers are starting"
        if self.beat is not None and self.beat.oldest_step_s > self.welcome.step_timeout_s:
            return "the engine is stuck in a step"
        return None

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults, from generation_config.json."""
        return SamplingParams(**(self._tokenizer.generation_defaults if self._tokenizer is not None else {}))

    # ------------------------------------------------------------------------------------------------- requests
    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; long texts are tokenized off the event loop. Raises TooLong for what can never fit."""
        return await encode_prompt(self.tokenizer, text, add_special_tokens, self.welcome.limits.max_model_len)

    def submit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_name: str = "",
        candidates: Candidates | None = None,
    ) -> Stream:
        """Check and send one request, without waiting. candidates: see the message; the answer is `Stream.candidates`.
        max_tokens is cut to what the context leaves. Raises InvalidRequest, TooLong, Overloaded (our queue to the core is
        full), EngineDown. What the core finds wrong is raised by the Stream.
        """
        link = self._link
        if link is None or not link.connected or self._broken is not None:
            raise EngineDown(self._broken or "there is no connection to the engine")
        ids = self._check_prompt(prompt_token_ids)
        params = self._check_params(params, len(ids))
        if abs(priority) >= 1 << 31:
            raise InvalidRequest("priority must fit 32 bits")
        self._next_id += 1
        request_id, arrival = self._next_id, time.time()
        try:
            inputs, task = TokenInputs(ids.tobytes()), Generate(params, candidates)
            link.send(AddRequest(link.epoch, request_id, inputs, task, priority, cache_salt, arrival))
        except LinkBusy as error:
            raise Overloaded("the engine does not take requests as fast as they come: try again later") from error
        except LinkDown as error:
            raise EngineDown("there is no connection to the engine") from error
        except UnicodeEncodeError as error:
            raise InvalidRequest("a string of the request is not valid Unicode") from error
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        # made while the request travels: answers come by the event loop, in a later turn
        try:
            state = RequestState(request_id, request_name or str(request_id), ids, params, self._tokenizer, arrival)
        except BaseException:  # passed on, whatever it is: nobody would listen to the answer
            self._dispatcher.disown(request_id, params)
            raise
        self._dispatcher.add(state)
        if self._may_spin and self.num_requests == 1:
            link.watch(WATCH_S)
        return Stream(state, self._dispatcher.cancel)

    def _check_prompt(self, prompt_token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The ids as int32. Raises InvalidRequest, TooLong."""
        return checked_ids(prompt_token_ids, self.welcome.limits)

    def _check_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Params as they go to the core. Raises InvalidRequest."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        limits = self.welcome.limits
        try:
            if params.bad_words and params.bad_words_token_ids is None:
                params = self.tokenizer.with_bad_words(params)
            check_against(params, vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        if params.stop and not params.detokenize:
            raise InvalidRequest("stop strings need detokenize")
        if params.stop:
            _ = self.tokenizer  # raises without one
        room = output_room(num_prompt_tokens, limits.max_model_len)
        if params.max_tokens is not None and params.max_tokens > room:
            params = msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        return params

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """RequestOutputs until the end, as from vLLM's AsyncLLM (`output_kind` says which: cumulative ones). Leaving the loop
        aborts the request. Without sampling_params, the model's defaults. Raises ClientErrors.
        """
        params = sampling_params if sampling_params is not None else self.default_sampling_params()
        if isinstance(params, SamplingParams):
            params = params.clone()  # what the caller does to it from now on is for other requests
        text, ids = await self._resolve(prompt)
        stream = self.submit(ids, params, priority=priority, cache_salt=cache_salt, request_name=request_id or "")
        try:
            async for output in request_outputs(stream, text, ids, params):
                yield output
        finally:
            stream.cancel()

    async def _resolve(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt as (its text or None, its token ids)."""
        text, ids = split_prompt(prompt)
        if ids is not None:
            return text, list(ids)
        assert text is not None
        return text, await self.encode(text)

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """A conversation as prompt text; options as for Tokenizer.render_chat. Raises InvalidRequest."""
        try:
            return self.tokenizer.render_chat(messages, **options)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    async def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """`generate` for a conversation; options (tools, chat_template, ...) as for Tokenizer.render_chat."""
        text = self.render_chat(messages, **options)
        ids = await self.encode(text, add_special_tokens=False)
        prompt = {"prompt": text, "prompt_token_ids": ids}
        outputs = self.generate(prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def abort(self, request: str | int) -> None:
        """Abort a request by its name (all of that name) or its Stream's id. Unknown ones have ended: nothing happens."""
        for state in [s for s in self._dispatcher.requests.values() if request in (s.name, s.id)]:
            self._dispatcher.cancel(state.id)

    async def utility(self, call: UtilityCall, kind: type[A]) -> A:
        """Ask the engine for something beside requests; its answer is of this kind. Raises ClientErrors."""
        return await self._utilities.call(self._link, call, kind)

    # ------------------------------------------------------------------------------------------------- to and from the core
    def _tell(self, message: FrontendMessage) -> None:
        """Send what must not be lost: later, if the link is busy; never, if the core is lost."""
        if self._link is not None:
            self._link.hold()  # a request of a thousand prompts that ends has as many to send
        self._unsent.append(message)
        self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            while self._unsent and self._link is not None:
                self._link.send(self._unsent[0])
                self._unsent.popleft()
        except LinkBusy:
            pass  # tried again with the next Beat
        except LinkDown:
            self._unsent.clear()  # a lost core has dropped our requests itself

    def _on_connected(self, welcome: Welcome) -> None:
        if self._link is None:
            return  # the first time: `connect` calls again
        self._welcome = welcome
        self._may_spin = welcome.spins and cpu_share() > FEW_CORES
        self._dispatcher.begin(welcome.epoch, welcome.eos_token_ids)
        self.beat, self.beat_time = None, time.monotonic()
        digests = {file.name: file.digest for file in welcome.files}
        if digests == self._digests:
            return
        self._digests, self._broken = digests, None
        try:
            self._tokenizer = Tokenizer.from_files(self._link.files) if "tokenizer.json" in digests else None
        except ValueError as error:
            self._broken = f"the engine's tokenizer cannot be read: {error}"

    def _on_lost(self, reason: str) -> None:
        self._unsent.clear()
        self._dispatcher.fail_all(EngineDown(f"the engine was lost: {reason}"))
        self._utilities.fail_all(EngineDown(f"the engine was lost: {reason}"))

    def _on_message(self, message: CoreMessage) -> None:
        match message:
            case StepOutputs():
                self._dispatcher.outputs(message)
            case Beat():
                self.beat, self.beat_time = message, time.monotonic()
                self._send_unsent()
                self._dispatcher.forget_long_dropped()
            case PromptLogprobs():
                self._dispatcher.prompt_logprobs(message)
            case RequestError():
                self._dispatcher.fail(message.id, ERRORS[message.code](message.message))
            case UtilityResult():
                self._utilities.answered(message)
