"""fp32 on the CPU: a model shared by two or four ranks gives the tokens that it gives alone, whatever is asked and scheduled.

Ranks are threads (tests/support/thread_ranks.py), whose results are compared word for word after every step, logprobs included.
Small faults turn it red. tests/serving/test_tensor_parallel.py has ranks as processes.
"""

import functools
from typing import Any

import pytest
import tiny_hybrids
import torch
from inline_engine import InlineEngine
from test_greedy_equality import is_greedy
from thread_ranks import RankOfThreads, Threads, engine_of_ranks
from tiny_models import ALL_MODELS, ALWAYS, SPLIT_MODELS, tiny_model
from workers.test_runner import with_masks

from quire.ipc.sampling import SamplingParams
from quire.workers.attention.kv_cache import cache_groups
from quire.workers.group.emulated import EmulatedExchange
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

MOST_TOKENS = 24
PLAIN: dict[str, Any] = {"max_tokens": MOST_TOKENS, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0.0, **PLAIN)
ASKED = {  # name -> (prompt's length, params)
    "greedy": (40, GREEDY),
    "greedy, short": (1, GREEDY),
    "greedy, of whole blocks": (32, GREEDY),
    "random": (17, SamplingParams(temperature=0.9, seed=3, **PLAIN)),
    "three children": (24, SamplingParams(temperature=1.1, seed=4, n=3, **PLAIN)),
    "filters": (9, SamplingParams(temperature=0.8, seed=5, top_k=40, top_p=0.9, min_p=0.01, **PLAIN)),
    "penalties": (
        33,
        SamplingParams(temperature=0.7, seed=6, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, **PLAIN),
    ),
    "a bias, and ids": (12, SamplingParams(temperature=0.0, logit_bias={7: 3.0}, allowed_token_ids=[*range(4, 300)], **PLAIN)),
    "logprobs": (50, SamplingParams(temperature=0.6, seed=8, logprobs=5, prompt_logprobs=3, **PLAIN)),
}
FAMILIES = ("split-llama", "split-qwen3")
HYBRIDS = ("qwen3.5", "nemotron-h", "kimi-linear", "lfm2")  # one of each kind of recurrent layers
SIZES = [(name, 2) for name in (*FAMILIES, *HYBRIDS)] + [("split-qwen2", 4), ("split-mistral", 4)]
SPLIT = [name for name in SPLIT_MODELS if name != "64-ids"]  # they have the tokens of `prompt`
ALL = [*((name, 2) for name in (*ALL_MODELS, *SPLIT)), *((name, 4) for name in (*sorted(ALWAYS), *SPLIT))]
MISFITS = {  # refused, as build.py tells
    ("falcon-7b", 2): "7 attention heads",
    **{(name, 4): "6 attention heads" for name in ("qwen3-tied", "phi3", "falcon-40b")},
}
CASES = [*SIZES, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in [*SIZES, *MISFITS])]


@functools.cache
def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(4, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def small(name: str, size: int, exchange: Any = None, **more: Any) -> InlineEngine:
    """An engine of so few blocks, and of steps of so few tokens, that sequences come in chunks and are preempted."""
    folder = tiny_model(name)
    num_blocks = 16 * len(cache_groups(read_model_config(folder).attention_specs(Parallel()))) or 1
    return engine_of_ranks(folder, size, exchange, budget=32, num_blocks=num_blocks, max_num_seqs=8, look_ahead=False, **more)


def outputs(engine: InlineEngine) -> tuple[dict[str, list[int]], dict[str, list[int]], list[list[float]]]:
    """(tokens of each child of ASKED, the greedy ones' a second time, prompt logprobs chunk by chunk)."""
    names = {engine.add(prompt(length), params): name for name, (length, params) in ASKED.items()}
    first = {f"{names[key >> 8]}, {key & 255}": tokens for key, tokens in engine.run().items()}
    logprobs = [row.logprobs.tolist() for row in engine.prompt_rows]
    again = {name: engine.generate([prompt(length)], params)[0] for name, (length, params) in ASKED.items() if params is GREEDY}
    return first, again, logprobs


@functools.cache
def alone(name: str) -> tuple[dict[str, list[int]], dict[str, list[int]], list[list[float]]]:
    engine = small(name, 1)
    found = outputs(engine)
    tiny_hybrids.assert_scarce(name, engine.scheduler.counters)
    return found


def assert_same(name: str, engine: InlineEngine) -> None:
    """Equal tokens; of greedy ones those count as equal, too, that transformers has within rounding of its best."""
    first, again, logprobs = outputs(engine)
    for got, want in ((first, alone(name)[0]), (again, alone(name)[1])):
        assert got.keys() == want.keys()
        for asked, tokens in got.items():
            length, params = ASKED[asked if asked in ASKED else asked.rpartition(", ")[0]]
            is_near = params is GREEDY and is_greedy(name, prompt(length), tuple(tokens))
            assert tokens == want[asked] or is_near, f"{name}: {asked}"
    for values, expected in zip(logprobs, alone(name)[2], strict=True):
        assert values == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_ranks_give_the_tokens_of_one_alone(name, size):
    engine = small(name, size)
    assert_same(name, engine)
    tiny_hybrids.assert_scarce(name, engine.scheduler.counters)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_grammar_masks_bind_on_all_ranks(size):
    params = SamplingParams(temperature=1.0, seed=2, **PLAIN)
    found = []
    for ranks in (1, size):
        engine = engine_of_ranks(tiny_model("split-llama"), ranks)
        with_masks(engine, allowed=[17, 400, 600, 1690], rows=lambda plan: range(0, plan.num_rows, 2))
        found.append(engine.generate([list(prompt(n)) for n in (5, 20, 33)], params))
    assert found[0] == found[1] and set(found[0][0]) <= {17, 400, 600, 1690}


@pytest.mark.parametrize("name", ["split-llama", pytest.param("split-qwen2", marks=pytest.mark.slow)])
def test_sums_may_be_formed_by_the_norms(name):
    engine = small(name, 2, for_norms=True)
    assert_same(name, engine)
    assert engine.group.norms > 20 and engine.group.sums == 0


@pytest.mark.parametrize(("case", "why"), MISFITS.items())
def test_heads_that_cannot_be_distributed_are_refused(case, why):
    with pytest.raises(ModelConfigError, match=f"its {why} cannot be split over {case[1]} ranks"):
        small(*case)


OTHERS = [name for name in (*ALL_MODELS, *SPLIT) if (name, 2) not in MISFITS and name != "split-llama"]
DUMMIES = ["split-llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.mark.parametrize("name", DUMMIES)
def test_dummy_weights_are_one_model_on_any_number_of_ranks(name):
    folder, asked = tiny_model(name), [list(prompt(40))]
    engine = engine_of_ranks(folder, 2, dummy=True)
    assert engine.generate(asked, GREEDY) == InlineEngine(folder, dummy=True).generate(asked, GREEDY)


@pytest.mark.parametrize("size", [2, 4])
def test_one_rank_runs_alone_where_the_others_are_emulated(size):
    emulated = EmulatedExchange(size)
    engine = InlineEngine(tiny_model("split-llama"), dummy=True, parallel=Parallel(0, size, "cpu", emulated, emulated))
    prompts, params = [list(prompt(n)) for n in (3, 40)], SamplingParams(temperature=1.0, seed=1, logprobs=2, **PLAIN)
    for asked in (GREEDY, params):
        assert [len(tokens) for tokens in engine.generate(prompts, asked)] == [MOST_TOKENS] * 2


# ------------------------------------------------------------------------------------------- faults must turn it red
class OtherOrder(RankOfThreads):
    def all_gather(self, x):
        return super().all_gather(x).flip(0)


class Stale(RankOfThreads):
    """Now and then a sum is the one before it."""

    count, last = 0, None

    def all_reduce(self, x):
        self.count += 1
        total, before = super().all_reduce(x), self.last
        self.last = total.clone()
        return before if self.count % 97 == 0 and before is not None and before.shape == total.shape else total


class Lost(RankOfThreads):
    """The last rank's part is left out."""

    def all_reduce(self, x):
        return super().all_reduce(torch.zeros_like(x) if self.rank == len(self.group.given) - 1 else x)


@pytest.mark.parametrize("fault", [OtherOrder, Stale, Lost])
def test_a_fault_of_the_exchange_is_seen(fault):
    with pytest.raises(AssertionError):
        assert_same("split-llama", small("split-llama", 2, fault))


def test_a_lost_bias_is_seen():
    engine = small("split-llama", 2)
    engine.runner.runners[0].model.model.layers[1].mlp.down_proj.format.bias.zero_()
    with pytest.raises(AssertionError):
        assert_same("split-llama", engine)


def test_ranks_that_sample_apart_are_seen():
    group = Threads(2)
    engine = engine_of_ranks(tiny_model("split-llama"), 2, lambda _, rank: group.rank(rank))
    tables = engine.runner.runners[1].tables
    tables.column("temperature").fill_(2.0)
    step = engine.runner.runners[1].device.sample
    engine.runner.runners[1].device.sample = lambda *a, **k: (tables.column("seed").add_(1), step(*a, **k))
    with pytest.raises(AssertionError, match="different tokens"):
        engine.generate([list(prompt(9))], SamplingParams(temperature=1.0, top_p=0.9, seed=1, **PLAIN))
