"""Which steps are captured as graphs, and to what sizes they are padded. Both follow from the worker's limits and the plan.

Decode steps have as many tokens as rows. Mixed steps are captured up to `most_tokens`; larger ones run eagerly, since there the
GPU takes longer than the host. At start, decode steps of up to START_TOKENS are captured, and as large steps of a few prompts,
which a prompt on an idle server would wait for; most others while the worker is idle. graphs.py captures and replays.

If rows may have drafts, each step has a second kind, with windows. Its rows are padded to the number of its samples, and in a
decode step these are as many as the tokens.
"""

import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from quire.ipc.step.plan import StepPlan
from quire.kernels.tuning.current import current
from quire.kernels.tuning.table import padded_sizes

START_TOKENS = 512  # the largest unmixed step captured at start: the first larger one waits 20 ms, rather than every start
MAX_ROWS_AHEAD = 64  # of mixed steps that are captured ahead of use: a graph takes memory
START_SAMPLES = 64  # of the largest decode step with windows captured at start
PROMPT_ROWS = 4  # of steps without decode rows, such as the first step of an idle server


def decode_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that decode steps are padded to: close together where one row is a larger share of the step's time."""
    step = current().step
    return sorted({*padded_sizes(step.decode_sizes, max_rows)} - {*step.slow_sizes} | {max_rows})


def most_tokens(weights_bytes: int) -> int:
    """Tokens of the largest mixed step worth capturing: larger for a small model: its eager steps are bound by the host."""
    step = current().step
    return max(step.captured_tokens, step.captured_tokens * step.large_weights_bytes // weights_bytes)


def mixed_token_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens that mixed steps are padded to, up to max_tokens; none if max_tokens is very small."""
    step = current().step
    sizes = [s for s in padded_sizes(step.mixed_sizes, max_tokens) if s not in step.slow_sizes]
    return sizes + [max_tokens] * (max_tokens >= step.mixed_sizes[0][0])


def sizes_to_run(sizes: list[int]) -> list[int]:
    """Numbers of decode rows that between them run every kernel of the layers: also 3, which is never captured."""
    return sorted({*sizes, min(3, sizes[-1])})


def mixed_row_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that mixed steps are padded to. They are few, for each costs a capture of 20 to 45 ms on its first use.

    Padding rows cost time only in the head and the sampler: an 8B model's head takes 0.03 ms more for 64 rows than for 16.
    """
    return sorted({min(s, max_rows) for s in (64, 128, 256, 512, 1024, max_rows)})


class BatchDescriptor(NamedTuple):
    """The sizes that a step is padded to. mixed: it may have prefill rows; otherwise every row is a decode row of one token.

    prompts_only: a mixed step without decode rows, which saves a launch of empty decode attention in each layer. windows:
    decode rows may have drafts, and `rows` is the number of samples, too. adapters: rows may have LoRA adapters.
    """

    tokens: int
    rows: int
    mixed: bool
    prompts_only: bool = False
    windows: bool = False
    adapters: bool = False


def mixed_specializations(
    tokens: Iterable[int], rows: Iterable[int], specialization: Callable[[int, int], Hashable]
) -> list[BatchDescriptor]:
    """The smallest mixed steps of these padded sizes that between them have every value of `specialization(tokens, rows)`."""
    found: dict[Hashable, BatchDescriptor] = {}
    for batch in mixed_batches(tokens, rows):
        found.setdefault(specialization(batch.tokens, batch.rows), batch)
    return list(found.values())


def mixed_batches(tokens: Iterable[int], rows: Iterable[int]) -> Iterator[BatchDescriptor]:
    """All mixed steps that can have these padded sizes, those of few rows first."""
    fewest = 0
    for r in sorted(rows):
        for t in sorted(tokens):
            if fewest < t:  # no step has more rows than tokens, except by padding
                yield BatchDescriptor(t, r, True)
        fewest = r


def prompt_rows(rows: list[int]) -> int:
    """The number of rows that steps without decode rows are padded to, given those of mixed steps."""
    return min(PROMPT_ROWS, rows[0])


def unmixed_batches(decode: list[int], tokens: list[int], rows: list[int]) -> list[BatchDescriptor]:
    """Decode steps, then steps of a few prompts alone; the largest first in each."""
    captured = [t for t in reversed(tokens) if t <= current().step.captured_tokens]
    prompts = [BatchDescriptor(t, prompt_rows(rows), True, True) for t in captured]
    return [BatchDescriptor(size, size, False) for size in reversed(decode)] + prompts


def batches_at_start(decode: list[int], tokens: list[int], rows: list[int]) -> list[BatchDescriptor]:
    """Steps to capture before serving: the largest, so that the others fit into its memory, and small unmixed ones."""
    largest = [BatchDescriptor(tokens[-1], rows[0], True)] if tokens else []
    return largest + [b for b in unmixed_batches(decode, tokens, rows) if b.tokens <= START_TOKENS]


def batches_ahead(decode: list[int], tokens: list[int], rows: list[int]) -> list[BatchDescriptor]:
    """Steps to capture ahead of their first use: by rows, the fewest first, then by tokens, the most first."""
    batches = [b for b in unmixed_batches(decode, tokens, rows) if b.tokens > START_TOKENS]
    captured = [t for t in tokens if t <= current().step.captured_tokens]
    batches += mixed_batches(captured, [r for r in rows if r <= MAX_ROWS_AHEAD])
    return sorted(batches, key=lambda b: (b.rows, -b.tokens))


def windows_ahead(samples: list[int], tokens: list[int], rows: list[int]) -> list[BatchDescriptor]:
    """Steps with windows to capture ahead of their first use, in the order of `batches_ahead`. samples: of decode steps."""
    captured = [t for t in tokens if t <= current().step.captured_tokens]
    mixed = mixed_batches(captured, [r for r in rows if r <= MAX_ROWS_AHEAD])
    batches = [BatchDescriptor(n, n, False) for n in samples] + list(mixed)
    return [b._replace(windows=True) for b in sorted(batches, key=lambda b: (b.rows, -b.tokens))]


class GraphSizes:
    """Which steps are replayed as graphs, and to what sizes they are padded.

    All ranks of a model agree, whatever memory each has left: their limits and GPUs are equal, and weights_bytes is the
    largest. max_samples: of a step with windows; 0: there are none. captures_adapters: steps with adapters are captured at
    start and ahead of their use, too.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        weights_bytes: int,
        max_samples: int = 0,
        captures_adapters: bool = False,
    ):
        self.decode = decode_sizes(min(max_rows, max_tokens))
        self.mixed_tokens = mixed_token_sizes(min(max_tokens, most_tokens(weights_bytes)))
        self.all_tokens = mixed_token_sizes(max_tokens)  # of eager steps, too
        self.mixed_rows = mixed_row_sizes(max_rows)
        # with windows; the least number of samples is two, of a token and its draft
        self.samples = [n for n in decode_sizes(min(max_samples, max_tokens)) if n > 1] if max_samples else []
        self.mixed_samples = mixed_row_sizes(max_samples) if max_samples else []
        self._captures_adapters = captures_adapters

    def padded(self, plan: StepPlan) -> BatchDescriptor | None:
        """None if the step must run eagerly."""
        if plan.has_items:
            return None
        batch = self._padded(plan)
        return batch if batch is None or not plan.has_adapters else self._with_adapters(batch)

    def _with_adapters(self, batch: BatchDescriptor) -> BatchDescriptor | None:
        """The same step with adapters. In a mixed step, layers must be able to tell tokens from samples by their number."""
        if batch.mixed and batch.tokens == batch.rows:
            sizes = self.mixed_samples if batch.windows else self.mixed_rows
            if batch.rows == sizes[-1]:
                return None
            batch = batch._replace(rows=sizes[bisect.bisect_right(sizes, batch.rows)], prompts_only=False)
        return batch._replace(adapters=True)

    def adapters_to_run(self) -> list[BatchDescriptor]:
        """Steps with adapters that between them run every kernel of these; none if such steps are not captured."""
        most = self.decode[-1]
        sizes = sorted({*self.decode, *self.all_tokens[-1:]}) if self._captures_adapters else []
        return [BatchDescriptor(size, min(size, most), size > most, adapters=True) for size in sizes]

    def _and_adapters(self, batches: list[BatchDescriptor]) -> list[BatchDescriptor]:
        """These steps, each of them with and without adapters if both are captured."""
        if not self._captures_adapters:
            return batches
        return [both for batch in batches for both in (batch, self._with_adapters(batch)) if both is not None]

    def _padded(self, plan: StepPlan) -> BatchDescriptor | None:
        tokens, rows, windows = plan.num_tokens, plan.num_samples, plan.window > 1
        unmixed, mixed = (self.samples, self.mixed_samples) if windows else (self.decode, self.mixed_rows)
        if not len(plan.prefill_rows):
            size = unmixed[bisect.bisect_left(unmixed, rows)]
            return BatchDescriptor(size, size, False, windows=windows)
        if not self.mixed_tokens or tokens > self.mixed_tokens[-1] or plan.wants_prompt_logprobs or plan.wants_candidates:
            return None
        padded_tokens = self.mixed_tokens[bisect.bisect_left(self.mixed_tokens, tokens)]
        few = prompt_rows(self.mixed_rows)
        if rows <= few and not len(plan.decode_rows):
            return BatchDescriptor(padded_tokens, few, True, True)
        return BatchDescriptor(padded_tokens, mixed[bisect.bisect_left(mixed, rows)], True, windows=windows)

    def at_start(self) -> list[BatchDescriptor]:
        """Steps to capture before serving."""
        few = [BatchDescriptor(n, n, False, windows=True) for n in reversed(self.samples) if n <= START_SAMPLES]
        return self._and_adapters(batches_at_start(self.decode, self.mixed_tokens, self.mixed_rows) + few)

    def ahead(self) -> list[BatchDescriptor]:
        """Steps to capture ahead of their first use, while the worker is idle."""
        sizes = [n for n in self.samples if n > START_SAMPLES], self.mixed_tokens, self.mixed_samples
        return self._and_adapters(batches_ahead(self.decode, self.mixed_tokens, self.mixed_rows) + windows_ahead(*sizes))
