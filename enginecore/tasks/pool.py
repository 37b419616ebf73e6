"""PoolTask: a request's prompts are pooled to vectors or scores. No token is sampled: a sequence ends with its prompt.

Each child has a prompt of its own. The result comes with the last chunk; a result for each token comes with every chunk. Only a
last token that is pooled may stand on cached blocks: other kinds of pooling need each token's hidden states.
"""

from itertools import accumulate

import numpy as np

from quire.enginecore.refusal import Refused
from quire.enginecore.tasks.task import Asked, Chunk, Prompted, SideTarget
from quire.ipc.messages.frontend import EngineLimits, Pool
from quire.ipc.pooling import MAX_INPUTS, PoolingInfo, PoolRow, check_pooling
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.late_queries import MAX_QUERY_BYTES
from quire.ipc.step.sections import PREFILL_POOL, PREFILL_POOL_END

NO_SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)  # of rows that sample nothing


class PoolTask:
    sampling = NO_SAMPLING
    ends_with_prompt = True
    ends_by_length = True
    is_stream = False
    is_processed = False
    runs_again = True
    stop_ids: frozenset[int] = frozenset()
    min_tokens_stop_ids: list[int] = []  # noqa: RUF012  # never changed
    sampling_kind = 0

    def __init__(self, row: PoolRow, seconds: list[int], queries: list[bytes] | None = None) -> None:
        """seconds: where the second texts of all prompts begin; empty: there are none. queries: the vectors with which each
        prompt is compared; None: with none."""
        self._word, self._is_of_tokens, self._seconds = row.word(), row.is_of_tokens, seconds
        self._queries = queries or []

    def chunk(self, seq: Prompted, start: int, end: int, known: int) -> Chunk:
        second = self._seconds[seq.child] if self._seconds else -1
        query = self._queries[seq.child] if self._queries else b""
        return Chunk(PREFILL_POOL | (PREFILL_POOL_END if end == known else 0), second, self._word, query)

    def side_target(self, seq: Prompted, chunk: Chunk, start: int, end: int) -> SideTarget | None:
        is_last = bool(chunk.flags & PREFILL_POOL_END)
        if not is_last and not self._is_of_tokens:
            return None
        return SideTarget(seq.owner, seq.request_id, start, seq.key, max(seq.num_cached_tokens, 0), is_last)


def asked(task: Pool, ids: np.ndarray, limits: EngineLimits) -> Asked:
    """The sequences of a request to pool the prompts that `ids` are, one after the other. Raises Refused."""
    lengths = task.lengths or [len(ids)]
    if not 1 <= len(lengths) <= MAX_INPUTS or min(lengths) < 1 or sum(lengths) != len(ids):
        raise Refused("invalid", f"lengths must hold 1 to {MAX_INPUTS} lengths of prompts, which together are the tokens")
    pairs = zip(task.seconds, lengths, strict=False)
    if task.seconds and (len(task.seconds) != len(lengths) or not all(0 <= at < length for at, length in pairs)):
        raise Refused("invalid", "seconds must hold a place within each prompt")
    if max(lengths) > limits.max_model_len:
        raise Refused(
            "too_long",
            f"a prompt is {max(lengths)} tokens long; {limits.too_long}",
        )
    info = limits.pooling
    try:
        row = check_pooling(task.params, info, limits.tasks)
    except ValueError as error:
        raise Refused("invalid", str(error)) from None
    assert info is not None
    may_hit = info.may_hit and not row.is_of_tokens and not task.params.skip_reading_prefix_cache
    ends = list(accumulate(lengths))
    prompts = {i: ids[end - length : end] for i, (length, end) in enumerate(zip(lengths, ends, strict=True))}
    queries = _queries(task, row, info)
    row = row._replace(is_scored=bool(queries))
    return Asked(PoolTask(row, task.seconds, queries), prompts, limit=0, may_hit=may_hit)


def _queries(task: Pool, row: PoolRow, info: PoolingInfo) -> list[bytes]:
    """The vectors with which each prompt is compared; [] if they are not. Raises Refused."""
    if not task.queries and not task.query_of:
        return []
    if info.late is None or row.task != "token_embed" or row.more:
        raise Refused("invalid", "queries: vectors of queries are for vectors of tokens of a model that compares these")
    size = 4 * (row.dimensions or info.token_size)
    if any(not 0 < len(data) <= MAX_QUERY_BYTES or len(data) % size for data in task.queries):
        raise Refused("invalid", f"queries: each must have vectors of {size} bytes, and at most {MAX_QUERY_BYTES} bytes")
    if len(task.query_of) != task.num_sequences or not all(0 <= i < len(task.queries) for i in task.query_of):
        raise Refused("invalid", "query_of must name one of the queries for each prompt")
    return [task.queries[i] for i in task.query_of]
