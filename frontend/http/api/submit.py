"""A prompt on its way to the engine, as its request's body wants it: as it is, the best of several, or a search of beams."""

from collections.abc import Sequence

import msgspec

from quire.frontend.client.beam_search import BeamSearch, BeamStream
from quire.frontend.client.client import Client
from quire.frontend.client.logprob_rows import LogprobRows
from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.bodies.fields import beam_search_params
from quire.frontend.http.api.bodies.schemas import SamplingFields
from quire.frontend.http.api.prompt_run import PromptRun
from quire.ipc.limits import output_limit, output_room
from quire.ipc.sampling import SamplingParams


def submit(
    client: Client, body: SamplingFields, ids: Sequence[int], params: SamplingParams, name: str, first_choice: int
) -> PromptRun:
    """Raises ClientErrors. params: for the n completions that are returned."""
    priority, cache_salt = body.priority or 0, body.cache_salt or ""
    if body.use_beam_search:
        room = output_room(len(ids), client.welcome.limits.max_model_len)
        beams = beam_search_params(body, output_limit(params.max_tokens, room))
        search = BeamSearch(
            client, ids, beams, num_logprobs=params.logprobs, priority=priority, cache_salt=cache_salt, request_name=name
        )
        return PromptRun(BeamStream(search, params, name), params, ids, first_choice)
    if body.best_of is not None and body.best_of > params.n:
        sampled = msgspec.structs.replace(params, n=body.best_of, logprobs=params.logprobs or 0)
        stream = client.submit(ids, sampled, priority=priority, cache_salt=cache_salt, request_name=name)
        return PromptRun(stream, params, ids, first_choice, choose=lambda deltas: _best(deltas, params))
    stream = client.submit(ids, params, priority=priority, cache_salt=cache_salt, request_name=name)
    return PromptRun(stream, params, ids, first_choice)


def _best(deltas: list[Delta], params: SamplingParams) -> list[Delta]:
    """The n of them with the highest log-probability a token (OpenAI's best_of), best first."""
    best = sorted(deltas, key=_mean_logprob, reverse=True)[: params.n]
    for index, delta in enumerate(best):
        delta.index = index
        if params.logprobs is None:
            delta.logprobs = None
    return best


def _mean_logprob(delta: Delta) -> float:
    if isinstance(delta.logprobs, LogprobRows):
        return delta.logprobs.total() / max(1, len(delta.token_ids))
    rows = zip(delta.logprobs or [], delta.token_ids, strict=True)
    return sum(row[token].logprob for row, token in rows) / max(1, len(delta.token_ids))
