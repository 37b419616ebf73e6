"""The bundled model's drafters: they are right often enough, and its answers are those without them."""

import functools

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
