"""The sampler in steps with windows: the drafts before a sample count as tokens that were sampled."""

import numpy as np
import pytest
import torch
from sampler_harness import QUIET, random_case
from sampler_harness import SamplerHarness as Harness

from quire.ipc.step.sections import NO_TOKEN


def compare_windows(device, vocab, seed):
    """Samples behind drafts equal those of rows that have sampled these; rows of several slots, windows of several lengths."""
    rng, lengths = np.random.default_rng(seed), (16, 3, 1, 7, 2)
    rows = sum(lengths)
    ours, theirs = Harness(vocab, device, True, rows), Harness(vocab)
    logits, *_ = random_case(ours, vocab, rows, seed)
    random_case(theirs, vocab, rows, seed)
    logits[:, : min(vocab, 12)] += 30.0  # in a large vocabulary, too, samples are of the ids that drafts have
    slots = [slot for slot, n in enumerate(lengths) for _ in range(n)]
    places = [place for n in lengths for place in range(n)]
    ids = rng.integers(0, min(vocab, 12), rows)  # the same ones often: they are in bad words, penalized, and occur twice
    for h in (ours, theirs):
        for slot in range(3):
            words = [[int(ids[1])], [int(ids[1]), int(ids[2])], ids[2:5].tolist(), ids[1:16].tolist(), [vocab - 1, 0]]
            h.processors(slot, ids[:4].tolist(), [vocab - 1] * 140 + [int(ids[0])], [(1, 3.0)], (), [0, 2], words)
    positions = [50 + place for place in places]
    for flags in ({"random": False}, {"filtered": False}, {}):
        window = {"window": (ids, places), **flags}
        got = ours.sample(logits, slots, positions, **window).tolist()
        assert got == theirs.sample(logits, slots, positions, **window).tolist(), flags
    alone = []
    for row, (slot, place, at) in enumerate(zip(slots, places, positions, strict=True)):
        if slot < 3:
            output = [vocab - 1] * 140 + [int(ids[0])] + ids[row - place + 1 : row + 1].tolist()
            theirs.processors(slot, ids[:4].tolist(), output, [(1, 3.0)], (), [0, 2], words)
        alone.append(theirs.sample(logits[row : row + 1], [slot], [at]).item())
    assert got == alone
    without = ours.sample(logits, slots, positions)
    assert without.tolist() != got  # the drafts do count
    assert ours.sample(logits, slots, positions, window=(ids, [0] * rows)).tolist() == without.tolist()


def compare_masks(device, vocab, seed):
    """Behind a draft a mask of zeros gives NO_TOKEN, and at a row's first place what it gives without windows."""
    rng, places = np.random.default_rng(seed), [0, 1, 2, 0, 0, 1, 0, 1]
    rows = len(places)
    ours, theirs = Harness(vocab, device, True, rows), Harness(vocab)
    logits, *_ = random_case(ours, vocab, rows, seed)
    random_case(theirs, vocab, rows, seed)
    ids, slots, positions = rng.integers(0, vocab, rows), [0, 0, 0, 1, 2, 2, 3, 3], [50 + place for place in places]
    masks = torch.from_numpy(rng.integers(-(2**31), 2**31, (rows, vocab // 32 + 1), dtype=np.int64).astype(np.int32))
    masks[[1, 3, 5]] = 0
    for flags in ({"random": False}, {"filtered": False, "processors": False}, {"processors": False}, {}):
        given = {"window": (ids, places), "bitmask": masks, **flags}
        got = ours.sample(logits, slots, positions, **given).tolist()
        assert got == theirs.sample(logits, slots, positions, **given).tolist(), flags
        assert got[1] == got[5] == NO_TOKEN and min(got[i] for i in (0, 2, 4, 6, 7)) >= 0
        del given["window"]
        assert ours.sample(logits, slots, positions, **given)[3].item() == got[3], flags


@QUIET
@pytest.mark.interpret
@pytest.mark.parametrize("vocab", [37, pytest.param(1500, marks=pytest.mark.slow)])
def test_drafts_before_a_sample_count_in_the_interpreter(vocab):
    compare_windows("cpu", vocab, vocab)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [37, 1500, 151936])
def test_drafts_before_a_sample_count(vocab):
    compare_windows("cuda", vocab, vocab)


@QUIET
@pytest.mark.interpret
@pytest.mark.parametrize("vocab", [75, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_mask_of_zeros_ends_a_window_in_the_interpreter(vocab):
    compare_masks("cpu", vocab, vocab)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [75, 1500, 151936])
def test_a_mask_of_zeros_ends_a_window(vocab):
    compare_masks("cuda", vocab, vocab)
