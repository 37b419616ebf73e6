"""What the scheduler gives its caller besides a plan: a step to remember until it returns, and what its results mean."""

from dataclasses import dataclass, field

import numpy as np

from quire.enginecore.scheduling.plan_builder import NO_WORDS, SideTarget
from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.messages.frontend import Finished, Started


@dataclass(frozen=True)
class ScheduledStep:
    """What must be remembered until a step's results are back. Rows: decode rows, then prefill rows."""

    step: int
    slots: np.ndarray  # int32 [rows]
    samples: np.ndarray  # bool [rows]
    prefills: list[tuple[Sequence, int]]  # sequence, and tokens computed once this step is done
    num_tokens: int
    side_rows: dict[int, SideTarget] = field(default_factory=dict)  # rows whose results come by message, too
    processed_rows: np.ndarray = field(default_factory=lambda: NO_WORDS)  # int32; NO_TOKEN there is a processor's failure
    mask_rows: np.ndarray = field(default_factory=lambda: NO_WORDS)  # int32; NO_TOKEN there is a mask that did not come


@dataclass
class StepOutput:
    """What a step's results mean: new tokens in row order, and which sequences began or ended. Arrays have equal length."""

    owners: np.ndarray
    keys: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray  # row of the step that each token came from
    wants_logprobs: np.ndarray
    since_last: np.ndarray  # seconds since the same sequence's token before; NaN for its first
    finished: list[tuple[int, Finished]] = field(default_factory=list)  # (owner, ...)
    started: list[tuple[int, Started]] = field(default_factory=list)


@dataclass
class Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
