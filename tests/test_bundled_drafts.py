"""The bundled model's drafters: they are right often enough, and its answers are those without them."""

import functools
import random

import msgspec
import pytest
from inline_engine import InlineEngine
from tokenizers import Tokenizer

from quire.enginecore.loading.model_files import BUNDLED, BUNDLED_DRAFTS
from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig

MAX_BYTES = {"draft_model": 1_000_000, "eagle3": 2_000_000}
QUESTIONS = [
    "Tell me a story about a fox.",
    "Tell me a story about a cat.",
    "Write a story about a bear.",
    "Count from 3 to 9.",
    "Count from 11 to 20.",
    "What is the capital of France?",
    "Who are you?",
    "Sort these words: pear, apple, fig.",
]


@functools.cache
def prompts():
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    return [tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n").ids for q in QUESTIONS]


def answers(speculation):
    engine = InlineEngine(BUNDLED, eos=(0, 3), speculation=speculation)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    return engine.generate(prompts(), params), engine.scheduler.counters.windows.so_far()


@pytest.mark.parametrize("method", MAX_BYTES)
def test_a_step_of_three_drafts_has_two_and_a_half_tokens(method):
    folder = BUNDLED_DRAFTS / method
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES[method]
    how = {"num_speculative_tokens": 3, "enable_adaptive_verification": False}
    drafted, stats = answers(SpeculativeConfig(method=method, model=str(folder), **how))
    assert drafted == answers(None)[0]
    print(1 + sum(stats.accepted_by_place) / stats.num_drafts, stats.num_drafts)
    assert 1 + sum(stats.accepted_by_place) / stats.num_drafts >= 2.5


@pytest.mark.parametrize("method", MAX_BYTES)
def test_revisited_prefixes_are_drafted_from_as_cold_ones(method):
    """Many requests over a few prefixes, more than the cache holds: of the last ones as much is cached as without drafts, and
    as many drafts are accepted as of the first."""
    how = {"num_speculative_tokens": 3, "enable_adaptive_verification": False}
    speculation = SpeculativeConfig(method=method, model=str(BUNDLED_DRAFTS / method), **how)
    plain, engine = (InlineEngine(BUNDLED, eos=(0, 3), speculation=c, num_blocks=40) for c in (None, speculation))
    params, turns = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), []
    for turn in range(6):
        asked = [prompt + prompts()[(i + 1) % len(QUESTIONS)] for i, prompt in enumerate(prompts())][turn % 2 :]
        assert engine.generate(asked, params) == plain.generate(asked, params)
        assert engine.scheduler.counters.cached_tokens == plain.scheduler.counters.cached_tokens
        stats = engine.scheduler.counters.windows.so_far()
        turns.append((sum(stats.accepted_by_place), stats.draft_tokens))
    cold, last = turns[0], [b - a for a, b in zip(turns[3], turns[4], strict=True)]
    assert engine.scheduler.counters.cached_tokens > 300
    assert last[0] / last[1] >= 0.99 * cold[0] / cold[1] > 0


@pytest.mark.parametrize(("num_requests", "num_prefixes"), [(72, 8), pytest.param(10_000, 60, marks=pytest.mark.slow)], ids=str)
def test_the_last_of_many_requests_accepts_as_much_as_the_first(num_requests, num_prefixes):
    """Over prefixes of which the cache holds a part: each is met cold, hit, evicted, and met again."""
    speculation = SpeculativeConfig(method="eagle3", model=str(BUNDLED_DRAFTS / "eagle3"), num_speculative_tokens=3)
    speculation = msgspec.structs.replace(speculation, enable_adaptive_verification=False)
    engine = InlineEngine(BUNDLED, eos=(0, 3), speculation=speculation, num_blocks=8 + 3 * num_prefixes)
    head = prompts()[0] + prompts()[1]
    asked = [head[:i] + prompts()[i % len(QUESTIONS)] + head for i in range(num_prefixes)]
    params, draw = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), random.Random(5)

    def accepted_by(some):
        before = engine.scheduler.counters.windows.so_far()
        outputs = engine.generate(some, params)
        after = engine.scheduler.counters.windows.so_far()
        return outputs, sum(after.accepted_by_place) - sum(before.accepted_by_place)

    engine.generate([[5]], params)
    first, cold = accepted_by(asked)
    cached, left = engine.scheduler.counters.cached_tokens, num_requests - 2 * num_prefixes
    engine.generate(draw.choices(asked, k=left), params)
    last, revisited = accepted_by(asked)
    assert last == first and revisited >= 0.99 * cold > 0
    assert 16 * left < engine.scheduler.counters.cached_tokens - cached < sum(map(len, asked)) * num_requests / num_prefixes
