"""fp32 on the CPU: greedy output equals transformers' token for token, however the work is scheduled. For every family.

And the test sees something: each of a handful of small faults in the engine turns it red.
"""

import functools

import pytest
import tiny_families
import tiny_hybrids
import torch
from inline_engine import InlineEngine
from router_gaps import tie_at
from tiny_models import ALL_MODELS, ALWAYS, reference, tiny_model

from quire.ipc.sampling import SamplingParams
from quire.workers.parallel import Parallel

NEW_TOKENS = 64
ROUNDING = 1e-5  # of logits of about 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
# One of each family in every run, its variants where there is time, and of the families beyond Llama's kin test_equals_generate
# alone.
FAMILIES = ("llama", "mistral-sliding", "qwen2-mixed", "qwen3", "deepseek-v3")
MOST = [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in ALL_MODELS]
# Variants of Llama's kin: other models here have their heads, biases and rope tables; workers/test_models.py has them all.
ALIKE = {
    *("llama-mha", "llama-tied", "llama-linear", "mistral", "mistral-tied-mha", "mistral-yarn"),
    *("qwen2-tied", "qwen2-yarn", "qwen2-mha-linear", "qwen3-bias", "qwen3-yarn"),
}
ONE_OF_EACH = [name if name in ALWAYS - ALIKE else pytest.param(name, marks=pytest.mark.slow) for name in ALL_MODELS]
LENGTHS = [1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 47, 48, 64, 65, 80, 97]


@functools.cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in LENGTHS]


def greedy_by_transformers(name: str, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference(name).generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@functools.cache
def is_greedy(name: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Whether each token is transformers' argmax after those before it, and so, by induction, the whole its greedy output.

    One pass over the whole rounds otherwise than token by token: what lies within ROUNDING of the maximum is taken as equal,
    and so is what follows where rounding may have chosen another expert.
    """
    with torch.inference_mode():
        logits = reference(name)(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    scale = max(1.0, float(logits.abs().max()) / 8)
    others = (chosen < logits.max(-1).values - ROUNDING * scale).nonzero()
    return not len(others) or is_behind_tie(name, (*prompt, *output), len(prompt) + int(others[0]))


def is_behind_tie(name: str, tokens: tuple[int, ...], position: int) -> bool:
    """Whether a token at or before the one that `position` was computed from might have gone to another expert."""
    return tie_at(name, tokens[:position]) is not None


def equals_but_for_ties(name: str, prompt: list[int], got: list[int], want: list[int]) -> bool:
    """Token for token, up to where rounding may have chosen another expert."""
    different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    return not different or is_behind_tie(name, (*prompt, *want), len(prompt) + different[0])


def assert_equal(got: list[list[int]], name: str, asked: list[list[int]] | None = None) -> None:
    wrong = [
        len(p)
        for p, out in zip(asked or prompts(), got, strict=True)
        if len(out) != NEW_TOKENS or not is_greedy(name, tuple(p), tuple(out))
    ]
    assert not wrong, f"{name}: output differs from transformers' after prompts of {wrong} tokens"


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_equals_generate(name):
    """The output after three prompts is compared in one pass, and that after the longest one token by token, too, which takes
    transformers as long as everything else."""
    some = [prompts()[n] for n in (0, 8, 15)]
    outputs = InlineEngine(tiny_model(name)).generate(some, GREEDY)
    for prompt, got in zip(some, outputs, strict=True):
        assert len(got) == NEW_TOKENS and is_greedy(name, tuple(prompt), tuple(got))
    if name not in tiny_hybrids.CLAMPED_IN_PREFILL:
        assert equals_but_for_ties(name, some[-1], outputs[-1], greedy_by_transformers(name, some[-1]))


@pytest.mark.parametrize("name", MOST)
def test_sixteen_at_once_and_every_output_is_varied_enough_to_see_a_fault(name):
    outputs = InlineEngine(tiny_model(name)).generate(prompts(), GREEDY)
    assert_equal(outputs, name)
    if name in tiny_families.REPETITIVE:
        assert len({token for out in outputs for token in out}) >= 16
    else:
        assert min(len(set(out)) for out in outputs) >= 16


@pytest.mark.parametrize("name", MOST)
def test_alone_one_after_the_other(name):
    """Every other length, beginning with the first or the second by turns; all lengths of the models that seldom run."""
    asked = prompts()[FAMILIES.index(name) % 2 :: 2] if name in FAMILIES else prompts()
    engine = InlineEngine(tiny_model(name), enable_prefix_caching=False)
    assert_equal([engine.generate([p], GREEDY)[0] for p in asked], name, asked)


@pytest.mark.parametrize("name", MOST)
def test_under_a_token_budget_of_32(name):
    assert_equal(InlineEngine(tiny_model(name), budget=32).generate(prompts(), GREEDY), name)


@pytest.mark.parametrize("name", MOST)
def test_in_a_pool_so_small_that_sequences_are_preempted(name):
    engine = InlineEngine(tiny_model(name), budget=64, num_blocks=26, look_ahead=False)
    assert_equal(engine.generate(prompts(), GREEDY), name)
    assert engine.scheduler.counters.preemptions > 0 or name in tiny_hybrids.WITHOUT_KV_CACHE


@pytest.mark.parametrize("name", MOST)
def test_with_a_cold_and_a_warm_prefix_cache(name):
    engine = InlineEngine(tiny_model(name), num_blocks=1024)
    assert_equal(engine.generate(prompts(), GREEDY), name)
    assert engine.scheduler.counters.cached_tokens == 0
    assert_equal(engine.generate(prompts(), GREEDY), name)
    # of a model with recurrent layers multiples of 64
    assert engine.scheduler.counters.cached_tokens > (100 if name in tiny_hybrids.MODELS else 400)


def test_a_prompt_that_fills_the_context_takes_one_token():
    """The last token is sampled and never computed, so it needs no place."""
    [full] = [p for p in prompts() if len(p) == 64]
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    [want] = InlineEngine(tiny_model("llama")).generate([full], one)
    engine = InlineEngine(tiny_model("llama"), max_model_len=64, budget=48)
    assert engine.generate([full, full[:63]], one)[0] == want
    for params in (GREEDY, SamplingParams(max_tokens=2)):
        with pytest.raises(ValueError, match="at least one output token"):
            engine.add(full, params)


# ------------------------------------------------------------------------------------------- faults must turn it red
def wrong_kv_slot(engine):
    prepare = engine.runner.device.prepare

    def shifted(plan, tables, step, num_tokens, *more):
        prepared = prepare(plan, tables, step, num_tokens, *more)
        if (step.positions[:num_tokens] == 7).any():
            step.slot_mapping[:, :num_tokens][:, step.positions[:num_tokens] == 7] += 1
        return prepared

    engine.runner.device.prepare = shifted


def position_plus_one(engine):
    prepare = engine.runner.device.prepare

    def shifted(plan, tables, step, num_tokens, *more):
        prepared = prepare(plan, tables, step, num_tokens, *more)
        # rotary attention sees differences of positions only: shift those from 20 on
        step.positions[:num_tokens] += (step.positions[:num_tokens] >= 20).int()
        return prepared

    engine.runner.device.prepare = shifted


def wrong_window(engine):
    cache = engine.runner.ctx.cache
    for g, group in enumerate(cache.groups):
        window = group.spec.window + 1 if group.spec.window else 24
        cache.groups[g] = group._replace(spec=group.spec._replace(window=window))


def attention_off(engine):
    attend = engine.runner.attention.attend
    engine.runner.attention.attend = lambda *a: torch.zeros_like(attend(*a))


def lost_tails(engine):
    """Convolutions look back at zeros in place of the inputs before a step."""
    prepare, states = engine.runner.device.prepare, engine.runner.ctx.states
    layers = engine.runner.model.config.state_tensors(Parallel())

    def forgetful(*arguments):
        for layer, tensors in layers.items():
            for tensor, memory in zip(tensors, states.tensors(layer), strict=True):
                if not tensor.is_recurrent:
                    memory.zero_()
        return prepare(*arguments)

    engine.runner.device.prepare = forgetful


@pytest.mark.parametrize("name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5", "kimi-linear"))])
def test_a_convolution_that_loses_its_tail_is_seen(name):
    engine = InlineEngine(tiny_model(name))
    lost_tails(engine)
    with pytest.raises(AssertionError, match="output differs"):
        assert_equal(engine.generate(prompts(), GREEDY), name)


@pytest.mark.parametrize("fault", [wrong_kv_slot, position_plus_one, wrong_window, attention_off])
@pytest.mark.parametrize("name", ["qwen2-mixed", "mistral-sliding"])
def test_a_fault_is_seen(name, fault):
    engine = InlineEngine(tiny_model(name))
    fault(engine)
    with pytest.raises(AssertionError):
        assert_equal(engine.generate(prompts(), GREEDY), name)
