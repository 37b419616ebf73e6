"""How many drafts a step verifies: simulated steps with the times of large models, and drafts that are right by chance.

The scheduler's choice is compared with windows of fixed length. Each draft is right with one probability; if it is not, those
behind it are not looked at.
"""

import numpy as np
import pytest

from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.sequence import Slots
from quire.enginecore.scheduling.step import Counters, ScheduledStep
from quire.enginecore.scheduling.step_times import SIZES, StepTimes, index_of
from quire.enginecore.scheduling.verification import Verification
from quire.enginecore.scheduling.windows import Windows
from quire.ipc.messages.workers import FullAttention
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.step.sections import max_samples_of

FIXED = (1, 2, 4, 8, 16)
BATCHES = (1, 4, 16, 64, 256)


def dense(tokens: int) -> float:
    """Milliseconds of an 8B's step on an H200: bound by weights up to some tokens, and then by products."""
    return 3.82 if tokens == 1 else max(4.05 + 0.0118 * tokens, 1.6 + 0.0235 * tokens)


def experts(tokens: int) -> float:
    """Of a 30B with 8 of 128 experts a token: more tokens read more experts."""
    return 1.43 + 14.5 * (1 - (15 / 16) ** tokens) + 0.009 * tokens


class Simulation:
    def __init__(self, times, batch: int, rate: float, offers: float = 1.0, draft_ms: float = 0.0, **config) -> None:
        """offers: the chance that a row has any drafts. draft_ms: of a model for a draft of each row, before a step."""
        self.draft_ms = draft_ms
        speculation = SpeculativeConfig(**{"method": "ngram", **config})
        self.config = SchedulerConfig(batch, 8192, 4096, 16, 1000, (FullAttention(),), speculation=speculation)
        self.slots, self.counters = Slots(batch, 32), Counters()
        self.slots.max_window[:] = 16
        self.windows = Windows(self.config, self.slots, self.counters)
        self.times, self.batch, self.rate, self.offers = times, batch, rate, offers
        self.rng, self.rows = np.random.default_rng(0), np.arange(batch, dtype=np.int32)
        self.tokens = self.seconds = 0.0
        self.steps: list[ScheduledStep] = []
        self.depths: list[tuple[int, int]] = []  # how many drafts a model makes of each row, and how many a step verifies

    def step(self) -> None:
        build = PlanBuilder(len(self.steps) + 1, 0.0)
        build.window = self.windows.wanted(self.batch)
        self.windows.settle(build, self.rows, self.rows[:0])
        self.depths.append((build.draft_depth, build.window - 1))
        num_tokens = self.batch + build.draft_tokens
        step = ScheduledStep(
            build.step,
            self.rows,
            np.ones(self.batch, bool),
            [],
            num_tokens,
            window=build.window,
            draft_tokens=build.draft_tokens,
            row_windows=build.row_windows,
            draft_depth=build.draft_depth,
        )
        depth = self.steps[-1].draft_depth if self.steps else 0
        self.steps.append(step)
        seconds = (self.times(SIZES[index_of(num_tokens)]) + depth * self.draft_ms) * self.rng.lognormal(0, 0.02)
        self.tokens += self.batch
        self.seconds += seconds
        if build.row_windows is not None:
            drafted = self.share(build.row_windows, build.draft_tokens)
            right = self.rng.random((self.batch, 16)) < self.rate
            accepted = np.minimum(np.cumprod(right, axis=1).sum(1), drafted)
            self.tokens += accepted.sum()
            self.windows.observe(step, self.rows, drafted, accepted)
        self.counters.step_times.learn(num_tokens, build.window > 1, seconds, depth)

    def share(self, windows: np.ndarray, most: int) -> np.ndarray:
        """As the device does: the first draft of each row before any second one."""
        possible = (windows - 1) * (self.rng.random(self.batch) < self.offers)
        totals = np.minimum(possible[:, None], np.arange(16)).sum(0)
        level = int(np.searchsorted(totals, most, "right")) - 1
        drafts = np.minimum(possible, level)
        drafts[np.flatnonzero(possible > level)[: most - totals[level]]] += 1
        return drafts

    def run(self, steps: int) -> float:
        """Tokens a millisecond."""
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds


def fixed(times, batch: int, rate: float, window: int) -> float:
    """Tokens a millisecond with windows of fixed length, as far as a step has room for them."""
    samples = min(batch * window, max_samples_of(batch))
    each, more = divmod(samples, batch)
    tokens = batch * sum(rate**place for place in range(each)) + more * rate**each
    return tokens / times(SIZES[index_of(samples)])


@pytest.mark.parametrize("rate", [0.3, 0.9])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("times", [dense, experts])
def test_it_is_as_fast_as_the_best_window(times, batch, rate):
    best = max(fixed(times, batch, rate, window) for window in FIXED)
    got = Simulation(times, batch, rate).run(1500)
    assert got > 0.97 * best


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("times", [dense, experts])
def test_drafts_that_are_never_right_cost_little(times, batch):
    simulation = Simulation(times, batch, 0.0)
    got = simulation.run(1500)
    assert got > 0.98 * fixed(times, batch, 0.0, 1)
    tried = [step for step in simulation.steps[1000:] if step.draft_tokens]
    assert 6 <= len(tried) <= 9
    assert all((step.row_windows > 1).sum() <= 8 for step in tried)
    if batch > 8:
        assert len({int((step.row_windows > 1).argmax()) for step in tried}) > 1, "others each time"


@pytest.mark.parametrize("batch", [1, 16])
def test_drafts_that_come_to_be_right_are_found_and_wrong_ones_given_up(batch):
    simulation = Simulation(dense, batch, 0.0)
    simulation.run(600)
    for rate, window in ((0.9, 16), (0.0, 1)):
        simulation.rate = rate
        simulation.run(64 * 12)  # a try shows one place of few rows
        simulation.tokens = simulation.seconds = 0.0
        assert simulation.run(400) > 0.95 * fixed(dense, batch, rate, window)


@pytest.mark.parametrize("batch", [4, 64])
def test_rows_without_drafts_take_no_room_from_others(batch):
    """A third of the rows has drafts: the step is as large as theirs, not as those of all rows."""
    simulation = Simulation(dense, batch, 0.9, offers=0.33)
    simulation.run(800)
    steps = simulation.steps[600:]
    assert sum(step.draft_tokens for step in steps) < 0.6 * sum(15 * batch for _ in steps)
    simulation.tokens = simulation.seconds = 0.0
    assert simulation.run(400) > 1.5 * fixed(dense, batch, 0.9, 1)


def test_windows_are_pinned_and_bounded_where_it_is_asked_for():
    pinned = Simulation(dense, 16, 0.0, num_speculative_tokens=5, enable_adaptive_verification=False)
    pinned.run(50)
    assert {(step.window, step.draft_tokens) for step in pinned.steps} == {(6, 80)}
    bounds = [(1, 8, 15), (9, 32, 2)]
    bounded = Simulation(dense, 16, 0.9, num_speculative_tokens_per_batch_size=bounds)
    bounded.run(300)
    assert max(step.window for step in bounded.steps) == 3 and max(step.draft_tokens for step in bounded.steps) == 32
    never = Simulation(dense, 16, 0.9, disable_by_batch_size=15)
    never.run(100)
    assert {step.window for step in never.steps} == {1}


def test_times_are_learnt_by_size_and_guessed_between():
    times = StepTimes()
    assert times.seconds(5, windows=True) > times.seconds(1, windows=False) > 0
    for seconds in (0.5, 0.01, 0.012, 0.011):  # the first one was captured just then
        times.learn(1, False, seconds)
    assert times.seconds(1, False) == pytest.approx(0.01, rel=0.02)
    assert 0.01 < times.seconds(2, True) < times.seconds(16, True) < 0.02
    for _ in range(3):
        times.learn(15, True, 0.03)
    assert times.seconds(13, True) == times.seconds(16, True) == 0.03, "they are padded to one size"
    assert 0.01 < times.seconds(4, True) < times.seconds(8, True) < 0.03
    for _ in range(200):
        times.learn(16, True, 0.06)
    assert times.seconds(16, True) == pytest.approx(0.06, rel=0.01)
    times.learn(16, True, 10.0)
    assert times.seconds(16, True) < 0.07
    assert sorted(set(SIZES)) == SIZES and index_of(10**9) == len(SIZES) - 1


def test_a_drafter_rests_where_no_step_will_verify_drafts():
    """It makes drafts for the first steps, while some pay, and shortly before each try."""
    simulation = Simulation(dense, 4, 0.0)
    verification = Verification(simulation.counters.step_times)
    assert not verification.rests(5)
    for _ in range(40):
        verification.draft_tokens(4, 15, 500)
        verification.observe(np.full(4, 16), np.full(4, 15), np.zeros(4, int), 60)
    assert verification.draft_tokens(4, 15, 500) == 0 and verification.rests(5)
    rested, tried = [], []
    for _ in range(128):
        tried.append(verification.draft_tokens(4, 15, 500) > 0)
        rested.append(verification.rests(5))
    assert sum(tried) == 2 and sum(rested) == 128 - 10
    assert not any(rested[i] for at in np.flatnonzero(tried) for i in range(at - 5, at))
    for _ in range(60):
        verification.observe(np.full(4, 16), np.full(4, 15), np.full(4, 15), 60)
        verification.draft_tokens(4, 15, 500)
    assert verification.draft_tokens(4, 15, 500) > 0 and not verification.rests(5)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_model_that_is_never_right_costs_little(batch):
    """It makes one draft before a try: a pass of a sixth of a step's time, behind five steps of 64."""
    simulation = Simulation(dense, batch, 0.0, method="draft_model", model="a", draft_ms=0.16 * dense(1))
    simulation.run(300)
    simulation.tokens = simulation.seconds = 0.0
    assert simulation.run(1500) > 0.975 * fixed(dense, batch, 0.0, 1)
    assert {depth for depth, _ in simulation.depths[-640:]} == {0, 1}


def test_steps_behind_drafts_say_nothing_of_those_without():
    times = StepTimes()
    for _ in range(3):
        times.learn(1, False, 0.01)
        times.learn(1, False, 0.02, draft_depth=1)
        times.learn(2, True, 0.02, draft_depth=1)
    assert times.seconds(1, False) == 0.01 and times.seconds(2, True) == 0.02


def test_a_model_drafts_no_deeper_than_steps_verify() -> None:
    """But for the steps before one that verifies another number of drafts, to see whether more would pay."""
    simulation = Simulation(dense, 64, 0.6, method="draft_model", model="a")
    for _ in range(1280):
        simulation.step()
    depths = simulation.depths[-640:]
    assert max(depth for depth, _ in depths) <= 15
    others = [(depth, window) for i, (depth, window) in enumerate(depths) if i % 64 < 58]
    assert sum(window <= depth < 2 * max(window, 1) for depth, window in others) >= 0.95 * len(others)
    assert {depth for depth, _ in others} <= {0, 1, 2, 4, 8} and sum(depth for depth, _ in others) < 4 * len(others)
