"""fp32 on the CPU: states of recurrent layers stay right where rows have drafts, and so do the checkpoints that they leave.

test_speculation.py has these models, too, under every schedule. Faults turn the tests red.
"""

import functools

import pytest
from drafters import DrafterOfTexts, drafting
from inline_engine import InlineEngine
from test_speculation import MAX_LEN, config, outputs_of, requests, without_drafts
from thread_ranks import engine_of_ranks
from tiny_models import VOCAB_SIZE, tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig

PROMPT = [(7 * k * k) % 400 + 4 for k in range(50)]
LONG, SHORT = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (130, 10))


@functools.cache
def answer(family, prompt=tuple(PROMPT), max_tokens=LONG.max_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    [output] = InlineEngine(tiny_model(family)).generate([list(prompt)], params)
    return output


def drafted(family, drafter="some", window=8, texts=None, **how):
    """An engine whose drafter knows these texts."""
    engine = InlineEngine(tiny_model(family), **{"speculation": config(window), **how})
    hold(engine.runner, drafter, texts or [PROMPT + answer(family)])
    return engine


def hold(runner, drafter, texts):
    runner.device.drafter = DrafterOfTexts(runner.ctx.cache, 0, drafting(drafter, texts, 7, VOCAB_SIZE))


def accepted(engine):
    return sum(engine.scheduler.counters.windows.so_far().accepted_by_place)


def cached_of(engine, prompt, params=SHORT):
    """(answer, how many tokens of the prompt were found)."""
    before = engine.scheduler.counters.cached_tokens
    [output] = engine.generate([prompt], params)
    return output, engine.scheduler.counters.cached_tokens - before


@pytest.mark.parametrize(("family", "drafter"), [("qwen3.5", "some"), ("nemotron-h", "right"), ("lfm2", "random")])
def test_a_checkpoint_left_within_a_window_is_hit_and_right(family, drafter):
    engine, text = drafted(family, drafter, 16), PROMPT + answer(family)
    assert engine.generate([PROMPT], LONG) == [answer(family)]
    assert drafter == "random" or accepted(engine) > 60
    want = answer(family, tuple(text), SHORT.max_tokens)
    assert cached_of(engine, text) == (want, (len(text) - 2) // 64 * 64)  # the last token was never computed


def test_states_that_are_rounded_by_chance_have_the_same_chances():
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)  # behind them there is a near tie
    want = InlineEngine(tiny_model("qwen3.5"), state_dtype="float16").generate([PROMPT], params)
    engine = drafted("qwen3.5", "some", 8, [PROMPT + want[0]], state_dtype="float16")
    assert engine.generate([PROMPT], params) == want and accepted(engine) > 40


def test_steps_with_and_without_windows_follow_each_other():
    """Rows have drafts while there are at most two of them."""
    lengths = [3, 40, 90, 30, 120, 70, 5, 100]
    prompts = [[token + i for token in PROMPT[: 20 + 5 * i]] for i in range(len(lengths))]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    want = InlineEngine(tiny_model("qwen3.5"), max_num_seqs=3).generate(prompts, params)
    texts = [prompt + output for prompt, output in zip(prompts, want, strict=True)]
    how = SpeculativeConfig(method="ngram", enable_adaptive_verification=False, disable_by_batch_size=2)
    engine = drafted("qwen3.5", "some", texts=texts, max_num_seqs=3, speculation=how, num_states=40)
    assert engine.generate(prompts, params) == want and accepted(engine) > 50
    for text, prompt in zip(texts, prompts, strict=True):
        cold = InlineEngine(tiny_model("qwen3.5")).generate([text], SHORT)[0]
        output, cached = cached_of(engine, text)
        assert output == cold and (cached >= (len(text) - 2) // 64 * 64 or len(text) < len(prompt) + 64)


def test_a_preempted_sequence_goes_on_from_a_checkpoint_left_within_a_window():
    prompts = [PROMPT, [token + 1 for token in PROMPT]]
    want = InlineEngine(tiny_model("qwen3.5")).generate(prompts, LONG)
    texts = [prompt + output for prompt, output in zip(prompts, want, strict=True)]
    engine = drafted("qwen3.5", "some", texts=texts, num_blocks=17, look_ahead=False)
    names, starts = [engine.add(prompt, LONG) for prompt in prompts], []
    outputs = engine.run(until=lambda plan: starts.extend(plan.prefill_rows["start"].tolist()))
    assert [outputs[name << 8] for name in names] == want and engine.scheduler.counters.preemptions
    assert any(start >= 64 for start in starts)


@pytest.mark.parametrize("family", ["qwen3.5", "nemotron-h"])
def test_ranks_apply_alike(family):
    engine = engine_of_ranks(tiny_model(family), 2, max_model_len=MAX_LEN, eos=(7,), speculation=config(8))
    expected, _ = without_drafts(family)
    texts = [[*prompt, *expected[i + 1 << 8]] for i, (prompt, _) in enumerate(requests())]
    for runner in engine.runner.runners:
        hold(runner, "some", texts)
    for prompt, params in requests():
        engine.add(prompt, params if params.logprobs is None else SHORT)
    outputs = engine.run()
    plain = {i + 1 for i, (_, params) in enumerate(requests()) if params.logprobs is None}
    assert {key: tokens for key, tokens in outputs.items() if key >> 8 in plain} == {
        key: tokens for key, tokens in expected.items() if key >> 8 in plain
    }
    assert accepted(engine) > 50


def nothing_is_accepted(engine):
    kept = engine.runner.device.states.kept
    end = kept.end

    def forget(step, num_rows):
        end(step, num_rows)
        kept.tables.num_kept.zero_()

    kept.end = forget


def all_is_accepted(engine):
    kept = engine.runner.device.states.kept
    end = kept.end

    def take(step, num_rows):
        was = step.accepted.clone()
        step.accepted[:num_rows] = step.row_tokens[:num_rows]
        end(step, num_rows)
        step.accepted.copy_(was)

    kept.end = take


def the_other_half(engine):
    kept = engine.runner.device.states.kept
    begin = kept.begin

    def stay(plan):
        begin(plan)
        kept.tables.base.zero_()

    kept.begin = stay


def nothing_is_applied_between(engine):
    engine.runner.device.states.kept.apply_now = lambda *_: None


def places_are_late(engine):
    kept = engine.runner.device.states.kept
    apply = kept.apply

    def late(*args):
        apply(*args)
        kept.tables.keep_at.copy_(kept.tables.keep_at // 64 * 64 + 1)

    kept.apply = late


FAULTS = [nothing_is_accepted, all_is_accepted, the_other_half, nothing_is_applied_between, places_are_late]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault):
    if fault is nothing_is_applied_between:
        with pytest.raises(AssertionError):
            run_turns(fault)
        return
    engine, text = drafted("qwen3.5", "some", 8), PROMPT + answer("qwen3.5")
    if fault is the_other_half:  # rows side by side write over each other's inputs
        want, _ = without_drafts("qwen3.5")
        engine = drafted("qwen3.5", "random", 4, max_model_len=MAX_LEN, eos=(7,))
        fault(engine)
        assert outputs_of(engine)[0] != want
        return
    fault(engine)
    outputs = [*engine.generate([PROMPT], LONG), *engine.generate([text], SHORT)]
    assert outputs != [answer("qwen3.5"), answer("qwen3.5", tuple(text), SHORT.max_tokens)]


def run_turns(fault):
    """Rows take turns, so what is kept is applied between their steps."""
    prompts = [[token + i for token in PROMPT[: 20 + 5 * i]] for i in range(4)]
    want = InlineEngine(tiny_model("qwen3.5")).generate(prompts, LONG)
    texts = [prompt + output for prompt, output in zip(prompts, want, strict=True)]
    engine = drafted("qwen3.5", "some", texts=texts, budget=3)
    fault(engine)
    assert engine.generate(prompts, LONG) == want


def test_rows_that_take_turns_lose_nothing():
    run_turns(lambda engine: None)
