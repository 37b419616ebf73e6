"""Beam search over an engine: `BeamSearchParams`, the results of `LLM.beam_search`, and `BeamStream` for HTTP requests.

A step of a search sends a one-token request per beam, which also returns candidates for that token (ipc/messages/frontend.py).
The beams' common prefixes are in the prefix cache, so that each request computes only its last block; the engine needs no other
support. The search's decisions are in beams.py. A failed or cancelled search leaves no request behind.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from quire.frontend.client.beams import Beam, Beams
from quire.frontend.client.client import Client
from quire.frontend.client.logprob_rows import LogprobRows
from quire.frontend.client.lora_request import LoRARequest, terms_of
from quire.frontend.client.outputs import Delta, RequestMetrics, TokenLogprobDict
from quire.frontend.client.progress_bar import ProgressBar
from quire.frontend.client.prompt import Prompt, split_prompt
from quire.frontend.client.stream import ClientError, InvalidRequest, Stream, TooLong
from quire.frontend.client.terms import NO_TERMS, Terms
from quire.frontend.text.detokenizer import PROMPT_TAIL, OutputText
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.limits import output_room
from quire.ipc.messages.frontend import Candidates
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.sections import MAX_CANDIDATES, USUAL_LOGPROBS
from quire.ipc.struct_errors import StructErrors

MAX_BEAM_WIDTH = MAX_CANDIDATES // 2
MAX_LENGTH_PENALTY = 20.0
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
_SUBMIT_TOGETHER = 8  # requests per turn of the event loop: a long prompt is copied for each beam
_LONG_OUTPUT = 1000  # tokens; longer outputs are detokenized off the event loop
_MAX_SEARCHES = 16  # run at once by one `beam_search`

_searches = itertools.count(1)


class BeamSearchParams(msgspec.Struct, frozen=True, metaclass=StructErrors):
    """Parameters of a search, with vLLM's names and defaults.

    beam_width: 1 to 64, the beams kept at each step and returned. max_tokens: per beam. ignore_eos: continue after an
    end-of-sequence token. temperature: accepted without effect, as nothing is sampled: beams are compared by the model's own
    log-probabilities. length_penalty: a score is the log-probability over length (prompt included) to this power.
    include_stop_str_in_output: keep the text of the ending token. stop_token_ids: these complete a beam, too. early_stopping:
    True ends at beam_width completed beams; False and "never" when no running beam can score higher.

    Raises ValueError, naming the field, for a value outside its bounds.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] | None = None
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise ValueError(f"beam_width must be an integer, at least 1 and at most {MAX_BEAM_WIDTH}, got {self.beam_width!r}")
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer and at least 1, got {self.max_tokens!r}")
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f"early_stopping must be true, false or 'never', got {self.early_stopping!r}")


def _check_number(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        raise ValueError(f"{name} must be a number, at least {low}{f' and at most {high}' * (high < math.inf)}, got {value!r}")


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam, in vLLM's shape. tokens, text: prompt and output. logprobs: one dict for each output token."""

    tokens: list[int]
    logprobs: list[TokenLogprobDict]
    cum_logprob: float
    text: str | None
    finish_reason: str
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


class BeamSearch:
    """One prompt's search. `run` it, or `cancel` it from elsewhere in the loop."""

    def __init__(
        self,
        client: Client,
        prompt_ids: Sequence[int] | np.ndarray,
        params: BeamSearchParams,
        *,
        num_logprobs: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        request_name: str = "",
        terms: Terms = NO_TERMS,
    ) -> None:
        """Raises InvalidRequest, TooLong. num_logprobs: alternatives to keep for each token."""
        self.params = params
        self.num_prompt_tokens = len(prompt_ids)
        self.num_cached_tokens: int | None = None
        self.metrics = RequestMetrics(time.time())
        self._client = client
        self._options = {"priority": priority, "cache_salt": cache_salt, "request_name": request_name}
        self._terms = terms
        self._candidates = Candidates(2 * params.beam_width, next(_searches))
        room = output_room(len(prompt_ids), client.welcome.limits.max_model_len)
        if room < 1:
            raise TooLong(f"the prompt has {len(prompt_ids)} tokens, which leaves no room for another in the context")
        self._beams = Beams(
            np.asarray(prompt_ids, np.int32),
            width=params.beam_width,
            max_tokens=min(params.max_tokens, room),
            end_ids=self._end_ids(),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping is True,
            num_logprobs=num_logprobs,
        )
        self._streams: list[Stream] = []

    def _end_ids(self) -> set[int]:
        ends = set(self.params.stop_token_ids or ())
        return ends if self.params.ignore_eos else ends.union(self._client.welcome.eos_token_ids)

    async def run(self) -> list[Beam]:
        """At most beam_width beams, best first. Raises ClientError."""
        beams = self._beams
        try:
            while not beams.done:
                beams.advance(await self._step())
        finally:
            self.cancel()
            self.metrics.finished_time = time.time()
        return beams.best()

    async def _step(self) -> list[tuple[np.ndarray, np.ndarray]]:
        self._streams = []
        for i, beam in enumerate(self._beams.running):
            stream = self._client.submit(beam.ids, _ONE_TOKEN, candidates=self._candidates, terms=self._terms, **self._options)  # type: ignore[arg-type]
            self._streams.append(stream)
            if i % _SUBMIT_TOGETHER == _SUBMIT_TOGETHER - 1:
                await asyncio.sleep(0)
        for stream in self._streams:
            await stream.collect()
        self._terms = msgspec.structs.replace(self._terms, is_bounded=False)  # a search that has begun is not refused
        times = self._streams[0].metrics
        if self.metrics.first_token_time is None:
            self.metrics.queue_s, self.metrics.first_token_time = times.queue_s, times.first_token_time
            self.num_cached_tokens = self._streams[0].num_cached_tokens
        self.metrics.last_token_time = times.last_token_time
        return [stream.candidates for stream in self._streams]

    def stop_reason(self, beam: Beam) -> int | None:
        """The id of the token that ended a beam; None for the model's end-of-sequence tokens and max_tokens."""
        last = int(beam.ids[-1])
        is_eos = last in self._client.welcome.eos_token_ids and not self.params.ignore_eos
        return last if beam.ended and not is_eos else None

    def cancel(self) -> None:
        """Abort the running requests; idempotent."""
        for stream in self._streams:
            stream.cancel()


class BeamStream:
    """A search with the interface of a Stream, for the routes: it returns nothing before its end."""

    prompt_logprobs = None
    items = ()

    def __init__(self, search: BeamSearch, params: SamplingParams, request_name: str) -> None:
        """params: how many beams are returned (n), and whether with logprobs."""
        self.params = params
        self.request_name = request_name
        self.finished = False
        self.error: ClientError | None = None
        self._search = search

    @property
    def num_prompt_tokens(self) -> int:
        return self._search.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int | None:
        return self._search.num_cached_tokens

    @property
    def metrics(self) -> RequestMetrics:
        return self._search.metrics

    async def collect(self) -> list[Delta]:
        """The beams as Deltas, best first. Raises the search's ClientError."""
        try:
            beams = await self._search.run()
        except ClientError as error:
            self.error = copy(error)  # a copy, as the raised exception would make a reference cycle
            raise
        finally:
            self.finished = True
        beams, tokenizer = beams[: self.params.n], self._search._client.tokenizer

        def deltas() -> list[Delta]:
            return [self._delta(i, beam, tokenizer) for i, beam in enumerate(beams)]

        num_tokens = sum(len(beam.ids) - self.num_prompt_tokens for beam in beams)
        return await asyncio.to_thread(deltas) if num_tokens > _LONG_OUTPUT else deltas()

    def _delta(self, index: int, beam: Beam, tokenizer: Tokenizer) -> Delta:
        prompt_ids, ids = (part.tolist() for part in np.split(beam.ids, [self.num_prompt_tokens]))
        return Delta(
            index,
            OutputText(tokenizer, self.params, prompt_ids[-PROMPT_TAIL:]).push(ids, True, beam.ended),
            ids,
            None if self.params.logprobs is None else _logprob_rows(beam, ids, tokenizer),
            "stop" if beam.ended else "length",
            self._search.stop_reason(beam),
            len(ids),
        )

    def cancel(self) -> None:
        if not self.finished:
            self._search.cancel()


def _logprob_rows(beam: Beam, ids: list[int], tokenizer: Tokenizer | None) -> LogprobRows:
    return LogprobRows(ids, beam.logprobs(), tokenizer)


class _Found(NamedTuple):
    """A search that has ended."""

    search: BeamSearch
    beams: list[Beam]


async def search_all(
    client: Client,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    most: int | None = None,
    use_tqdm: bool = False,
    lora_requests: Sequence[LoRARequest | None] = (),
) -> list[_Found]:
    """Run a search for each prompt, at most `most` at once; none runs if one is invalid. Raises ClientError, ValueError."""
    if not isinstance(params, BeamSearchParams):
        raise ValueError(f"params must be BeamSearchParams(beam_width=..., max_tokens=...), got {type(params).__name__}")
    searches, adapters = [], lora_requests or [None] * len(prompts)
    for i, (prompt, lora) in enumerate(zip(prompts, adapters, strict=True)):
        given = split_prompt(prompt)
        ids, salt = given.ids, given.cache_salt
        try:
            if given.media is not None:
                raise InvalidRequest("a beam search takes no images")
            if ids is None:
                ids = await client.tokenize(given.text or "")
            num_logprobs = min(2 * params.beam_width, USUAL_LOGPROBS)
            terms = await terms_of(client, lora)
            searches.append(BeamSearch(client, ids, params, num_logprobs=num_logprobs, cache_salt=salt, terms=terms))
        except InvalidRequest as error:
            raise type(error)(f"prompt {i}: {error}") from None
    places = asyncio.Semaphore(most or _MAX_SEARCHES)

    async def one(search: BeamSearch, bar: ProgressBar) -> _Found:
        async with places:
            found = _Found(search, await search.run())
        bar.add(search.num_prompt_tokens, sum(len(beam.ids) - search.num_prompt_tokens for beam in found.beams))
        return found

    with ProgressBar(len(searches), use_tqdm) as bar:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(search, bar)) for search in searches]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def beam_search_output(found: _Found, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """A search's result in vLLM's shape; tokenizer None: without texts."""
    search, output = found.search, BeamSearchOutput()
    for beam in found.beams:
        tokens = beam.ids.tolist()
        shown = tokens[:-1] if beam.ended and not search.params.include_stop_str_in_output else tokens
        output.sequences.append(
            BeamSearchSequence(
                tokens,
                list(_logprob_rows(beam, tokens[search.num_prompt_tokens :], tokenizer)),
                beam.cum_logprob,
                None if tokenizer is None else tokenizer.decode(shown, search.params.skip_special_tokens),
                "stop" if beam.ended else "length",
                search.stop_reason(beam),
            )
        )
    return output
