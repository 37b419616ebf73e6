"""Survival of drafts: what is learnt from a step, and that a step's drafts go where they survive most likely."""

import numpy as np
import torch
from test_windows_cpu import plan_of, some_state

from quire.ipc.step.sections import MAX_WINDOW
from quire.kernels.step import survival as s
from quire.kernels.step.windows_cpu import share_drafts


def test_bounds_part_the_places_of_a_new_sequence():
    first = s.new_survival(3, "cpu").numpy()
    assert (np.diff(s.BOUNDS) < 0).all() and s.BOUNDS[0] > s.ONE and s.BOUNDS[-1] == 0
    bins = (first[0, MAX_WINDOW : MAX_WINDOW + 12, None] < s.BOUNDS).sum(1)
    assert len(set(bins.tolist())) == 12
    assert np.array_equal(first[:4], first[:1].repeat(4, 0)) and np.array_equal(first[4], s.BOUNDS)


def test_acceptance_is_learnt_by_place_and_what_is_not_tried_recovers():
    table = s.new_survival(2, "cpu").numpy()
    for _ in range(60):
        s.observe_cpu(table, np.array([0, 1]), np.array([3, 3]), np.array([4, 2]))
    assert (table[0, :3] > 1000).all() and table[0, 3] == s.FIRST
    assert table[1, 0] > 1000 and table[1, 1] < 10 and table[1, 2] == s.FIRST
    assert table[1, MAX_WINDOW + 2] < 10 < 800 < table[0, MAX_WINDOW + 2]
    for _ in range(s.FIRST):
        s.observe_cpu(table, np.array([1]), np.array([0]), np.array([1]))
    assert table[1, 1] == s.FIRST


def test_drafts_go_where_they_survive():
    tables, step = some_state()
    tables.num_drafts[:], tables.column("max_window")[:], tables.column("final_len")[:] = 4, 16, 1000
    good, bad = np.array([2]), np.array([4, 5])
    for _ in range(40):
        s.observe_cpu(tables.host["survival"], good, np.array([4]), np.array([5]))
        s.observe_cpu(tables.host["survival"], bad, np.array([4, 4]), np.array([1, 1]))
    rows = [4, 2, 5]
    tables.decode_slots[0, :3] = torch.tensor(rows)
    shares = {}
    for most in (3, 4, 6, 100):
        share_drafts(plan_of(rows, 16, most), tables, step, 8)
        shares[most] = (step.row_tokens[:3] - 1).tolist()
    assert shares == {3: [0, 3, 0], 4: [0, 4, 0], 6: [2, 4, 0], 100: [4, 4, 4]}
