"""Windows: how many drafts the decode rows of a step may have. No I/O.

A window costs blocks, and a place in the step's tokens and samples: it never takes them from anybody. Steps have none where
something counts on one token a row. Where drafts are of no use, only few steps try them. A draft model drafts behind the step
before; where drafts are of no use it only reads prompts until the next try is near. Called by DecodeRows (decode.py) for each
step, and told how the drafts of a step with windows fared.
"""

import numpy as np

from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.sequence import Slots
from quire.enginecore.scheduling.step import Counters
from quire.enginecore.speculation_stats import WindowCounters
from quire.ipc.step.sections import SAMPLING_CUSTOM, max_samples_of

USELESS_STEPS = 32  # steps with windows, one after the other, in which no draft was accepted: then windows are only tried
TRY_EVERY = 64  # steps
DRAFTED_BEFORE = 5  # steps before a try behind which a model drafts: it reads 16 tokens of a row at a time


class Windows:
    """Without speculation, every window is 1."""

    def __init__(self, config: SchedulerConfig, slots: Slots, counters: Counters) -> None:
        self._config, self._slots = config.speculation, slots
        self._max_samples, self._budget = max_samples_of(config.max_num_seqs), config.max_num_batched_tokens
        counters.windows = self._counters = WindowCounters(self._config.num_speculative_tokens if self._config else 0)
        self._useless = 0  # steps with drafts since one was accepted
        self._waited = 0  # steps since windows were tried

    @property
    def may_be(self) -> bool:
        """Whether decode rows may ever have more than one token."""
        return self._config is not None

    def wanted(self, num_rows: int) -> int:
        """Most tokens that each of so many decode rows should have in the next step."""
        if self._config is None:
            return 1
        if self._useless >= USELESS_STEPS and self._config.enable_adaptive_verification:
            self._waited += 1
            if self._waited % TRY_EVERY:
                return 1
        return 1 + self._config.most_drafts(num_rows)

    def draft_depth(self, num_rows: int) -> int:
        """Most drafts of each row that a drafter with a model should make behind a step of so many rows."""
        if self._config is None or self._config.model is None:
            return 0
        is_useless = self._useless >= USELESS_STEPS and self._config.enable_adaptive_verification
        rests = is_useless and not 0 < -self._waited % TRY_EVERY <= DRAFTED_BEFORE
        return 0 if rests else self._config.most_drafts(num_rows)

    @property
    def ahead(self) -> int:
        """Tokens behind a window for which a decode row needs blocks, too, because its drafts are computed there."""
        return 0 if self._config is None or self._config.model is None else self._config.num_speculative_tokens

    def settle(self, build: PlanBuilder, rows: np.ndarray, mask_rows: np.ndarray) -> None:
        """Set build.draft_tokens for a step of these rows, which are chosen now; without any, build.window falls to 1."""
        build.draft_depth = self.draft_depth(len(rows))
        if build.window == 1:
            return
        num_prefills = len(build.prefills)
        num_decode = len(rows) - num_prefills
        left = self._budget - num_decode - build.num_prefill_tokens, self._max_samples - len(rows)
        build.draft_tokens = max(min((build.window - 1) * num_decode, *left), 0)
        needs_one = len(mask_rows) or build.side_targets or (self._slots.sampling_kind[rows] & SAMPLING_CUSTOM).any()
        if needs_one or not build.draft_tokens:
            build.window, build.draft_tokens = 1, 0

    def observe(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """A step with windows has returned. drafted, accepted: int [rows], drafts of each decode row."""
        self._counters.observe(drafted, accepted)
        if accepted.any():
            self._useless = self._waited = 0
        elif drafted.any():
            self._useless += 1
