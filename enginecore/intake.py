"""Intake: turns AddRequest messages into sequences. All that a frontend may have got wrong is found here, before any work.

A request that can never run is refused at once, with a code and a text for its user; bad input never raises out of `accept`.
"""

import itertools
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.enginecore.kv.pool import BlockHasher
from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.media.prompt_items import PromptItems, problem_with
from quire.enginecore.refusal import Refused
from quire.enginecore.resumed import go_on
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.tasks import generate, pool
from quire.enginecore.tasks.task import Asked
from quire.enginecore.tenants.backlog import Ask, Backlog, QueueBounds, Room
from quire.enginecore.tenants.tenant import TenantState
from quire.ipc.messages.frontend import (
    MAX_REQUEST_ID,
    AddRequest,
    EngineLimits,
    Generate,
    Pool,
    RequestError,
    TokenInputs,
    sequence_key,
)
from quire.ipc.messages.workers import ProcessorsInfo
from quire.ipc.sampling import loggable
from quire.ipc.step.sections import MAX_MARKS

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
        self._check_fields(request)
        asked = self._asked(request)
        task, limit = asked.task, asked.limit
        items = self._items(request.inputs, asked)
        cache = self.config.enable_prefix_caching or asked.shares
        root = self._hasher.root(request.cache_salt.encode(), self._own_salt(owner, asked.search))
        seed = asked.seed if asked.seed is not None else int(self._random.integers(0, 2**63))
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
                task=task,
                prompt=prompt,
                final_len=len(prompt) + limit,
                seed=seed + child,
                order=(priority, next(self._arrivals)),
                arrival_time=arrival_time,
                tenant=tenant,
                # all that are allowed, if only their number ends it, else as many as others had lately
                expected_output=limit if task.ends_by_length else min(limit, int(self.backlog.mean_output()) + 1),
                is_bounded=request.is_bounded and not request.task.is_resumed,
                blocks=SequenceBlocks(
                    root,
                    cache,
                    asked.may_hit or (asked.shares and child > 0),
                    items=items,
                    marks=tuple(request.inputs.marks[:MAX_MARKS]),
                ),
                items=items,
            )
            for child, prompt in asked.prompts.items()
        ]
        for seq in sequences if asked.outputs else ():
            go_on(seq, asked.outputs[seq.child])
        return sequences

    def _asked(self, request: AddRequest) -> Asked:
        """The sequences that the request's task wants of its ids."""
        c, ids = self.config, self._ids(request.inputs)
        match request.task:
            case Generate() as task:
                return generate.asked(task, ids, c.limits, c.eos_token_ids, c.processors)
            case Pool() as task:
                return pool.asked(task, ids, c.limits)

    def _items(self, inputs: TokenInputs, asked: Asked) -> PromptItems | None:
        if not inputs.items:
            return None
        prompt, limits = next(iter(asked.prompts.values())), self.config.limits
        problem = problem_with(inputs.items, prompt, limits.media, limits.max_model_len)
        if problem is None and len(prompt) * 4 != len(inputs.token_ids):
            problem = "a request with items has one prompt"
        if problem is not None:
            raise Refused("invalid", problem)
        return PromptItems(inputs.items, limits.media is not None and limits.media.max_whole_span > 0)

    def _own_salt(self, owner: int, search: int | None) -> bytes:
        """A salt that keeps a request's blocks apart from others; empty if prefixes are cached."""
        if self.config.enable_prefix_caching:
            return b""
        if search is not None:
            return f"search {search} of {owner}".encode()
        return str(next(self._arrivals)).encode()

    def _check_queue(self, request: AddRequest, room: Room) -> TenantState:
        """The request's tenant, if the queue has room."""
        backlog, n, num_tokens = self.backlog, request.task.num_sequences, len(request.inputs.token_ids) // 4
        tenant = backlog.tenant(request.tenant)
        refusal = backlog.refusal(tenant, Ask(n, num_tokens, request.is_bounded, request.timeout_s), room)
        if refusal is not None and not request.task.is_resumed:  # else it was accepted once
            raise Refused(*refusal)
        return tenant

    def _check_fields(self, request: AddRequest) -> None:
        if not 0 <= request.id <= MAX_REQUEST_ID:
            raise Refused("invalid", f"a request id must be between 0 and {MAX_REQUEST_ID}")
        if request.priority and not self.config.by_priority:
            raise Refused("invalid", "a priority other than 0 needs an engine with --scheduling-policy priority")
        if request.adapter is not None and self.config.limits.adapters is None:
            raise Refused("invalid", "this engine takes no adapters: start it with --enable-lora")
        if len(request.cache_salt) > MAX_CACHE_SALT:
            raise Refused("invalid", f"cache_salt may be at most {MAX_CACHE_SALT} characters long")

    def _ids(self, inputs: TokenInputs) -> np.ndarray:
        data, vocab_size = inputs.token_ids, self.config.limits.vocab_size
        if len(data) % 4 or not data:
            raise Refused("invalid", "the prompt must hold at least one token")
        ids = np.frombuffer(data, np.int32)
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise Refused("invalid", f"the prompt holds a token id outside the vocabulary of {vocab_size}")
        return ids


def in_words(request: AddRequest) -> str:
    """A line for the log: the request's parameters, without texts and tokens."""
    task = request.task
    values = loggable(task.params) if isinstance(task, Generate) else msgspec.structs.asdict(task.params)
    params = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None) or "default parameters"
    return f"request {request.id}: {len(request.inputs.token_ids) // 4} prompt tokens, {params}"
