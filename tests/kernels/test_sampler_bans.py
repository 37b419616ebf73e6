"""The sampler where a row's processors, and its mask, leave no token: NO_TOKEN, of that row alone."""

import pytest
import torch
from sampler_harness import KINDS, SamplerHarness

from quire.ipc.step.sections import NO_TOKEN


@pytest.fixture(params=KINDS)
def make(request):
    return lambda vocab: SamplerHarness(vocab, "cuda" if request.param == "cuda" else "cpu", request.param != "torch", 8)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_a_row_whose_processors_leave_nothing_gives_no_token(make, settings):
    h = make(600)
    h.set(has_processors=True, min_len=5, **settings)
    h.set(slot=1, has_processors=True, **settings)
    h.set(slot=2, **settings)
    h.processors(0, allowed=[7, 599], stop=[7, 599])
    h.processors(1, allowed=[7, 599], bad=[[7]])
    logits = torch.zeros(4, 600)
    tokens = h.sample(logits, [0, 0, 1, 2], [3, 5, 1, 1]).tolist()
    assert tokens[0] == NO_TOKEN and tokens[1] in (7, 599) and tokens[2] == 599 and 0 <= tokens[3] < 600
    words = torch.full((4, 19), -1, dtype=torch.int32)
    words[2] = 0
    words[2, 0] = 1 << 7  # what the mask leaves, a bad word is
    masked = h.sample(logits, [0, 0, 1, 2], [3, 5, 1, 1], bitmask=words).tolist()
    assert masked == [*tokens[:2], NO_TOKEN, tokens[3]]
    logits[1] = float("nan")
    assert h.sample(logits, [0, 0, 1, 2], [3, 5, 1, 1]).tolist() == [NO_TOKEN, NO_TOKEN, *tokens[2:]]
