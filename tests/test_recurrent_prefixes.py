"""fp32 on the CPU: a model with recurrent layers gives the same tokens wherever its prompt was found in the cache.

Faults of the states that it begins with turn the test red: another place's, a neighbor's, or none at all.
"""

import functools

import pytest
import tiny_hybrids
import torch
from inline_engine import InlineEngine
from late_checkpoints import keep_late
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.step.sections import NO_STATE

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ONE = SamplingParams(temperature=0.0, max_tokens=1)
PROMPT, OTHER = (torch.randint(4, 500, (330,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in (7, 8))
NAMES = [name if name == "qwen3.5" else pytest.param(name, marks=pytest.mark.slow) for name in tiny_hybrids.FIRST]
# what is asked before, and how many tokens of the prompt are found then
BEFORE = {"nothing": ([], 0), "a part": ([PROMPT[:100]], 64), "more": ([PROMPT[:260] + OTHER[:9]], 256), "all": ([PROMPT], 320)}


def engine_of(name, state_dtype):
    engine = InlineEngine(tiny_model(name), num_states=20, state_dtype=state_dtype)
    for layer in engine.runner.ctx.config.state_tensors(engine.runner.ctx.parallel):
        for tensor in engine.runner.ctx.states.tensors(layer):
            tensor[1:] = float("nan")
    return engine


def answer(name, case, fault=lambda engine: None, state_dtype="auto"):
    """The tokens of the prompt's answer, in this one of BEFORE."""
    before, cached = BEFORE[case]
    engine = engine_of(name, state_dtype)
    fault(engine)
    for prompt in (OTHER, *before):
        engine.generate([prompt], ONE)
    counters = engine.scheduler.counters
    known = counters.cached_tokens
    [tokens] = engine.generate([PROMPT], GREEDY)
    assert counters.cached_tokens - known == cached
    return tokens


@functools.cache
def cold(name, state_dtype="auto"):
    return answer(name, "nothing", state_dtype=state_dtype)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_equal_wherever_the_prompt_is_found(name):
    assert len(set(cold(name))) > 6
    assert all(answer(name, case) == cold(name) for case in BEFORE if case != "nothing")


def test_so_they_are_with_states_that_are_rounded_by_chance():
    want = cold("qwen3.5", "float16")
    assert all(answer("qwen3.5", case, state_dtype="float16") == want for case in BEFORE if case != "nothing")


def begins_with(other):
    """A fault: a chunk that should begin with a state begins with another one."""

    def put_in(engine):
        states = engine.scheduler.kv.states
        begin_chunk = states.begin_chunk

        def begin(held, start, end):
            first, last = begin_chunk(held, start, end)
            return other(states, held, start, first), last

        states.begin_chunk = begin

    return put_in


def one_place_away(states, held, start, first):
    """The state of another place in the same chain, or none."""
    tokens = {node.depth * 16: node.state for node in states._tree if node.hashes[: node.depth] == held.hashes[: node.depth]}
    return next((state for at, state in tokens.items() if at != start), NO_STATE) if first != NO_STATE else first


def a_neighbors(states, held, start, first):
    others = [node.state for node in states._tree if node.hashes[0] != held.hashes[0]]
    return others[0] if others and first != NO_STATE else first


FAULTS = {
    "another place's": one_place_away,
    "a neighbor's": a_neighbors,
    "none": lambda states, held, start, first: NO_STATE,
    "what was there": lambda states, held, start, first: held.state if first == NO_STATE else first,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_state_is_seen(fault):
    case = "nothing" if fault == "what was there" else "more"
    assert answer("qwen3.5", case, begins_with(FAULTS[fault])) != cold("qwen3.5")


def test_a_checkpoint_of_one_block_later_is_seen():
    assert answer("qwen3.5", "more", lambda engine: keep_late(engine.scheduler.kv.states, 16)) != cold("qwen3.5")
