"""Task: what a request asks for beyond computing its prompt. A Sequence has one, which its request's children share.

The scheduler computes prompts, whatever they are for. A task decides the rest: which results a chunk of a prompt has, what
these mean, whether the sequence samples tokens behind its prompt, and how. generate.py samples; pool.py makes vectors and
scores of the prompt's hidden states. Intake asks a task's file what the request may be refused for (`Asked`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from quire.ipc.sampling import SamplingParams


class Chunk(NamedTuple):
    """The results of a chunk of a prompt: fields of sections.PREFILL."""

    flags: int  # PREFILL_*
    next_token: int = -1
    num_prompt_logprobs: int = 0
    query: bytes = b""  # with which the chunk, a document, is compared: see ipc/step/late_queries.py


class SideTarget(NamedTuple):
    """The request that a row's side result belongs to, for the core to pass it on."""

    owner: int
    request_id: int
    start: int  # position of the first prompt token that it is about
    key: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    is_last: bool = True  # no other side result of this sequence follows


class Prompted(Protocol):
    """As much of a Sequence as its task reads."""

    owner: int
    request_id: int
    child: int
    key: int
    prompt: np.ndarray  # int32
    num_scored: int
    num_cached_tokens: int


class Task(Protocol):
    """The properties that the scheduler, the slots and the plan read. sampling: how its rows sample, if they do."""

    sampling: SamplingParams

    @property
    def ends_with_prompt(self) -> bool:
        """Whether a sequence ends with the last chunk of its prompt, without a token."""
        ...

    @property
    def ends_by_length(self) -> bool:
        """Whether only its length ends a sequence, so that its final length is known."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether its reader gets tokens as they come, not only the complete output."""
        ...

    @property
    def is_processed(self) -> bool:
        """Whether the operator's own logits processors see its sequences."""
        ...

    @property
    def runs_again(self) -> bool:
        """Whether a sequence may run again after its workers have died."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The request's own stop ids; the model's end-of-sequence ids are a table of the scheduler."""
        ...

    @property
    def min_tokens_stop_ids(self) -> list[int]:
        """All ids that min_tokens masks."""
        ...

    @property
    def sampling_kind(self) -> int:
        """SAMPLING_* of its rows."""
        ...

    def chunk(self, seq: Prompted, start: int, end: int, known: int) -> Chunk:
        """The results of the chunk [start, end) of the sequence's `known` ids."""
        ...

    def side_target(self, seq: Prompted, chunk: Chunk, start: int, end: int) -> SideTarget | None:
        """To whom the chunk's side result belongs; None if it has none."""
        ...


class Asked(NamedTuple):
    """A request's sequences, as its task wants them."""

    task: Task
    prompts: dict[int, np.ndarray]  # by child: int32 ids
    limit: int  # most output tokens of each
    outputs: Mapping[int, np.ndarray] = MappingProxyType({})  # by child, of a request that an engine which was lost has run
    seed: int | None = 0  # None: draw one
    shares: bool = False  # the children share blocks even if prefixes are not cached
    search: int | None = None  # the beam search that the request is a step of
    may_hit: bool = True  # cached blocks can be used: not every position must be computed
