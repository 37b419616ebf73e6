"""The sampler in steps with windows: the drafts before a sample count as tokens that were sampled."""

import numpy as np
import pytest
from sampler_harness import QUIET, random_case
from sampler_harness import SamplerHarness as Harness


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


@QUIET
@pytest.mark.interpret
@pytest.mark.parametrize("vocab", [37, pytest.param(1500, marks=pytest.mark.slow)])
def test_drafts_before_a_sample_count_in_the_interpreter(vocab):
    compare_windows("cpu", vocab, vocab)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [37, 1500, 151936])
def test_drafts_before_a_sample_count(vocab):
    compare_windows("cuda", vocab, vocab)
