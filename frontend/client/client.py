"""Client: the base of all clients of engines: it checks requests before they are sent, and turns answers into RequestOutputs.

It tokenizes prompts and checks bounds. Its subclasses send requests to one engine (async_client.py) or to several
(frontend/replicas/replicas.py). Routes, `LLM` and similar classes use only this class. Everything happens in the event loop's
thread.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, Self

import msgspec
import numpy as np

from quire.frontend.client import pool_calls
from quire.frontend.client.encoding import checked_ids, encode_marked, encode_prompt
from quire.frontend.client.media import PlacedItem, wire
from quire.frontend.client.media_data import chat_with_media, opened, with_media, written
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.pooling import Ids, PooledState, joined_ids, pool_task
from quire.frontend.client.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
)
from quire.frontend.client.prompt import Prompt, PromptParts, split_prompt
from quire.frontend.client.request_checks import check_priority, with_number_of_logprobs
from quire.frontend.client.request_outputs import request_outputs
from quire.frontend.client.stream import EngineDown, InvalidRequest, RequestState, Stream
from quire.frontend.client.terms import NO_TERMS, Terms
from quire.frontend.client.utility_calls import A
from quire.frontend.media.items import Media
from quire.frontend.media.options import NO_MEDIA_OPTIONS
from quire.frontend.media.parts import has_media
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.adapters import AdapterInfo
from quire.ipc.limits import output_room
from quire.ipc.messages.frontend import AddRequest, Candidates, Generate, Heartbeat, TokenInputs, Welcome
from quire.ipc.messages.stats import CacheInfo
from quire.ipc.messages.utilities import UtilityCall
from quire.ipc.pooling import PoolingParams, check_pooling
from quire.ipc.sampling import SamplingParams, check_against


class Engine(Protocol):
    """The client of the engine that a request was sent to."""

    def take_up(self, state: RequestState | PooledState, is_alone: bool) -> None:
        """Deliver the request's outputs to this state. is_alone: no other request runs."""

    def abort_sent(self, request_id: int, params: SamplingParams) -> None:
        """Abort a request that has no state."""


class Client(ABC):
    """address: of its engine or engines, for messages to people. heartbeat: the latest Heartbeat (for several engines with the
    sums of their sequences), which arrived at heartbeat_time (time.monotonic()). was_stopped: whether its one engine, when it
    was last lost, said that it was told to stop.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.heartbeat: Heartbeat | None = None
        self.heartbeat_time, self.was_stopped = 0.0, False
        self._welcome: Welcome | None = None
        self._tokenizer: Tokenizer | None = None
        self.media: Media | None = None  # reads and preprocesses what messages hold beside text; None: they hold text alone
        self.media_options = NO_MEDIA_OPTIONS  # for open_media (media_data.py)
        self._next_id = 0
        self.lora_numbers: dict[int, str] = {}  # of LoRARequests -> their names
        self._adapters: dict[str, AdapterInfo] = {}

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def connect(self, timeout_s: float | None = 30.0) -> None:
        """Connect and fetch the files. Raises EngineDown if no engine answers in time, ValueError for an unusable one."""

    @abstractmethod
    async def close(self) -> None:
        """Abort running requests and disconnect. May be called again."""

    # --------------------------------------------------------------------------------------------------------- state
    @property
    @abstractmethod
    def engines(self) -> "Sequence[Client]":
        """The clients of single engines that this client consists of; just itself, if it has one engine."""

    @property
    @abstractmethod
    def is_connected(self) -> bool: ...

    @property
    def refusal(self) -> str | None:
        """Why the one engine, after it was lost and has returned, does not accept our connection."""
        return None

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Requests submitted through this client that have not ended."""

    @abstractmethod
    def health(self) -> str | None:
        """None if requests can be answered, else a fixed text that says what is wrong."""

    @property
    def welcome(self) -> Welcome:
        """Limits, served names, end-of-sequence ids of the present or last engine; of several engines the common ones."""
        if self._welcome is None:
            raise EngineDown("not connected yet")
        return self._welcome

    @property
    def cache(self) -> CacheInfo | None:
        """The KV cache of the present or last engine, as far as it is known."""
        return self._welcome.cache if self._welcome is not None else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The present or last engine's tokenizer. Raises InvalidRequest if it has none: such an engine takes token ids only."""
        if self._tokenizer is None:
            raise InvalidRequest("the engine has no tokenizer: give token ids")
        return self._tokenizer

    @property
    @abstractmethod
    def files(self) -> Mapping[str, bytes]:
        """The files of the present or last engine."""

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The LoRA adapters that are loaded, as far as we have been told."""
        return self._adapters

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults, from generation_config.json."""
        return SamplingParams(**(self._tokenizer.generation_defaults if self._tokenizer is not None else {}))

    # ------------------------------------------------------------------------------------------------- requests
    def submit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_name: str = "",
        candidates: Candidates | None = None,
        terms: Terms = NO_TERMS,
        marks: Sequence[int] = (),
        items: Sequence[PlacedItem] = (),
    ) -> Stream:
        """Check and send one request, without waiting. candidates: see the message; the answer is `Stream.candidates`. marks:
        as in TokenInputs. items: its media, by their places. max_tokens is reduced to the room in the context. The Stream
        raises errors that the core finds.

        Raises InvalidRequest, TooLong, Overloaded (our queue to the core is full), EngineDown, DeadlineExceeded.
        """
        self._check_connected()
        ids = self._check_prompt(prompt_token_ids, getattr(params, "max_tokens", None))
        params = self._check_params(params, len(ids))
        check_priority(priority)
        self._next_id += 1
        request_id, arrival = self._next_id, time.time()
        inputs, task = TokenInputs(ids.tobytes(), list(marks), wire(items)), Generate(params, candidates)
        request = AddRequest(0, request_id, inputs, task, priority, terms.salted(cache_salt), arrival, adapter=terms.adapter)
        engine = self._send_to_one(request, terms)
        # made while the request travels: answers arrive in a later turn of the event loop
        try:
            state = RequestState(request_id, request_name or str(request_id), ids, params, self._tokenizer, arrival)
        except BaseException:  # raised again: there is no state to receive the answer
            engine.abort_sent(request_id, params)
            raise
        state.sent, state.terms, state.deadline, state.items = request, terms, terms.deadline, items
        engine.take_up(state, is_alone=self.num_requests == 0)
        return Stream(state, self._cancel)

    def submit_pool(
        self,
        prompts: Sequence[Ids],
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_name: str = "",
        terms: Terms = NO_TERMS,
    ) -> PooledState:
        """Check and send one request for vectors or scores of up to MAX_INPUTS prompts, without waiting. Errors as `submit`."""
        self._check_connected()
        limits = self.welcome.limits
        ids, lengths = joined_ids(prompts, limits)
        try:
            check_pooling(params, limits.pooling, limits.tasks)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        check_priority(priority)
        self._next_id += 1
        request_id, arrival = self._next_id, time.time()
        inputs, task = TokenInputs(ids.tobytes()), pool_task(prompts, params, lengths)
        request = AddRequest(0, request_id, inputs, task, priority, terms.salted(cache_salt), arrival, adapter=terms.adapter)
        engine = self._send_to_one(request, terms)
        state = PooledState(request_id, request_name or str(request_id), lengths, arrival)
        state.sent, state.terms, state.deadline = request, terms, terms.deadline
        engine.take_up(state, is_alone=self.num_requests == 0)
        return state

    def cancel_pool(self, state: PooledState) -> None:
        """Abort a request; nothing if it has ended."""
        self._cancel(state.id)

    @abstractmethod
    def _check_connected(self) -> None:
        """Raises EngineDown where no request can be sent."""

    @abstractmethod
    def _send_to_one(self, request: AddRequest, terms: Terms) -> "Engine":
        """Send a checked request and return the engine that it went to. Raises ClientErrors."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Fail requests past their deadline if their engine has not said so. now: time.monotonic()."""

    @abstractmethod
    def _cancel(self, request_id: int) -> None:
        """Abort a request; nothing if it has ended."""

    @abstractmethod
    def abort(self, request: str | int) -> None:
        """Abort requests by name, or one by its Stream's id. Unknown ones are ignored, as they may have ended."""

    @abstractmethod
    def abort_all(self) -> None:
        """Abort all running requests."""

    @abstractmethod
    def hold(self) -> None:
        """Send all requests together that are submitted until the end of the event loop's next turn."""

    @abstractmethod
    async def utility(self, call: UtilityCall, kind: type[A]) -> A:
        """Send the engine a call that is no request; returns its answer, which is of this kind. Raises ClientErrors."""

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; long texts are tokenized off the event loop. Raises TooLong for a text that can never fit."""
        return await encode_prompt(self.tokenizer, text, add_special_tokens, self.welcome.limits.max_model_len)

    async def encode_marked(
        self, text: str, add_special_tokens: bool, ends: Sequence[int]
    ) -> tuple[list[int], tuple[int, ...]]:
        """As `tokenize`, and how many ids lie before each of `ends` (Tokenizer.encode_marked)."""
        return await encode_marked(self.tokenizer, text, add_special_tokens, self.welcome.limits.max_model_len, ends)

    def _check_prompt(self, prompt_token_ids: Sequence[int] | np.ndarray, max_tokens: int | None = None) -> np.ndarray:
        """The ids as int32. Raises InvalidRequest, TooLong."""
        return checked_ids(prompt_token_ids, self.welcome.limits, max_tokens)

    def _check_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The params as they are sent to the core. Raises InvalidRequest."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams(...), got {type(params).__name__}")
        limits = self.welcome.limits
        try:
            if params.bad_words and params.bad_words_token_ids is None:
                params = self.tokenizer.with_bad_words(params)
            if (grammar := params.grammar) is not params.structured_outputs:
                params = msgspec.structs.replace(params, structured_outputs=grammar)
            params = with_number_of_logprobs(params, limits.max_logprobs)
            check_against(params, vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        if params.stop and not params.detokenize:
            raise InvalidRequest("stop strings need detokenize")
        if params.stop:
            _ = self.tokenizer  # raises without one
        room = output_room(num_prompt_tokens, limits.max_model_len, params.max_tokens)
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
        terms: Terms = NO_TERMS,
    ) -> AsyncIterator[RequestOutput]:
        """Yield RequestOutputs until the end, as vLLM's AsyncLLM does (`output_kind` selects cumulative ones, the default, or
        others). Leaving the loop aborts the request. sampling_params None: the model's defaults. A prompt's own cache_salt
        takes precedence over the argument. Raises ClientErrors.
        """
        params = sampling_params if sampling_params is not None else self.default_sampling_params()
        if isinstance(params, SamplingParams):
            params = params.clone()  # the caller may change its object for other requests
        given = await self.resolve(prompt, cache_salt)
        text, ids = given.text, list(given.ids or ())
        more: dict[str, Any] = {"marks": given.marks, "items": given.media, "terms": terms}
        stream = self.submit(ids, params, priority=priority, cache_salt=given.cache_salt, request_name=request_id or "", **more)
        try:
            async for output in request_outputs(stream, text, ids, params):
                yield output
        finally:
            stream.cancel()

    async def resolve(self, prompt: Prompt, cache_salt: str = "") -> PromptParts:
        """A prompt with its ids, its own cache_salt or else this one, and its media as PlacedItems. Raises InvalidRequest."""
        given = split_prompt(prompt)
        salt = given.cache_salt or cache_salt
        if given.ids is None:
            given = given._replace(ids=await self.tokenize(written(self, given)))
        return await with_media(self, given._replace(cache_salt=salt))

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """A conversation as prompt text; options as for Tokenizer.render_chat. Raises InvalidRequest."""
        try:
            return self.tokenizer.render_chat(messages, **options)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    def render_marked_chat(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[int]]:
        """As `render_chat`, and the prompt's marks in characters."""
        try:
            return self.tokenizer.render_marked_chat(messages, **options)
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
        terms: Terms = NO_TERMS,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """`generate` for a conversation; options (tools, chat_template, ...) as for Tokenizer.render_chat."""
        prompt: Prompt
        if has_media(messages):
            await opened(self)
            prompt = chat_with_media(self, messages, options)
        elif self.welcome.limits.takes_marks:
            text, ends = self.render_marked_chat(messages, **options)
            ids, marks = await self.encode_marked(text, False, ends)
            prompt = {"prompt": text, "prompt_token_ids": ids, "marks": marks}
        else:
            text = self.render_chat(messages, **options)
            prompt = {"prompt": text, "prompt_token_ids": await self.tokenize(text, add_special_tokens=False)}
        outputs = self.generate(prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt, terms=terms)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    # ------------------------------------------------------------------------------------------------- vectors and scores
    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str = "", **how: Any
    ) -> AsyncIterator[PoolingRequestOutput]:
        """Yield the prompt's result, once, as vLLM's AsyncLLM does. how: priority, terms. Raises ClientErrors."""
        (output,) = await pool_calls.encode(self, [prompt], pooling_params, name=request_id, **how)
        output.request_id = request_id or output.request_id
        yield output

    async def embed(
        self, prompts: Sequence[Prompt], pooling_params: PoolingParams | None = None
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each prompt."""
        return await pool_calls.embed(self, prompts, pooling_params)

    async def classify(
        self, prompts: Sequence[Prompt], pooling_params: PoolingParams | None = None
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the labels for each prompt."""
        return await pool_calls.classify(self, prompts, pooling_params)

    async def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], pooling_params: PoolingParams | None = None
    ) -> list[ScoringRequestOutput]:
        """A score of each pair of texts: one with n, or n with n."""
        return await pool_calls.score(self, data_1, data_2, pooling_params)

    async def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, instruction: str | None = None
    ) -> list[RerankResult]:
        """The documents by their scores for the query, the best first."""
        return await pool_calls.rerank(self, query, documents, top_n, None, instruction)
