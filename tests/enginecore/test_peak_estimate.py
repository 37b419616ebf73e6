"""The look-ahead at the peak of memory: against a simulation of what it guesses, and one more at a time against all at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.enginecore.scheduling.peak_estimate import FIRST_GUESS, LEAST_LEFT, MARGIN, PeakEstimate, Projection


def blocks_of(tokens):
    return -(-tokens // 4)


def peak(used, final):
    """Blocks needed at the worst end, as the module's docstring says it, one sequence after the other."""
    rows = sorted(zip(used, final, strict=True), key=lambda row: row[0] - row[1])
    worst = 0.0
    for i, (u, f) in enumerate(rows):
        steps = f - u  # until this one ends
        alive = rows[: i + 1] + [row for row in rows[i + 1 :] if row[1] - row[0] == steps]
        worst = max(worst, sum(blocks_of(a) + steps * (blocks_of(b) - blocks_of(a)) / max(b - a, 1) for a, b in alive))
    return worst


lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=12)


@given(rows=lengths, more=lengths, slack=st.integers(-3, 3))
def test_one_more_at_a_time_is_as_all_at_once(rows, more, slack):
    used, final = (np.asarray(column) for column in zip(*((u, u + left) for u, left in rows), strict=True))
    projection = Projection(used, final, blocks_of, len(rows) + len(more) + 1)
    for u, left in more:
        everybody = [*used, u], [*final, u + left]
        worst, at_end = peak(*everybody), sum(map(blocks_of, everybody[1]))
        totals = sorted({int(worst) - 1, int(worst) + 1 + slack, at_end} - {round(worst)}) + [at_end + 1]
        fits = next(total for total in totals if projection.add_if_it_fits(u, u + left, total))
        assert fits == next(total for total in totals if at_end <= total or worst <= total)
        used, final = (np.asarray(column) for column in everybody)
        assert projection.num_held == sum(map(blocks_of, used))


def test_those_that_end_early_make_room_for_the_others():
    used, final = np.asarray([4, 4]), np.asarray([8, 40])  # when the first ends, the second holds 2 blocks
    projection = Projection(used, final, blocks_of, 3)
    assert not projection.add_if_it_fits(4, 8, 9) and projection.add_if_it_fits(4, 8, 10)  # the last one ends with 10
    assert projection.num_held == 3
    alone = Projection(used[:0], final[:0], blocks_of, 1)
    assert not alone.add_if_it_fits(4, 40, 9) and alone.add_if_it_fits(4, 40, 10)


@pytest.mark.parametrize("known", [True, False])
def test_many_are_guessed_as_one_is(known):
    peak_estimate = PeakEstimate()
    for output in (10, 700, 30):
        peak_estimate.observe(output)
    length, prompt, final = np.asarray([10, 400, 990]), np.asarray([10, 20, 30]), np.asarray([5000, 300, 1000])
    many = peak_estimate.final_lens(length, prompt, final, np.full(3, known))
    rows = zip(length.tolist(), prompt.tolist(), final.tolist(), strict=True)
    assert many.tolist() == [peak_estimate.final_len(*row, known) for row in rows]


def test_the_guess_follows_what_ended_lately():
    peak_estimate = PeakEstimate()
    assert peak_estimate.final_len(100, 100, 10_000, False) == 100 + int(MARGIN * FIRST_GUESS)
    for _ in range(300):
        peak_estimate.observe(20)
    assert peak_estimate.final_len(100, 100, 10_000, False) == 100 + LEAST_LEFT  # at least: it has not ended yet
    assert peak_estimate.final_len(100, 90, 120, False) == 120  # never beyond its end
    assert peak_estimate.final_len(100, 90, 120, True) == 120
