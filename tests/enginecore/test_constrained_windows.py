"""Windows in steps with masks: which rows may have drafts, and how many. A fake worker drafts by coin within these bounds."""

import random
from types import SimpleNamespace

import pytest
from scheduler_harness import Harness

from quire.enginecore.scheduling.windows import MOST_DRAFT_MASKS
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.step.sections import INT32_MAX

SPECULATION = SpeculativeConfig(method="ngram", num_speculative_tokens=15, enable_adaptive_verification=False)


def harness(**more) -> Harness:
    return Harness(speculation=SPECULATION, **{"num_blocks": 2000, "budget": 400, "max_num_seqs": 100, **more})


def constrain(h: Harness, name: int, mask_from: int = 0, max_window: int = 16) -> None:
    seq = h.sequences[name]
    seq.constraint, seq.mask_from = SimpleNamespace(max_window=max_window), mask_from


def decoding(h: Harness, constrained: int, free: int = 0):
    """The first step in which all of these requests have decode rows; its rows are in the order of their names."""
    names = [h.add([i % 40, 1, 2], max_tokens=40) for i in range(constrained + free)]
    for name in names[:constrained]:
        constrain(h, name)
    while not h.in_flight or len(h.in_flight[-1][0].slots) < len(names) or h.in_flight[-1][0].prefills:
        if len(h.in_flight) == h.depth or h.schedule() is None:
            h.collect()
    return h.plans[-1], h.in_flight[-1][0]


@pytest.mark.parametrize(("constrained", "window"), [(1, 16), (4, 16), (5, 13), (16, 5), (32, 3), (64, 2), (65, 1), (80, 1)])
def test_rows_with_masks_share_those_of_their_drafts_and_others_keep_their_windows(constrained, window):
    plan, step = decoding(harness(), constrained, free=3)
    windows = step.row_windows.tolist()
    masked = set(step.mask_rows.tolist())
    assert len(masked) == constrained
    assert {windows[row] for row in masked} == {window}
    assert {w for row, w in enumerate(windows) if row not in masked} == {16}
    assert plan.mask_window == window and constrained * (window - 1) <= MOST_DRAFT_MASKS
    assert step.has_window(step.mask_rows).tolist() == [window > 1] * constrained
    assert ("row_windows" in plan.sections) == (window < 16)


def test_steps_have_windows_of_one_where_all_masks_are_held():
    h = harness()
    name = h.add([1, 2], max_tokens=9)
    constrain(h, name, max_window=1)
    h.run()
    assert all(plan.window == 1 and "row_windows" not in plan.sections for plan in h.plans)
    h.assert_right()


@pytest.mark.parametrize("seed", range(40))
def test_no_token_that_needs_a_mask_comes_without_one(seed):
    """Whatever was accepted meanwhile; with requests that come and go, blocks that lack, and rows that are dropped."""
    r = random.Random(seed)
    h = harness(
        num_blocks=r.choice([40, 400]),
        budget=r.choice([8, 40, 400]),
        max_num_seqs=r.choice([2, 6, 30]),
        look_ahead=r.random() < 0.5,
        eos=range(0, 50, 11) if r.random() < 0.5 else (),
    )
    without_mask: dict[int, list[int]] = {}  # name -> indices of its tokens that came from rows without a mask

    def collect():
        step, _ = h.in_flight[0]
        before = {seq.slot: (name, len(seq.prompt) + len(h.outputs[name])) for name, seq in h.sequences.items()}
        h.collect()
        for row, slot in enumerate(step.slots.tolist()):
            if slot in before and row not in step.mask_rows:
                name, length = before[slot]
                now = len(h.sequences[name].prompt) + len(h.outputs[name])
                without_mask.setdefault(name, []).extend(range(length, now))

    for _ in range(r.randint(1, 12)):
        name = h.add([r.randint(0, 1)] * 3 + list(range(r.randint(1, 20))), r.randint(1, 30), ignore_eos=r.random() < 0.5)
        if r.random() < 0.7:
            prompt = len(h.sequences[name].prompt)
            constrain(h, name, r.choice([0, prompt + r.randint(0, 20), INT32_MAX]), r.choice([1, 16]))
        for _ in range(r.randint(0, 4)):
            while len(h.in_flight) < h.depth and h.schedule() is not None:
                pass
            if h.in_flight and r.random() < 0.1:
                h.defer(r.randint(0, 9), from_this_step_on=r.random() < 0.5)
            if h.in_flight:
                collect()
            if r.random() < 0.5:
                h.release(r.randint(0, 9))
    for _ in range(3000):
        while len(h.in_flight) < h.depth and h.schedule() is not None:
            pass
        if h.in_flight:
            collect()
        elif not any(seq.is_deferred for seq in h.sequences.values()):
            break
        h.release(0)
    assert h.scheduler.is_idle
    h.assert_right()
    for name, indices in without_mask.items():
        assert max(indices, default=-1) < h.sequences[name].mask_from
    for plan in h.plans:
        masked = plan.mask_rows[plan.mask_rows < len(plan.decode_rows)]
        windows = plan.section("row_windows")
        drafts = int((windows[masked] - 1).sum()) if len(windows) else len(masked) * (plan.window - 1)
        assert drafts <= MOST_DRAFT_MASKS
