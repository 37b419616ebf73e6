"""Which passes a draft model makes behind a step, and to what sizes they are padded where they are captured.

The host knows a step's rows and tokens, and not how many tokens the draft model lacks: a pass has room for those of the step,
and for some more of rows that have fallen behind. Sizes are those of the target's steps (graph_sizes.py).
"""

import bisect
from typing import NamedTuple

from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import MAX_WINDOW, SAMPLING_FILTER, SAMPLING_PROCESSORS, SAMPLING_RANDOM
from quire.workers.graph_sizes import START_TOKENS, decode_sizes, mixed_row_sizes, mixed_token_sizes, most_tokens, prompt_rows

CATCH_UP_TOKENS = 64  # that a pass has room for at least: as many take hardly longer than one, since weights are read once
START_ROWS = 8  # most rows of passes that are captured before serving
_KINDS = SAMPLING_RANDOM | SAMPLING_FILTER | SAMPLING_PROCESSORS
_COMMON_KINDS = (0, SAMPLING_RANDOM)
_KINDS_TO_RUN = (0, SAMPLING_RANDOM, SAMPLING_RANDOM | SAMPLING_FILTER, SAMPLING_PROCESSORS, _KINDS & ~SAMPLING_FILTER, _KINDS)


class DraftPass(NamedTuple):
    """A pass of at most `tokens` tokens in `rows` rows, and the drafts behind it, of which a row has at most `depth`."""

    tokens: int
    rows: int
    mixed: bool  # prefill rows may be among them; otherwise no row has more than MAX_WINDOW tokens
    depth: int
    kind: int  # of sampling, SAMPLING_*


def pass_of(plan: StepPlan, max_tokens: int, *, reads_all: bool = False) -> DraftPass | None:
    """The passes to compute behind a step; None if there are none. reads_all: every step's tokens are read behind it, so that a
    row lacks no more than those of its step, and one: its last token, which had no KV block behind the step before."""
    rows, mixed, depth = plan.num_rows, len(plan.prefill_rows) > 0, plan.draft_depth
    if not rows or not (mixed or depth or reads_all):
        return None
    tokens = plan.num_tokens + (rows if reads_all else len(plan.prefill_rows))
    if plan.draft_tokens or not reads_all:
        tokens = max(tokens, min(MAX_WINDOW * rows, CATCH_UP_TOKENS))
    return DraftPass(min(tokens, max_tokens), rows, mixed, depth, plan.sampling_kind & _KINDS if depth else 0)


class DraftPassSizes:
    """Sizes to which passes are padded, given the worker's limits. weights_bytes: of the draft model. reads_all: as there."""

    def __init__(self, max_rows: int, max_tokens: int, weights_bytes: int, *, reads_all: bool = False):
        self._reads_all = reads_all
        self._decode_tokens, self._decode_rows = decode_sizes(max_tokens), decode_sizes(min(max_rows, max_tokens))
        self._mixed_tokens = mixed_token_sizes(min(max_tokens, most_tokens(max(weights_bytes, 1))))
        mixed = mixed_row_sizes(max_rows)
        self._mixed_rows = sorted({prompt_rows(mixed), *mixed})

    def padded(self, some: DraftPass) -> DraftPass | None:
        """None for a pass that must run eagerly."""
        tokens, rows = (self._mixed_tokens, self._mixed_rows) if some.mixed else (self._decode_tokens, self._decode_rows)
        if not tokens or some.tokens > tokens[-1]:
            return None
        at_tokens, at_rows = bisect.bisect_left(tokens, some.tokens), bisect.bisect_left(rows, some.rows)
        return some._replace(tokens=tokens[at_tokens], rows=rows[at_rows])

    def to_run(self, depth: int) -> list[DraftPass]:
        """Passes that between them run every kernel that others may need."""
        kinds = [self._decode(1, min(2, depth), kind) for kind in reversed(_KINDS_TO_RUN)]
        decode = [self._decode(rows, min(2, depth), 0) for rows in self._decode_rows]
        decode += [self._reading(rows) for rows in self._decode_rows] if self._reads_all else []
        return kinds + decode + [DraftPass(n, self._mixed_rows[0], True, 0, 0) for n in self._mixed_tokens]

    def at_start(self, depth: int) -> list[DraftPass]:
        """Passes to capture before serving: those of a few rows, with all their drafts."""
        rows = [n for n in self._decode_rows if n <= START_ROWS]
        tokens = [n for n in self._mixed_tokens if n <= START_TOKENS]
        mixed = [DraftPass(n, self._mixed_rows[0], True, depth, kind) for n in tokens for kind in _COMMON_KINDS]
        reading = [self._reading(n) for n in rows] if self._reads_all else []
        return [self._decode(n, depth, kind) for n in rows for kind in _COMMON_KINDS] + mixed + reading

    def _decode(self, rows: int, depth: int, kind: int) -> DraftPass:
        """The pass behind a step of so many decode rows, with all their drafts."""
        tokens = max(rows * (1 + depth + self._reads_all), min(MAX_WINDOW * rows, CATCH_UP_TOKENS))
        return DraftPass(self._fitting(tokens), rows, False, depth, kind)

    def _reading(self, rows: int) -> DraftPass:
        """The pass behind a step of so many decode rows without drafts, of a head that drafts nothing."""
        return DraftPass(self._fitting(2 * rows), rows, False, 0, 0)

    def _fitting(self, tokens: int) -> int:
        return self._decode_tokens[bisect.bisect_left(self._decode_tokens, min(tokens, self._decode_tokens[-1]))]
