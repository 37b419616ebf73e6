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
