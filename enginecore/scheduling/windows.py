"""Windows: how many drafts the decode rows of a step may have. No I/O.

A window costs blocks, and a place in the step's tokens and samples: it never takes them from anybody. Steps have none where
something counts on one token a row. How many drafts pay is Verification's to say. A draft model drafts behind the step before,
so no row has more than it made there; where drafts are of no use it only reads prompts until the next try is near. Called by
DecodeRows (decode.py) for each step, and told how the drafts of a step with windows fared.

Rows of constrained sequences share a step with others, and have narrower windows:

    a row without a mask    ends before the length from which it needs one (Slots.mask_from)
    a row with a mask       needs one at each place: the step's rows share MOST_DRAFT_MASKS beyond one a row
    a held mask             was made before its row was scheduled, for one place: the window is 1 (Slots.mask_window)
"""

import numpy as np

from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.sequence import Slots
from quire.enginecore.scheduling.step import Counters, ScheduledStep
from quire.enginecore.scheduling.verification import TRY_ROWS, Verification
from quire.enginecore.speculation_stats import WindowCounters
from quire.ipc.step.sections import INT32_MAX, MAX_DRAFTS, SAMPLING_CUSTOM, max_samples_of

DRAFTED_BEFORE = 5  # steps before a try behind which a draft model drafts: it reads 16 tokens of a row at a time,
READ_ROWS = 4  # and of no more than these rows, the first ones, if it has rested
MOST_DRAFT_MASKS = 64  # of a step, beyond one a row: one has 19 kB and takes 35 us for 150,000 tokens


class Windows:
    """Without speculation, every window is 1."""

    def __init__(self, config: SchedulerConfig, slots: Slots, counters: Counters) -> None:
        self._config, self._slots = config.speculation, slots
        self._max_samples, self._budget = max_samples_of(config.max_num_seqs), config.max_num_batched_tokens
        counters.windows = self._counters = WindowCounters(self._config.num_speculative_tokens if self._config else 0)
        is_adaptive, self._verification = self._config is not None and self._config.enable_adaptive_verification, None
        if is_adaptive and self._config is not None:
            ahead = 0 if self._config.model is None else DRAFTED_BEFORE if self._config.method == "draft_model" else 1
            self._verification = Verification(counters.step_times, slots, ahead)
        self._draft_tokens = INT32_MAX  # most of the next step
        self._made = 0  # most of a row that a model has made behind the step before
        is_read_late = self._config is not None and self._config.method == "draft_model"
        self._tried_rows = READ_ROWS if is_read_late else TRY_ROWS  # that have drafts in a step that only tries
        self._first_try = 0  # the first of them in the next one

    @property
    def may_be(self) -> bool:
        """Whether decode rows may ever have more than one token."""
        return self._config is not None

    def wanted(self, rows: np.ndarray) -> int:
        """Most tokens that each of these slots' decode rows should have in the next step."""
        if self._config is None:
            return 1
        most, verification = self._config.most_drafts(len(rows)), self._verification
        if verification is None:
            return 1 + most
        room = min(self._budget, self._max_samples) - len(rows)
        self._draft_tokens, depth = verification.drafts(rows, most, room)
        return 1 + min(depth, MAX_DRAFTS if self._config.model is None else self._made)

    def draft_depth(self, num_rows: int) -> int:
        """Most drafts of each row that a drafter with a model should make behind a step of so many rows."""
        if self._config is None or self._config.model is None:
            return 0
        most, verification = self._config.most_drafts(num_rows), self._verification
        return most if verification is None else min(most, verification.depth_behind)

    @property
    def ahead(self) -> int:
        """Tokens behind a window for which a decode row needs blocks, too, because its drafts are computed there."""
        return 0 if self._config is None or self._config.model is None else self._config.num_speculative_tokens

    def settle(self, build: PlanBuilder, rows: np.ndarray, mask_rows: np.ndarray) -> None:
        """Set the windows of a step of these rows, which are chosen now; without any drafts, build.window falls to 1.

        mask_rows: int32 [n], those with masks."""
        build.draft_depth = self._made = self.draft_depth(len(rows))
        if build.window == 1:
            return
        num_prefills = len(build.prefills)
        num_decode, t = len(rows) - num_prefills, self._slots
        decode = rows[:num_decode]
        build.row_windows = widest = np.minimum(build.window, t.max_window[decode])
        if t.num_constrained:
            build.row_windows = self._of_constrained(build, decode, widest, mask_rows[mask_rows < num_decode])
        if self._verification is not None and self._verification.tries and num_decode > self._tried_rows:
            build.row_windows = np.where(self._tried(num_decode), build.row_windows, np.int32(1))
        build.has_narrow_rows = bool((build.row_windows < widest).any())
        left = self._budget - num_decode - build.num_prefill_tokens, self._max_samples - len(rows)
        build.draft_tokens = max(min(self._draft_tokens, int(build.row_windows.sum()) - num_decode, *left), 0)
        needs_one = build.side_targets or (t.sampling_kind[rows] & SAMPLING_CUSTOM).any()
        if needs_one or not build.draft_tokens:
            build.window, build.draft_tokens, build.mask_window, build.row_windows = 1, 0, 1, None

    def _of_constrained(self, build: PlanBuilder, decode: np.ndarray, widest: np.ndarray, masked: np.ndarray) -> np.ndarray:
        """Most tokens of each decode row, int32 [rows]; widest: without constraints. masked: int32 [n], those with masks."""
        t, slots = self._slots, decode[masked]
        windows: np.ndarray = np.minimum(widest, np.maximum(t.mask_from[decode] - t.sched_upper[decode], 1))
        able = t.mask_window[slots]
        count = int((able > 1).sum())
        windows[masked] = np.minimum(np.minimum(widest[masked], able), 1 + MOST_DRAFT_MASKS // max(count, 1))
        build.mask_window = int(windows[masked].max(initial=1))
        return windows

    def _tried(self, num_decode: int) -> np.ndarray:
        """The rows that have drafts in a step that only tries, bool [rows]: others each time, if they have any."""
        rows = np.zeros(num_decode, bool)
        rows[(self._first_try + np.arange(self._tried_rows)) % num_decode] = True
        if self._tried_rows == TRY_ROWS:
            self._first_try = (self._first_try + TRY_ROWS) % num_decode
        return rows

    def observe(self, step: ScheduledStep, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """A step with windows has returned.

        rows: int [n], those of its decode rows that count. drafted: int [rows of the step]. accepted: int [n]."""
        drafted = drafted[rows]
        self._counters.observe(drafted, accepted)
        if self._verification is not None and step.row_windows is not None:
            windows, most = step.row_windows[rows], step.draft_tokens
            self._verification.observe(step.slots[rows], windows, drafted, accepted, most)
