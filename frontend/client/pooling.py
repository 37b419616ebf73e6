"""Requests for vectors and scores, between arriving messages and those who wait for the results.

A PooledState is one AddRequest with up to MAX_INPUTS prompts; dispatch.py writes to it. `pool` runs any number of prompts in as
many requests as they need, and gives all their results or the first error. `tokenized` makes ids of texts, in threads.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.frontend.client.cut_rows import cut_row
from quire.frontend.client.late import late_rows, queries_of, used_rows
from quire.frontend.client.long_texts import Parts, longest_text
from quire.frontend.client.outputs import RequestMetrics
from quire.frontend.client.stream import ClientError, InvalidRequest, TooLong
from quire.frontend.client.terms import NO_TERMS, Terms
from quire.frontend.client.turns import Slice, in_native_thread
from quire.frontend.text.tokenizer import SplitIds, Tokenizer
from quire.ipc.messages.frontend import AddRequest, EngineLimits, Pool, Welcome
from quire.ipc.pooling import MAX_INPUTS, PoolingParams

MOST_AT_ONCE = 32  # requests of one body that wait or run: half of what the engine's queue holds by default
FEW_CHARACTERS = 2 << 10  # texts of so many in all are tokenized at once: it takes some 4 ms
Ids = Sequence[int] | np.ndarray


class PooledState:
    """One request. Its attributes are those of a RequestState as far as clients read them."""

    def __init__(self, request_id: int, name: str, lengths: list[int], arrival_time: float) -> None:
        """lengths: tokens of each prompt."""
        self.id, self.name = request_id, name
        self.num_prompt_tokens = sum(lengths)
        self.metrics = RequestMetrics(arrival_time)
        self.sequences: tuple[()] = ()
        self.num_open = len(lengths)
        self.num_cached = [0] * len(lengths)  # prompt tokens found in the prefix cache
        self.error: ClientError | None = None
        self.deadline = math.inf  # by time.monotonic()
        self.sent: AddRequest | None = None
        self.terms: Any = None
        self.seed: int | None = None
        self.lost_at, self.num_losses = -1, 0  # as of RequestState
        self._parts: list[list[np.ndarray]] = [[] for _ in lengths]
        self._is_open = [True] * len(lengths)
        self._ended: asyncio.Future[None] | None = None

    def take(self, child: int, part: np.ndarray, start: int, is_last: bool, num_cached: int) -> None:
        """A part of a prompt's result has come, from the token `start` on."""
        if not 0 <= child < len(self._parts) or not self._is_open[child]:
            return
        if start == 0 or part.ndim == 1:
            self._parts[child] = []
        self._parts[child].append(part)
        if is_last:
            self._is_open[child], self.num_cached[child] = False, num_cached
            self.num_open -= 1
        if not self.num_open:
            self._end()

    def begin_again(self) -> None:
        """Another engine runs the whole request."""
        self._parts = [[] for _ in self._parts]
        self._is_open, self.num_open = [True] * len(self._parts), len(self._parts)

    def fail(self, error: ClientError) -> None:
        if self.num_open:
            self.error, self.num_open = error, 0
            self._end()

    def abort(self) -> None:
        """End it because it is not wanted any more."""
        if self.num_open:
            self.num_open = 0
            self._end()

    def drop_results(self) -> None:
        """They have been used, and the counts are still needed."""
        self._parts = []

    def _end(self) -> None:
        self.metrics.finished_time = time.time()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def results(self) -> list[np.ndarray]:
        """Wait for the end: float32 of each prompt, [columns], or [tokens, columns] of tasks with a result for each token.

        Raises the request's error; CancelledError if it was aborted."""
        if self.num_open:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended
        if self.error is not None:
            raise self.error
        if any(self._is_open):
            raise asyncio.CancelledError
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in self._parts]


class PoolClient(Protocol):
    """As much of a Client as requests for vectors need."""

    @property
    def welcome(self) -> Welcome: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def hold(self) -> None: ...

    def submit_pool(
        self,
        prompts: Sequence[Ids],
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_name: str = "",
        terms: Terms = NO_TERMS,
    ) -> PooledState: ...

    def cancel_pool(self, state: PooledState) -> None: ...


@dataclass(slots=True)
class PooledResults:
    """Results of all prompts, in order. states: the requests that made them."""

    data: list[np.ndarray]
    num_cached: list[int]
    states: list[PooledState]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(state.num_prompt_tokens for state in self.states)


async def pool(
    client: PoolClient,
    prompts: Sequence[Ids],
    params: PoolingParams,
    *,
    priority: int = 0,
    cache_salt: str = "",
    name: str = "",
    terms: Terms = NO_TERMS,
    on_sent: Callable[[list[PooledState]], None] = lambda states: None,
) -> PooledResults:
    """Results of these prompts, token ids. on_sent: is given the list of requests, which grows. Raises ClientErrors, the first
    one at once; then no request is left running.

    At most MOST_AT_ONCE requests are on their way: more prompts than the engine's queue holds would never be taken.
    """
    states: list[PooledState] = []
    waiting = Waiting()
    on_sent(states)
    try:
        if len(prompts) > 1:
            client.hold()
        part_of_turn = Slice()
        cut = Parts(prompts, client.welcome.limits, params)
        for part in _parts(cut.prompts):
            if part_of_turn.is_over:
                await part_of_turn.next()
            await waiting.until_fewer_than(MOST_AT_ONCE)
            more: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "request_name": name, "terms": terms}
            states.append(client.submit_pool(part, params, **more))
            if len(prompts) > MAX_INPUTS:
                waiting.add(states[-1].results())
        await waiting.until_fewer_than(1)
        found, data = list[np.ndarray](), list[np.ndarray]()
        for state in states:
            found += await state.results()
            if part_of_turn.is_over:
                await part_of_turn.next()
        info = client.welcome.limits.pooling
        for i, (prompt, result) in enumerate(zip(prompts, cut.vectors(found), strict=True)):
            data.append(used_rows(prompt, result, info))
            if not i % MAX_INPUTS and part_of_turn.is_over:
                await part_of_turn.next()
        return PooledResults(data, cut.sums([n for state in states for n in state.num_cached]), states)
    finally:
        waiting.cancel()
        for state in states:
            if state.num_open:
                client.cancel_pool(state)


class Waiting:
    """Requests of one body, waited for together, so that the first error ends all of them."""

    def __init__(self) -> None:
        self._open: set[asyncio.Future[Any]] = set()

    def add(self, results: Coroutine[Any, Any, Any]) -> None:
        future = asyncio.ensure_future(results)
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # a second error needs no reader
        self._open.add(future)

    async def until_fewer_than(self, most: int) -> None:
        """Wait until fewer than so many are open. Raises the error of one that failed."""
        while len(self._open) >= most:
            ended, self._open = await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
            for each in ended:
                each.result()

    def cancel(self) -> None:
        for each in self._open:
            each.cancel()


def _parts(prompts: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
    for start in range(0, len(prompts), MAX_INPUTS):
        yield prompts[start : start + MAX_INPUTS]


def joined_ids(prompts: Sequence[Ids], limits: EngineLimits) -> tuple[np.ndarray, list[int]]:
    """The prompts' ids, int32, one after the other, and their lengths. Raises InvalidRequest, TooLong."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise InvalidRequest("the prompt is empty: it needs at least one token")
    if max(lengths) > limits.max_model_len:
        raise TooLong(f"the prompt has {max(lengths)} tokens; {limits.too_long}")
    try:
        ids = np.concatenate([np.asarray(prompt) for prompt in prompts])
    except (ValueError, OverflowError) as error:
        raise InvalidRequest("the prompt must be a list of token ids") from error
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise InvalidRequest("the prompt must be a list of token ids")
    if np.maximum.reduce(ids.astype(np.int64, copy=False).view(np.uint64)) >= limits.vocab_size:
        raise InvalidRequest(f"the prompt holds a token id outside the vocabulary of {limits.vocab_size}")
    return ids.astype("<i4"), lengths


def pool_task(prompts: Sequence[Ids], params: PoolingParams, lengths: list[int]) -> Pool:
    """The request's parameters: where the second text of each pair begins, and with which queries documents are compared."""
    seconds = [prompt.second if isinstance(prompt, SplitIds) else 0 for prompt in prompts]
    queries, query_of = queries_of(prompts)
    return Pool(params, lengths, seconds=seconds if any(seconds) else [], queries=queries, query_of=query_of)


async def tokenized(
    client: PoolClient,
    texts: Sequence[str],
    *,
    add_special_tokens: bool = True,
    keep: int | None = None,
    side: str | None = None,
    is_query: bool = False,
) -> list[Ids]:
    """The ids of each text. keep: cut to so many ids, -1: to as many as fit; the "left" side is cut off, or by default the
    right. is_query: for a model of token vectors, where queries differ from documents. Raises TooLong for a text that can never
    fit and is not to be cut."""
    info = client.welcome.limits.pooling
    if add_special_tokens and info is not None and (late := info.late) is not None:
        longest = client.welcome.limits.max_model_len
        most = longest if keep is None or keep == -1 else min(keep, longest)
        rows = await in_native_thread(lambda: late_rows(client.tokenizer, texts, late, is_query, most, keep is not None))
        return list[Ids](rows)
    tokenizer, limits = client.tokenizer, client.welcome.limits
    longest = limits.max_model_len if keep == -1 else longest_text(limits)
    most = longest if keep is None or keep == -1 else min(keep, longest)
    if info is not None and info.do_lower_case:
        texts = [text.lower() for text in texts]
    if tokenizer.keeps_characters and max(map(len, texts), default=0) > (chars := (most + 1) * tokenizer.max_token_chars):
        if keep is None:
            raise TooLong(f"the prompt has more characters than {longest} tokens can hold; {limits.too_long}")
        texts = [text[-chars:] if side == "left" else text[:chars] for text in texts]  # no more is tokenized than is kept
    arguments = tokenizer, texts, add_special_tokens, None if keep is None else most, side
    if sum(map(len, texts)) <= FEW_CHARACTERS:
        return _rows(*arguments)
    return await in_native_thread(lambda: as_arrays(_rows(*arguments)))


def marked(tokenizer: Tokenizer, rows: Sequence[Ids], before: str, has_special: bool, texts: Sequence[str] = ()) -> list[Ids]:
    """The rows with the place where a prompt `before` them ends, for a model with vectors in which it does not count.

    It is where sentence-transformers has it: behind the tokens of the prompt alone, without a special one at its end. texts: of
    rows that may be cut at the left, prompts included; the place moves by the tokens that are cut."""
    if not before:
        return list(rows)
    count = len(tokenizer.encode(before, has_special)) - tokenizer.around[1] * has_special
    counts = [count] * len(rows)
    if texts:
        if tokenizer.keeps_characters:  # of a longer text nothing of the prompt is left
            most = [len(before) + (len(row) + 1) * tokenizer.max_token_chars for row in rows]
            texts = [text[:end] for text, end in zip(texts, most, strict=True)]
        wholes = tokenizer.encode_batch(texts, has_special)
        counts = [max(count + len(row) - len(whole), 0) for row, whole in zip(rows, wholes, strict=True)]
    return [SplitIds(list(row), min(own, len(row) - 1)) for row, own in zip(rows, counts, strict=True)]


def as_arrays(rows: Sequence[Ids]) -> list[Ids]:
    """The rows as int32 arrays: lists of many ids take long to check and to join, so a thread makes these. Pairs stay pairs."""
    return [row if isinstance(row, SplitIds) else np.asarray(row, np.int32) for row in rows]


def _rows(tokenizer: Tokenizer, texts: Sequence[str], has_special: bool, most: int | None, side: str | None) -> list[Ids]:
    rows = tokenizer.encode_batch(texts, has_special)
    return [row if most is None else cut_row(tokenizer, row, most, side, has_special) for row in rows]
