"""Running the prompts of one body: requests of up to 128 prompts each, their terms, counts for /metrics, and large answers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

from quire.frontend.client.pooling import Ids, PooledResults, PooledState, pool
from quire.frontend.client.scoring import Scores, score_pairs
from quire.frontend.http.api.bodies.json_pieces import JsonPieces, in_list, pieces, send_json, stream_json
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.logs.request_log import new_id
from quire.frontend.http.api.pooling.fields import PoolingUsage, RequestFields
from quire.frontend.http.api.pooling.vectors import AT_ONCE
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.api.terms import terms_of
from quire.frontend.http.protocol.exchange import Request, Response
from quire.ipc.pooling import PoolingParams


class PoolRun:
    """One HTTP request that pools. name: of its answer."""

    def __init__(self, services: Services, request: Request, body: RequestFields, prefix: str) -> None:
        self._services, self._is_for_batch = services, request.is_patient
        terms = terms_of(services, request, body.timeout, body.priority)
        self.name = new_id(prefix, request.headers, body.request_id)
        self.created = int(time.time())
        self._how: dict[str, Any] = {
            "priority": body.priority or 0,
            "cache_salt": body.cache_salt or "",
            "name": self.name,
            "terms": terms,
            "on_sent": self._sent,
        }
        self._states: list[list[PooledState]] = []

    def _sent(self, states: list[PooledState]) -> None:
        self._states.append(states)

    async def pool(self, ids: Sequence[Ids], params: PoolingParams) -> PooledResults:
        """The prompts' results. Raises ClientErrors."""
        try:
            results = await pool(self._services.client, ids, params, **self._how)
        except BaseException:  # also a request that is cancelled: it is counted, and raised again
            self._count("abort")
            raise
        self._count("stop")
        return results

    async def score(self, pairs: Sequence[tuple[str, str]], params: PoolingParams, **how: Any) -> Scores:
        """The pairs' scores. Raises ClientErrors."""
        try:
            scores = await score_pairs(self._services.client, pairs, params, **how, **self._how)
        except BaseException:  # also a request that is cancelled: it is counted, and raised again
            self._count("abort")
            raise
        self._count("stop")
        return scores

    async def send(
        self,
        response: Response,
        items: Callable[[], Iterator[Any]],
        count: int,
        widest: int,
        make: Callable[[Any], Any] = lambda data: data,
    ) -> None:
        """Send what `make` makes of a list of items, in pieces if it is large. widest: numbers of the longest item."""
        if count * widest <= AT_ONCE:
            return response.send(200, json_bytes(make(list(items()))))
        await self.send_large(response, make(JsonPieces(lambda: _in_parts(items(), AT_ONCE // max(widest, 1)))))

    async def send_large(self, response: Response, answer: Any) -> None:
        """Send an answer in pieces (json_pieces.py)."""
        if self._is_for_batch:
            return await send_json(response, answer, self._services.max_response_bytes)
        await stream_json(response, answer)

    def _count(self, reason: str) -> None:
        metrics, now = self._services.metrics, time.time()
        for state in chain.from_iterable(self._states):
            metrics.count("request_success", reason)
            metrics.observe("request_prompt_tokens", state.num_prompt_tokens)
            metrics.observe("request_prefill_kv_computed_tokens", state.num_prompt_tokens - sum(state.num_cached))
            end = state.metrics.finished_time or now
            metrics.observe("e2e_request_latency_seconds", max(0.0, end - state.metrics.arrival_time))


def params_of(names: Mapping[str, str] = MappingProxyType({}), **values: Any) -> PoolingParams:
    """PoolingParams of a body's fields. names: of fields that the body calls otherwise. Raises ApiError 400."""
    try:
        return PoolingParams(**values)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        field = names.get(name, name)
        raise invalid(f"{field} {rest}", field) from None


def usage_of(num_tokens: int) -> PoolingUsage:
    return PoolingUsage(num_tokens, num_tokens)


def _in_parts(items: Iterator[Any], size: int) -> Iterator[bytes]:
    """A JSON list of items, so many encoded at once; if it is one, that is encoded piece by piece."""
    if size > 1:
        yield from in_list(iter(lambda: list(islice(items, size)), []))
        return
    for i, item in enumerate(items):
        yield b"," if i else b"["
        yield from pieces(item)
    yield b"]"
