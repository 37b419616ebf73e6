"""How many drafts a step verifies: simulated steps with the times of large models, and drafts that are right by chance.

The scheduler's choice is compared with windows of fixed length. Each draft is right with one probability; if it is not, those
behind it are not looked at.
"""

import itertools

import numpy as np
import pytest
from simulated_steps import DRAFT_MODEL, HEAD, NGRAM, Simulation, best, dense, experts, fixed

from quire.enginecore.scheduling.acceptance import Acceptance
from quire.enginecore.scheduling.sequence import Slots
from quire.enginecore.scheduling.step_times import SIZES, StepTimes, index_of
from quire.enginecore.scheduling.verification import Verification

BATCHES = (1, 4, 16, 64, 256)
DRAFTERS = {"ngram": NGRAM, "draft_model": DRAFT_MODEL, "head": HEAD}
# The times, batch, rate, and drafter. In each run every two of them meet, in the full matrix all four.
CASES = [
    pytest.param(*case, marks=[] if (t, r) == ((b + d) % 2, (b + (d > 0)) % 2) else pytest.mark.slow)
    for (t, b, r, d), case in zip(
        itertools.product(range(2), range(5), range(2), range(3)),
        itertools.product((dense, experts), BATCHES, (0.3, 0.9), DRAFTERS),
        strict=True,
    )
]


@pytest.mark.parametrize(("times", "batch", "rate", "drafter"), CASES)
def test_it_is_as_fast_as_the_best_window(times, batch, rate, drafter):
    simulation = Simulation(times, batch, rate, DRAFTERS[drafter])
    simulation.run(300)
    assert simulation.run(1200) > 0.97 * best(times, batch, rate, DRAFTERS[drafter])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("times", [dense, experts])
def test_of_rows_that_differ_those_with_right_drafts_have_more(times, drafter):
    """Every other row's drafts are hardly ever right."""
    rates = np.where(np.arange(64) % 2, 0.1, 0.9)
    simulation = Simulation(times, 64, rates, DRAFTERS[drafter])
    simulation.run(300)
    assert simulation.run(600) > 1.04 * best(times, 64, rates, DRAFTERS[drafter])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("times", [dense, experts])
def test_drafts_that_are_never_right_cost_little(times, batch):
    simulation = Simulation(times, batch, 0.0)
    assert simulation.run(1500) > 0.98 * fixed(times, batch, 0.0, 1)
    tried = [step for step in simulation.steps[1000:] if step.draft_tokens]
    assert 6 <= len(tried) <= 9
    assert all((step.row_windows > 1).sum() <= 8 for step in tried)
    if batch > 8:
        assert len({int((step.row_windows > 1).argmax()) for step in tried}) > 1, "others each time"


@pytest.mark.parametrize(
    ("times", "drafter", "least"), [(dense, "draft_model", 0.98), (dense, "head", 0.95), (experts, "draft_model", 0.97)]
)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_model_that_is_never_right_costs_little(batch, times, drafter, least):
    """It makes one draft of each row before a try; a draft model behind five steps of 64, since it has text to read first."""
    simulation = Simulation(times, batch, 0.0, DRAFTERS[drafter])
    simulation.run(300)
    assert simulation.run(1200) > least * fixed(times, batch, 0.0, 1)
    drafting = [step.draft_depth for step in simulation.steps[-640:]]
    assert set(drafting) == {0, 1} and sum(drafting) == (50 if drafter == "draft_model" else 10)


@pytest.mark.parametrize(
    ("drafter", "batch"), [("ngram", 1), ("ngram", 16), ("head", 64), ("draft_model", 1), ("draft_model", 64)]
)
def test_drafts_that_come_to_be_right_are_found_and_wrong_ones_given_up(drafter, batch):
    simulation = Simulation(dense, batch, 0.0, DRAFTERS[drafter])
    simulation.run(600)
    for rate in (0.9, 0.0):
        simulation.rate = rate
        simulation.run(64 * 20)  # a try shows one place of few rows
        assert simulation.run(400) > 0.94 * best(dense, batch, rate, DRAFTERS[drafter])


@pytest.mark.parametrize("batch", [4, 64])
def test_rows_without_drafts_take_no_room_from_others(batch):
    """A third of the rows has drafts: the step is as large as theirs, not as those of all rows."""
    simulation = Simulation(dense, batch, 0.9, offers=0.33)
    simulation.run(800)
    assert sum(step.draft_tokens for step in simulation.steps[600:]) < 0.6 * 200 * 15 * batch
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


# -------------------------------------------------------------------------------------------------- what it decides by
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


def test_times_of_drafts_are_told_from_those_of_steps():
    """A pass takes 2 ms, and reading what is missing one more; the step itself 10 ms, and with windows 11."""
    times = StepTimes()

    def learn(*args):
        for _ in range(3):
            times.learn(*args)

    assert times.of_drafts(3, 4) == 0.0 and not times.knows_drafts(1)
    learn(4, False, 0.013, 1, 4)
    assert not times.knows_drafts(1), "nothing is known of the step alone"
    learn(4, False, 0.010)
    learn(4, False, 0.013, 1, 4)
    assert times.knows_step(4) and times.knows_drafts(1)
    assert times.of_drafts(2, 4) == pytest.approx(0.006), "as twice one draft"
    learn(4, False, 0.025, 7, 4)
    for depth, seconds in ((1, 0.003), (2, 0.005), (7, 0.015), (15, 0.031)):
        assert times.of_drafts(depth, 6) == pytest.approx(seconds), "of the nearest number of rows"
    learn(16, True, 0.018, 3, 4)
    assert times.seconds(16, True) == pytest.approx(0.011)
    assert times.seconds(4, False) == pytest.approx(0.010)


def observed(rates, steps=200, window=4, most=10**6, offers=1.0, **how):
    """The acceptance of rows with drafts that are right with these probabilities."""
    rng, rates, slots = np.random.default_rng(1), np.asarray(rates), Slots(len(rates), 32)
    slots.key[:] = 7
    found, rows = Acceptance(slots, **how), np.arange(len(rates))
    for _ in range(steps):
        drafted = (window - 1) * (rng.random(len(rates)) < offers)
        right = np.cumprod(rng.random((len(rates), 15)) < rates[:, None], axis=1).sum(1)
        found.observe(rows, np.full(len(rates), window), drafted, np.minimum(right, drafted), most, 256)
    return found, slots, rows


def test_worth_is_what_drafts_bring():
    found, _, rows = observed([0.6] * 20)
    offered, right = found.worth(rows, 3)
    assert offered[:, -1] == pytest.approx([20, 40, 60])
    assert right[:, -1] == pytest.approx([12, 12 + 7.2, 12 + 7.2 + 4.3], rel=0.08)
    assert (np.diff(offered) >= 0).all() and (np.diff(right) >= 0).all() and (offered[:, 0] == 0).all()


def test_worth_knows_rows_that_differ():
    """The first drafts of the good rows come before the others: as many bring as much."""
    found, slots, rows = observed([0.9] * 10 + [0.1] * 10)
    offered, right = found.worth(rows, 3)
    assert np.interp(10, offered[0], right[0]) > 8 and np.interp(20, offered[0], right[0]) < 11
    assert np.interp(30, offered[2], right[2]) > 20
    slots.key[:10] = 8  # other sequences: nothing is known of them
    offered, right = found.worth(rows, 3)
    assert 3.5 < np.interp(10, offered[0], right[0]) < 7


def test_rows_without_drafts_have_none_or_are_read_later():
    for are_made, share in ((False, 0.25), (True, 1.0)):
        found, _, rows = observed([0.6] * 20, offers=0.25, are_made=are_made)
        assert found.worth(rows, 1)[0][0, -1] == pytest.approx(20 * share, rel=0.15)


def test_a_draft_that_got_no_room_says_nothing():
    """Twenty rows have 3 drafts each, and room is for 20: only that of the first place was surely there or not."""
    slots = Slots(20, 32)
    found, rows = Acceptance(slots), np.arange(20)
    for _ in range(50):
        found.observe(rows, np.full(20, 4), np.ones(20, int), np.ones(20, int), 20, 256)
    assert found.worth(rows, 3)[0][:, -1] == pytest.approx([20, 40, 60], rel=0.1)


def test_a_drafter_rests_where_no_step_will_verify_drafts():
    slots, rows = Slots(4, 32), np.arange(4, dtype=np.int32)
    verification = Verification(StepTimes(), slots, made_ahead=5)

    def asks(steps, accepted):
        found = []
        for _ in range(steps):
            found.append((verification.drafts(rows, 15, 500).tokens, verification.depth_behind))
            verification.observe(rows, np.full(4, 16), np.full(4, 15), np.full(4, accepted), 60)
        return found

    asks(80, 0)  # its times never become known
    rested = asks(128, 0)
    tried = [i for i, (tokens, _) in enumerate(rested) if tokens]
    drafted = [i for i, (_, depth) in enumerate(rested) if depth]
    assert len(tried) == 2 and drafted == [i for at in tried for i in range(at - 5, at)]
    assert {depth for _, depth in rested} == {0, 1} and not verification.pays
    later = asks(60, 15)[-8:]
    assert verification.pays and all(tokens > 4 and depth > 1 for tokens, depth in later)


def test_a_model_drafts_as_deep_as_steps_verify():
    """But for the step before one that verifies more, to see whether they would pay, and behind some that verify none."""
    simulation = Simulation(dense, 64, 0.6, HEAD)
    simulation.run(1280)
    steps = simulation.steps[-640:]
    others = [i for i in range(1, 640) if i % 64 not in (0, 1, 62, 63)]
    assert sum(steps[i].window - 1 == steps[i - 1].draft_depth for i in others) >= 0.95 * len(others)
    assert all(step.window - 1 <= before.draft_depth for before, step in itertools.pairwise(steps))
    assert {step.draft_depth for step in steps} <= {0, 1, 2, 3, 5, 7}
