"""The counts of drafts: totals, by place, and in words."""

import random

import numpy as np

from quire.enginecore.speculation_stats import WindowCounters
from quire.ipc.messages.stats import SpeculationStats


def test_equals_a_count_row_by_row() -> None:
    rng, counters = random.Random(5), WindowCounters(15)
    num_drafts = draft_tokens = 0
    by_place = [0] * 15
    for _ in range(20):
        drafted = [rng.choice((0, 1, 3, 15)) for _ in range(rng.randint(0, 9))]
        accepted = [rng.randint(0, n) for n in drafted]
        counters.observe(np.array(drafted, np.int32), np.array(accepted, np.int32))
        for n, k in zip(drafted, accepted, strict=True):
            num_drafts += n > 0
            draft_tokens += n
            for place in range(k):
                by_place[place] += 1
    assert counters.so_far() == SpeculationStats(num_drafts, draft_tokens, by_place)
    assert by_place[0] and by_place[14]


def test_places_are_those_of_the_configuration() -> None:
    counters, off = WindowCounters(3), WindowCounters()
    for each in (counters, off):
        each.observe(np.array([3, 2]), np.array([3, 0]))
    assert counters.so_far() == SpeculationStats(2, 5, [1, 1, 1]) and off.so_far() is None
    assert SpeculationStats(2, 5, [1, 1, 1]).accepted_tokens == 3


def test_words_are_about_the_time_between() -> None:
    before, after = SpeculationStats(100, 300, [90, 90, 90]), SpeculationStats(110, 330, [98, 94, 90])
    assert after.since(before).in_words() == "accepted length 2.20, drafts accepted by place 80% 40%"
    assert before.since(before).in_words() == ""
    assert SpeculationStats(4, 4, [0, 0]).in_words() == "accepted length 1.00, drafts accepted by place 0%"
