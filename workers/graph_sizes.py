"""Which steps are captured as graphs, and what they are padded to: from the worker's limits and the plan alone.

Steps of decode rows have as many tokens as rows; mixed steps up to `most_tokens` are captured, too; larger ones run eagerly
(there the GPU is slower than the host). At start decode steps are captured, and steps of a few prompts, for which a prompt on
an idle server waits, both of up to START_TOKENS; most others while there is nothing to do. graphs.py captures and replays.
"""

import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from quire.ipc.step.plan import StepPlan
from quire.kernels.tuning.current import current
from quire.kernels.tuning.table import padded_sizes

START_TOKENS = 512  # of the largest step without a mix captured at start: of larger ones the first waits 20 ms, not every start
MAX_ROWS_AHEAD = 64  # of mixed steps captured before they are met: a graph takes memory
PROMPT_ROWS = 4  # of steps of prompts alone: what a prompt on an idle server waits for


def decode_sizes(max_rows: int) -> list[int]:
    """Rows that steps of decode rows are padded to: close together where a row costs a larger part of the step."""
    step = current().step
    return sorted({*padded_sizes(step.decode_sizes, max_rows)} - {*step.slow_sizes} | {max_rows})


def most_tokens(weights_bytes: int) -> int:
    """Tokens of the largest mixed step worth capturing: eagerly, a small model's takes the host longer than the GPU."""
    step = current().step
    return max(step.captured_tokens, step.captured_tokens * step.large_weights_bytes // weights_bytes)


def mixed_token_sizes(max_tokens: int) -> list[int]:
    """Tokens that mixed steps are padded to, up to max_tokens; none if these are very few."""
    step = current().step
    sizes = [s for s in padded_sizes(step.mixed_sizes, max_tokens) if s not in step.slow_sizes]
    return sizes + [max_tokens] * (max_tokens >= step.mixed_sizes[0][0])


def sizes_to_run(sizes: list[int]) -> list[int]:
    """Numbers of decode rows that run every kernel layers may need. 3 is among them: such steps are eager, never captured."""
    return sorted({*sizes, min(3, sizes[-1])})


def mixed_row_sizes(max_rows: int) -> list[int]:
    """Rows that mixed steps are padded to: few sizes, for each is a capture of 20 to 45 ms once it is met.

    Rows cost only in the head and the sampler: an 8B model's head takes 0.03 ms more for 64 rows than for 16.
    """
    return sorted({min(s, max_rows) for s in (64, 128, 256, 512, 1024, max_rows)})


class BatchDescriptor(NamedTuple):
    """What a step is padded to. mixed: prefill rows, too; otherwise every row is a decode row and has one token.

    prompts_only: a mixed step without decode rows; their attention, empty, is a launch a layer.
    """

    tokens: int
    rows: int
    mixed: bool
    prompts_only: bool = False


def mixed_specializations(
    tokens: Iterable[int], rows: Iterable[int], specialization: Callable[[int, int], Hashable]
) -> list[BatchDescriptor]:
    """The smallest mixed steps of these padded sizes that meet every `specialization(tokens, rows)` there is among them."""
    found: dict[Hashable, BatchDescriptor] = {}
    for batch in mixed_batches(tokens, rows):
        found.setdefault(specialization(batch.tokens, batch.rows), batch)
    return list(found.values())


def mixed_batches(tokens: Iterable[int], rows: Iterable[int]) -> Iterator[BatchDescriptor]:
    """All mixed steps of these padded sizes that there can be, those of few rows first."""
    fewest = 0
    for r in sorted(rows):
        for t in sorted(tokens):
            if fewest < t:  # no step has more rows than tokens, but for padding
                yield BatchDescriptor(t, r, True)
        fewest = r


def prompt_rows(rows: list[int]) -> int:
    """What steps of prompts alone are padded to, given the numbers of rows of mixed steps."""
    return min(PROMPT_ROWS, rows[0])


def unmixed_batches(decode: list[int], tokens: list[int], rows: list[int]) -> list[BatchDescriptor]:
    """Decode steps, and a few prompts alone; the largest first."""
    captured = [t for t in reversed(tokens) if t <= current().step.captured_tokens]
    prompts = [BatchDescriptor(t, prompt_rows(rows), True, True) for t in captured]
    return [BatchDescriptor(size, size, False) for size in reversed(decode)] + prompts


def batches_at_start(decode: list[int], tokens: list[int], rows: list[int]) -> list[BatchDescriptor]:
    """Captured before serving: the largest, whose memory is enough for the others, and the small ones without a mix."""
    largest = [BatchDescriptor(tokens[-1], rows[0], True)] if tokens else []
    return largest + [b for b in unmixed_batches(decode, tokens, rows) if b.tokens <= START_TOKENS]


def batches_ahead(decode: list[int], tokens: list[int], rows: list[int]) -> list[BatchDescriptor]:
    """Steps to capture before they are met, those of few rows first, of these the largest."""
    batches = [b for b in unmixed_batches(decode, tokens, rows) if b.tokens > START_TOKENS]
    captured = [t for t in tokens if t <= current().step.captured_tokens]
    batches += mixed_batches(captured, [r for r in rows if r <= MAX_ROWS_AHEAD])
    return sorted(batches, key=lambda b: (b.rows, -b.tokens))


class GraphSizes:
    """Which steps are replayed as graphs, and what they are padded to: from the worker's limits and the plan alone.

    Ranks of one model have equal limits and GPUs, and count the bytes of weights that the largest has, so they agree, whatever
    memory each has left.
    """

    def __init__(self, max_rows: int, max_tokens: int, weights_bytes: int):
        self.decode = decode_sizes(min(max_rows, max_tokens))
        self.mixed_tokens = mixed_token_sizes(min(max_tokens, most_tokens(weights_bytes)))
        self.all_tokens = mixed_token_sizes(max_tokens)  # of eager steps, too
        self.mixed_rows = mixed_row_sizes(max_rows)

    def padded(self, plan: StepPlan) -> BatchDescriptor | None:
        """None if the step must run eagerly."""
        tokens, rows = plan.num_tokens, plan.num_rows
        if not len(plan.prefill_rows):
            size = self.decode[bisect.bisect_left(self.decode, rows)]
            return BatchDescriptor(size, size, False)
        if not self.mixed_tokens or tokens > self.mixed_tokens[-1] or plan.wants_prompt_logprobs or plan.wants_candidates:
            return None
        padded_tokens = self.mixed_tokens[bisect.bisect_left(self.mixed_tokens, tokens)]
        few = prompt_rows(self.mixed_rows)
        if rows <= few and not len(plan.decode_rows):
            return BatchDescriptor(padded_tokens, few, True, True)
        return BatchDescriptor(padded_tokens, self.mixed_rows[bisect.bisect_left(self.mixed_rows, rows)], True)

    def at_start(self) -> list[BatchDescriptor]:
        """Captured before serving."""
        return batches_at_start(self.decode, self.mixed_tokens, self.mixed_rows)

    def ahead(self) -> list[BatchDescriptor]:
        """Captured before they are met, while there is nothing to do."""
        return batches_ahead(self.decode, self.mixed_tokens, self.mixed_rows)
