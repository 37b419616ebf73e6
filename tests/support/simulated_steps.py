"""Steps of a large model, simulated: what they take, what is drafted for their rows, and what of it is accepted by chance.

The scheduler's windows are those of an engine. Drafts are shared out as the device does, and results return a step late.
"""

import numpy as np

from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.sequence import Slots
from quire.enginecore.scheduling.step import Counters, ScheduledStep
from quire.enginecore.scheduling.step_times import SIZES, index_of
from quire.enginecore.scheduling.windows import Windows
from quire.ipc.messages.workers import FullAttention
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.step.sections import MAX_WINDOW, max_samples_of
from quire.kernels.step.survival import BINS, BOUNDS, FIRST, observe_cpu, survival_of

FIXED = (1, 2, 4, 8, 16)
LENGTH = 400  # tokens of a sequence; another one takes its place behind them
LAG = 1  # steps
READ_TOKENS, READ_BY_ROW = 64, 16  # that a draft model reads in a pass


def dense(tokens):
    """Milliseconds of an 8B's step on an H200: bound by weights up to some tokens, and then by products."""
    return 3.82 if tokens == 1 else max(4.05 + 0.0118 * tokens, 1.6 + 0.0235 * tokens)


def experts(tokens):
    """For a 30B with 8 of 128 experts a token: more tokens read more experts."""
    return 1.43 + 14.5 * (1 - (15 / 16) ** tokens) + 0.009 * tokens


class Drafter:
    """pass_ms: of a model for a draft of each row, before a step. read_ms: that it takes of every step, if it reads each."""

    def __init__(self, method, pass_ms=0.0, read_ms=0.0):
        self.pass_ms, self.read_ms = pass_ms, read_ms
        self.config = {"method": method} if method == "ngram" else {"method": method, "model": "a"}


NGRAM, DRAFT_MODEL, HEAD = Drafter("ngram"), Drafter("draft_model", 0.63), Drafter("eagle3", 0.18, 0.18)


class Simulation:
    def __init__(self, times, batch, rate, drafter=NGRAM, offers=1.0, **config):
        """rate: the chance of each draft to be right, of all rows or [batch]. offers: that a row has any drafts."""
        self.times, self.batch, self.rate, self.drafter, self.offers = times, batch, rate, drafter, offers
        speculation = SpeculativeConfig(**{**drafter.config, "num_speculative_tokens": 15, **config})
        self.config = SchedulerConfig(batch, 8192, 4096, 16, 1000, (FullAttention(),), speculation=speculation)
        self.slots, self.counters = Slots(batch, 32), Counters()
        self.slots.max_window[:] = MAX_WINDOW
        self.windows = Windows(self.config, self.slots, self.counters)
        self.rng, self.rows = np.random.default_rng(0), np.arange(batch, dtype=np.int32)
        self.survival = np.zeros((batch, 2 * MAX_WINDOW), np.int32)
        self.left = self.rng.integers(1, LENGTH, batch)  # tokens of each row's sequence that are to come
        self.unread = np.zeros(batch, int)  # tokens of it that the draft model has not read
        self.begin(self.rows)
        self.tokens = self.seconds = 0.0
        self.steps, self.returning = [], []
        self.depth = 0  # of the drafts that were made behind the step before

    def begin(self, rows):
        self.left[rows], self.unread[rows] = np.where(self.left[rows] > 0, self.left[rows], LENGTH), 0
        self.slots.key[rows] += self.batch
        first = np.full((len(rows), MAX_WINDOW), FIRST, np.int32)
        self.survival[rows] = np.concatenate([first, survival_of(first)], 1)

    def step(self):
        build = PlanBuilder(len(self.steps) + 1, 0.0)
        build.window = self.windows.wanted(self.rows)
        self.windows.settle(build, self.rows, self.rows[:0])
        tokens, (window, drafts, row_windows, behind) = self.batch + build.draft_tokens, build.drafts
        how = {"window": window, "draft_tokens": drafts, "row_windows": row_windows, "draft_depth": behind}
        step = ScheduledStep(build.step, self.rows, np.ones(self.batch, bool), [], tokens, **how)
        self.steps.append(step)
        making = self.drafter.read_ms + self.depth * self.drafter.pass_ms
        seconds = (self.times(SIZES[index_of(tokens)]) + making) * self.rng.lognormal(0, 0.02)
        drafted = accepted = np.zeros(self.batch, int)
        if row_windows is not None:
            possible = (row_windows - 1) * (self.rng.random(self.batch) < self.offers) * (self.unread == 0)
            drafted = self.share(np.minimum(possible, self.depth) if self.drafter.pass_ms else possible, drafts)
            right = self.rng.random((self.batch, MAX_WINDOW)) < np.broadcast_to(self.rate, self.batch)[:, None]
            accepted = np.minimum(np.cumprod(right, axis=1).sum(1), drafted)
        observe_cpu(self.survival, self.rows, drafted, accepted + 1)
        self.read(1 + accepted, tokens, behind)
        self.left -= 1 + accepted
        self.begin(np.flatnonzero(self.left <= 0))
        self.tokens += self.batch + self.expected(drafted)
        self.seconds += seconds
        self.returning.append((step, drafted, accepted, seconds, self.depth))
        self.depth = behind
        if len(self.returning) > LAG:
            self.take(*self.returning.pop(0))

    def expected(self, drafted):
        """How many of these drafts are right in the mean, so that runs differ less by chance."""
        rate = np.broadcast_to(self.rate, self.batch)[:, None]
        return (rate ** np.arange(1, MAX_WINDOW) * (np.arange(1, MAX_WINDOW) <= drafted[:, None])).sum()

    def take(self, step, drafted, accepted, seconds, depth):
        self.counters.step_times.learn(step.num_tokens, step.window > 1, seconds, depth, self.batch)
        if step.row_windows is not None:
            self.windows.observe(step, self.rows, drafted, accepted)

    def read(self, new, tokens, depth):
        """A head reads every step; a draft model behind steps with drafts, the first rows first."""
        self.unread += new
        if self.drafter is not DRAFT_MODEL:
            self.unread[:] = 0
        elif depth:
            room = max(tokens, min(READ_BY_ROW * self.batch, READ_TOKENS))
            read = np.minimum(self.unread, READ_BY_ROW)
            self.unread -= np.clip(room - (read.cumsum() - read), 0, read)

    def share(self, possible, most):
        """Drafts of each row: those of the greatest survival."""
        survives = np.where(np.arange(MAX_WINDOW) < possible[:, None], self.survival[:, MAX_WINDOW:], -1)
        counts = (survives[:, :, None] >= BOUNDS).sum(1)
        level = int(np.searchsorted(counts.sum(0), most, "right")) - 1
        drafts, more = counts[:, level], counts[:, min(level + 1, BINS - 1)] - counts[:, level]
        return drafts + np.clip(most - drafts.sum() - (more.cumsum() - more), 0, more)

    def run(self, steps):
        """Tokens a millisecond of these steps."""
        self.tokens = self.seconds = 0.0
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds


def fixed(times, batch, rate, window, drafter=NGRAM):
    """Tokens a millisecond with windows of fixed length, as far as a step has room for them."""
    samples, rate = min(batch * window, max_samples_of(batch)), np.broadcast_to(rate, batch)
    each, more = divmod(samples, batch)
    tokens = sum((rate**place).sum() for place in range(each)) + more * (rate**each).mean()
    making = drafter.read_ms + (each - 1 + (more > 0)) * drafter.pass_ms
    return tokens / (times(SIZES[index_of(samples)]) + making)


def best(times, batch, rate, drafter=NGRAM):
    return max(fixed(times, batch, rate, window, drafter) for window in FIXED)
