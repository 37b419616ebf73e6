"""fp32 on the CPU: whole experts distributed over two or four ranks give the tokens that a part of
each, and one rank alone, give.

What is asked and how it is scheduled is test_tensor_parallel.py's. Small faults turn it red. The layer by itself is in
tests/workers/test_experts.py, ranks as processes in tests/serving/test_expert_parallel.py.
"""

import pytest
import torch
from inline_engine import InlineEngine
from test_tensor_parallel import GREEDY, assert_same, prompt, small
from thread_ranks import engine_of_ranks
from tiny_models import tiny_model
from tiny_moe import MODELS

from quire.workers.group.emulated import EmulatedExchange
from quire.workers.layers.experts import Experts, Router
from quire.workers.parallel import Parallel

ALWAYS = "qwen2-moe"
CASES = [name if name == ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_tokens_of_one_alone(name):
    """As two ranks do that hold a part of each expert: test_tensor_parallel.py compares them with the same."""
    engine = small(name, 2, expert_parallel=True)
    assert_same(name, engine)
    assert engine.scheduler.counters.preemptions > 0 and engine.scheduler.counters.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral-sliding-tied", "qwen3-moe-mixed", "deepseek-v3"])
def test_four_ranks_give_the_tokens_of_one_alone(name):
    """Five and six experts over four ranks, too."""
    assert_same(name, small(name, 4, expert_parallel=True))


@pytest.mark.slow
def test_sums_may_be_formed_by_the_norms():
    assert_same("qwen3-moe", small("qwen3-moe", 2, for_norms=True, expert_parallel=True))


@pytest.mark.parametrize(
    "name", [ALWAYS, *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt-oss", "mixtral-sliding-tied"))]
)
def test_dummy_weights_are_one_model_on_any_number_of_ranks(name):
    folder, asked = tiny_model(name), [list(prompt(40))]
    engine = engine_of_ranks(folder, 2, dummy=True, expert_parallel=True)
    assert engine.generate(asked, GREEDY) == InlineEngine(folder, dummy=True).generate(asked, GREEDY)


def test_one_rank_runs_alone_where_the_others_are_emulated():
    emulated = EmulatedExchange(4)
    parallel = Parallel(0, 4, "cpu", emulated, emulated, expert_parallel=True)
    engine = InlineEngine(tiny_model("qwen3-moe"), dummy=True, parallel=parallel)
    assert [len(tokens) for tokens in engine.generate([list(prompt(n)) for n in (3, 40)], GREEDY)] == [24, 24]


# ------------------------------------------------------------------------------------------- faults must turn it red
def of_rank(engine, rank, cls):
    return [module for module in engine.runner.runners[rank].model.modules() if isinstance(module, cls)]


def the_others_experts(engine):
    """Both ranks take themselves for the first."""
    for router in of_rank(engine, 1, Router):
        router._held = (0, router._held[1])


def one_expert_beside(engine):
    for router in of_rank(engine, 1, Router):
        router._held = (router._held[0] + 1, router._held[1])


def experts_in_another_order(engine):
    with torch.inference_mode():
        for experts in of_rank(engine, 0, Experts):
            experts.down.copy_(experts.down.flip(0))


@pytest.mark.parametrize("fault", [the_others_experts, one_expert_beside, experts_in_another_order])
def test_a_fault_is_seen(fault):
    engine = small(ALWAYS, 2, expert_parallel=True)
    fault(engine)
    with pytest.raises(AssertionError):
        assert_same(ALWAYS, engine)
