"""The scheduler's results beside a plan: a record of the step until it returns, and the meaning of its results."""

from dataclasses import dataclass, field

import numpy as np

from quire.enginecore.scheduling.plan_builder import NO_WORDS
from quire.enginecore.scheduling.sequence import Sequence, SequenceState
from quire.enginecore.scheduling.step_times import StepTimes
from quire.enginecore.speculation_stats import WindowCounters
from quire.enginecore.tasks.task import SideTarget
from quire.ipc.messages.frontend import Finished, Started
from quire.ipc.step.sections import SAMPLING_CUSTOM


@dataclass(frozen=True)
class ScheduledStep:
    """A step that was scheduled, to be kept until its results are back. Rows: decode rows, then prefill rows."""

    step: int
    slots: np.ndarray  # int32 [rows]
    samples: np.ndarray  # bool [rows]
    prefills: list[tuple[Sequence, int]]  # sequence, and tokens computed once this step is done
    num_tokens: int  # at most
    side_rows: dict[int, SideTarget] = field(default_factory=dict)  # rows with results that come by message, too
    processed_rows: np.ndarray = field(default_factory=lambda: NO_WORDS)  # int32; NO_TOKEN here means a processor failed
    mask_rows: np.ndarray = field(default_factory=lambda: NO_WORDS)  # int32; NO_TOKEN here means a mask did not come
    window: int = 1  # most tokens of a decode row
    draft_tokens: int = 0  # most drafts of all rows
    row_windows: np.ndarray | None = None  # int32 [decode rows], most tokens of each; None if window is 1
    draft_depth: int = 0  # most drafts of a row that a model makes behind it
    has_runs: bool = False  # items are encoded before it

    def has_window(self, rows: np.ndarray) -> np.ndarray:
        """Whether each of these rows may have drafts, bool [n]. rows: int32 [n]."""
        if self.row_windows is None:
            return np.zeros(len(rows), bool)
        windows = np.append(self.row_windows, np.int32(1))  # of prefill rows
        has_them: np.ndarray = windows[np.minimum(rows, len(windows) - 1)] > 1
        return has_them

    @property
    def size(self) -> tuple[int, int, int]:
        """(step, rows, most drafts): the result words that there will be."""
        return self.step, len(self.slots), self.draft_tokens

    def ended_with_prompt(self) -> list[Sequence]:
        """The sequences that sample nothing, and have their prompt completed by this step."""
        done = (s for s, computed in self.prefills if s.task.ends_with_prompt and computed == len(s.prompt))
        return [seq for seq in done if seq.state is not SequenceState.FINISHED]


def processed_rows(sampling_kinds: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """The rows that the operator's own logits processors see, int32; sampling_kinds, samples: of all rows of a step, the former
    empty if no row is seen."""
    if not len(sampling_kinds):
        return NO_WORDS
    return (samples & (sampling_kinds & SAMPLING_CUSTOM != 0)).nonzero()[0].astype(np.int32)


@dataclass
class StepOutput:
    """The meaning of a step's results: new tokens in row order, and sequences that began or ended. Arrays are of tokens."""

    owners: np.ndarray
    keys: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray  # row of the step that each token came from
    wants_logprobs: np.ndarray
    since_last: np.ndarray  # [rows with tokens] seconds since the previous ones of the same sequence; NaN for its first
    places: np.ndarray  # where the step's results have the log-probabilities of each token
    finished: list[tuple[int, Finished]] = field(default_factory=list)  # (owner, ...)
    started: list[tuple[int, Started]] = field(default_factory=list)
    drafted: np.ndarray = field(default_factory=lambda: NO_WORDS)  # int32 [rows of the step]: drafts that were verified


@dataclass
class Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    mean_output: float = 0.0  # running mean of the output tokens of sequences that ended
    generation_tokens: int = 0
    preemptions: int = 0
    replays: int = 0  # requests
    replays_given_up: int = 0  # requests
    windows: WindowCounters = field(default_factory=WindowCounters)
    step_times: StepTimes = field(default_factory=StepTimes)  # learnt from steps without prompts
