"""Intake: turns AddRequest messages into sequences. All that a frontend may have got wrong is found here, before any work.

A request that can never run is refused at once, with a code and a text for its user; bad input never raises out of `accept`.
"""

import itertools
import time
from dataclasses import dataclass

import numpy as np

from quire.enginecore.kv.pool import BlockHasher
from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.refusal import Refused
from quire.enginecore.resumed import go_on, outputs_so_far
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.tenants.backlog import Ask, Backlog, QueueBounds, Room
from quire.enginecore.tenants.tenant import TenantState
from quire.ipc.limits import longest_prompt, output_limit, output_room
from quire.ipc.messages.frontend import (
    MAX_REQUEST_ID,
    AddRequest,
    Candidates,
    EngineLimits,
    RequestError,
    Resume,
    TokenInputs,
    sequence_key,
)
from quire.ipc.messages.workers import ProcessorsInfo
from quire.ipc.sampling import SamplingParams, check_against, loggable
from quire.ipc.step.sections import MAX_CANDIDATES, MAX_MARKS

MAX_CACHE_SALT = 1024  # characters
MOST_ON_THE_WAY_S = 60.0  # an arrival time that is older, or in the future, comes from another host's clock


@dataclass(frozen=True)
class IntakeConfig:
    limits: EngineLimits
    eos_token_ids: tuple[int, ...]
    enable_prefix_caching: bool
    by_priority: bool
    seed: int
    max_num_waiting: int
    processors: ProcessorsInfo | None = None
    max_num_queued_tokens: int = 0
    max_queue_s: float = 0.0

    @property
    def bounds(self) -> QueueBounds:
        return QueueBounds(self.max_num_waiting, self.max_num_queued_tokens, self.max_queue_s)


class Intake:
    """backlog: what waits, of all requests that were accepted; None for a new one."""

    def __init__(self, config: IntakeConfig, hasher: BlockHasher, backlog: Backlog | None = None):
        self.config = config
        self.backlog = backlog or Backlog(config.bounds)
        self._hasher = hasher
        self._arrivals = itertools.count()
        self._random = np.random.default_rng(config.seed)

    def accept(self, owner: int, request: AddRequest, room: Room) -> list[Sequence] | RequestError:
        """The request's n sequences, or why it is refused."""
        try:
            return self._sequences(owner, request, self._check_queue(request, room))
        except Refused as refused:
            return RequestError(request.epoch, request.id, refused.code, str(refused), refused.retry_after_s)

    def _sequences(self, owner: int, request: AddRequest, tenant: TenantState) -> list[Sequence]:
        params, resume = request.task.params, request.task.resume
        self._check_fields(request)
        prompt = self._prompt(request.inputs, params.max_tokens)
        room = output_room(len(prompt), self.config.limits.max_model_len, params.max_tokens)
        limit = output_limit(params.max_tokens, room)
        outputs = outputs_so_far(request.task, limit, self.config.limits.vocab_size)
        # n children share their prompt's blocks even if prefixes are not cached: they then have a salt of their own, which no
        # later request gets, whatever its id
        candidates = request.task.candidates
        cache = self.config.enable_prefix_caching or params.n > 1 or candidates is not None
        root = self._hasher.root(request.cache_salt.encode(), self._own_salt(owner, candidates))
        seed = self._seed(params, resume)
        stop_ids, ends = self._stop_ids(params)
        custom = self.config.processors
        is_processed = custom is not None and (custom.all_requests or bool(params.extra_args))
        now = time.time()
        arrival_time = request.arrival_time if now - MOST_ON_THE_WAY_S < request.arrival_time < now else now
        best = tenant.limits.best_priority
        priority = request.priority if best is None or not self.config.by_priority else max(request.priority, best)
        sequences = [
            Sequence(
                owner=owner,
                key=sequence_key(request.id, child),
                request_id=request.id,
                child=child,
                params=params,
                prompt=prompt,
                final_len=len(prompt) + limit,
                seed=seed + child,
                order=(priority, next(self._arrivals)),
                arrival_time=arrival_time,
                stop_ids=stop_ids,
                min_tokens_stop_ids=sorted(ends),
                is_processed=is_processed,
                num_candidates=candidates.num if candidates is not None else 0,
                tenant=tenant,
                expected_output=self._expected_output(params, limit),
                is_bounded=request.is_bounded and resume is None,
                blocks=SequenceBlocks(
                    root, cache, _may_hit(params) or child > 0, marks=tuple(request.inputs.marks[:MAX_MARKS])
                ),
            )
            for child in (outputs if resume is not None else range(params.n))
        ]
        for seq in sequences if resume is not None else ():
            go_on(seq, outputs[seq.child])
        return sequences

    def _seed(self, params: SamplingParams, resume: Resume | None) -> int:
        if params.seed is None and resume is not None and resume.seed is not None:
            return resume.seed
        return params.seed if params.seed is not None else int(self._random.integers(0, 2**63))

    def _own_salt(self, owner: int, candidates: Candidates | None) -> bytes:
        """A salt that keeps a request's blocks apart from others; empty if prefixes are cached."""
        if self.config.enable_prefix_caching:
            return b""
        if candidates is not None:
            return f"search {candidates.search} of {owner}".encode()
        return str(next(self._arrivals)).encode()

    def _expected_output(self, params: SamplingParams, limit: int) -> int:
        """Output tokens: all that are allowed, if only their number ends it, else as many as others had lately."""
        only_length = params.ignore_eos and not params.stop and not params.stop_token_ids
        return limit if only_length else min(limit, int(self.backlog.mean_output()) + 1)

    def _check_queue(self, request: AddRequest, room: Room) -> TenantState:
        """The request's tenant, if the queue has room."""
        backlog, n, num_tokens = self.backlog, request.task.params.n, len(request.inputs.token_ids) // 4
        tenant = backlog.tenant(request.tenant)
        refusal = backlog.refusal(tenant, Ask(n, num_tokens, request.is_bounded, request.timeout_s), room)
        if refusal is not None and request.task.resume is None:  # else it was accepted once
            raise Refused(*refusal)
        return tenant

    def _check_fields(self, request: AddRequest) -> None:
        limits = self.config.limits
        if not 0 <= request.id <= MAX_REQUEST_ID:
            raise Refused("invalid", f"a request id must be between 0 and {MAX_REQUEST_ID}")
        try:
            check_against(request.task.params, vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
        except ValueError as error:
            raise Refused("invalid", str(error)) from None
        if request.task.candidates is not None:
            _check_candidates(request.task.candidates, request.task.params)
        if request.task.params.extra_args and self.config.processors is None:
            raise Refused("invalid", "vllm_xargs (extra_args) need an engine that was started with --logits-processors")
        if request.priority and not self.config.by_priority:
            raise Refused("invalid", "a priority other than 0 needs an engine with --scheduling-policy priority")
        if len(request.cache_salt) > MAX_CACHE_SALT:
            raise Refused("invalid", f"cache_salt may be at most {MAX_CACHE_SALT} characters long")

    def _prompt(self, inputs: TokenInputs, max_tokens: int | None) -> np.ndarray:
        data, limits = inputs.token_ids, self.config.limits
        if len(data) % 4 or not data:
            raise Refused("invalid", "the prompt must hold at least one token")
        prompt = np.frombuffer(data, np.int32)
        if output_room(len(prompt), limits.max_model_len, max_tokens) < 1:
            raise Refused(
                "too_long",
                f"the prompt is {len(prompt)} tokens long; with at least one output token "
                f"at most {longest_prompt(limits.max_model_len)} fit the context of {limits.max_model_len}",
            )
        if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
            raise Refused("invalid", f"the prompt holds a token id outside the vocabulary of {limits.vocab_size}")
        return prompt

    def _stop_ids(self, params: SamplingParams) -> tuple[frozenset[int], frozenset[int]]:
        """(the request's own stop ids, every id that ends it)."""
        stop_ids = frozenset(params.stop_token_ids or ())
        ends = stop_ids if params.ignore_eos else stop_ids.union(self.config.eos_token_ids)
        if params.min_tokens > 0 and params.allowed_token_ids and ends.issuperset(params.allowed_token_ids):
            raise Refused("invalid", "allowed_token_ids holds only ids that min_tokens forbids")
        return stop_ids, ends


def _may_hit(params: SamplingParams) -> bool:
    """Whether cached blocks can be used: prompt logprobs need every position to be computed."""
    return params.prompt_logprobs is None and not params.skip_reading_prefix_cache


def _check_candidates(candidates: Candidates, params: SamplingParams) -> None:
    if not 1 <= candidates.num <= MAX_CANDIDATES:
        raise Refused("invalid", f"candidates must be between 1 and {MAX_CANDIDATES}, got {candidates.num}")
    if params.n != 1 or params.max_tokens != 1 or params.prompt_logprobs is not None:
        raise Refused("invalid", "candidates need n = 1, max_tokens = 1 and no prompt_logprobs")


def in_words(request: AddRequest) -> str:
    """A line for the log: the request's parameters, without texts and tokens."""
    params = ", ".join(f"{name}={value}" for name, value in loggable(request.task.params).items()) or "default parameters"
    return f"request {request.id}: {len(request.inputs.token_ids) // 4} prompt tokens, {params}"
