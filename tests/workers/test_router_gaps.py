"""Routers of the tiny models are rarely near a tie, and behind one alone another text is taken as equal (router_gaps.py)."""

import pytest
import router_gaps
import tiny_moe
import torch
from inline_engine import InlineEngine
from router_gaps import exact, inputs_of_routers, scores, tie_at, token_gaps
from test_greedy_equality import GREEDY, equals_but_for_ties, is_greedy, prompts
from tiny_models import tiny_model

NEAR = 1e-3
CASES = [name if name in tiny_moe.FIRST else pytest.param(name, marks=pytest.mark.slow) for name in tiny_moe.MODELS]


@pytest.mark.parametrize("name", CASES)
def test_ties_are_rare_and_rounding_is_far_below_them(name):
    """Of the tokens that test_equals_generate compares."""
    engine, asked = InlineEngine(tiny_model(name)), [prompts()[n] for n in (0, 8, 15)]
    texts = [(*prompt, *output[:-1]) for prompt, output in zip(asked, engine.generate(asked, GREEDY), strict=True)]
    gaps = torch.cat([token_gaps(name, text) for text in texts])
    assert (gaps <= router_gaps.TIE).float().mean() < 0.04, float((gaps <= router_gaps.TIE).float().mean())
    assert (gaps > NEAR).float().mean() > 0.4, float((gaps > NEAR).float().mean())
    for router, h in inputs_of_routers(engine.model, texts[1]):
        logits = torch.nn.functional.linear(h, router.weight, router.bias)
        rounded = (scores(logits, router.routing) - scores(exact(router, h), router.routing)).abs().max()
        assert rounded < router_gaps.TIE / 10


def test_another_text_is_equal_behind_a_tie_alone(monkeypatch):
    name, prompt = "qwen3-moe", prompts()[8]
    [want] = InlineEngine(tiny_model(name)).generate([prompt], GREEDY)
    assert equals_but_for_ties(name, prompt, want, want) and is_greedy(name, tuple(prompt), tuple(want))
    changed = [*want[:20], (want[20] + 1) % 512, *want[21:]]
    gaps = token_gaps(name, (*prompt, *want))
    before = len(prompt) + 20
    for near, is_equal in ((before - 1, True), (3, True), (before, False), (before + 5, False)):
        there = gaps.clamp(min=1.0)
        there[near] = 0.0
        monkeypatch.setattr(router_gaps, "token_gaps", lambda _, tokens, there=there: there[: len(tokens)])
        is_greedy.cache_clear()
        assert tie_at(name, [*prompt, *want]) == near and tie_at("llama", prompt) is None
        assert equals_but_for_ties(name, prompt, changed, want) is is_equal
        assert is_greedy(name, tuple(prompt), tuple(changed)) is is_equal
    is_greedy.cache_clear()
