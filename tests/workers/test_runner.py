"""The runner on the CPU: late grammar masks, prompt logprobs, penalties across preemption, seeds in any company."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from drafters import DrafterOfTexts
from inline_engine import InlineEngine
from tiny_models import reference, tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.step.masks import mask_names, mask_words
from quire.ipc.step.sections import NO_TOKEN, SECTIONS

PROMPTS = [[5, 6, 7], list(range(4, 44)), [9] * 17, [100, 200, 300, 400]]


def with_masks(engine, allowed=None, delayed=False, rows=lambda plan: range(plan.num_rows), missing=()):
    """Make rows of every step wait for masks, and give them in two parts; returns the steps that they came for.

    allowed: the only ids in them, None for all. rows(plan): which rows have one. missing: of rows whose mask never comes.
    """
    came = []
    vocab = engine.runner.ctx.config.vocab_size
    words = np.full(mask_words(vocab), -1, np.int32)
    if allowed is not None:
        bits = np.zeros(len(words) * 32, bool)
        bits[allowed] = True
        words = np.packbits(bits, bitorder="little").view(np.int32)
    schedule = engine.scheduler.schedule

    def masked(now=0.0):
        made = schedule(now)
        if made is None:
            return None
        plan, step = made
        masked_rows = np.asarray(list(rows(plan)), np.int32)
        if len(masked_rows):
            plan = dataclasses.replace(plan, sections={**plan.sections, "mask_rows": masked_rows})
        masks = [r for r in masked_rows if r not in missing]
        halves = [np.asarray(half, np.int32) for half in (masks[1::2], masks[::2]) if half]  # in any order
        engine.masks[plan.step] = [(half, np.tile(words, (len(half), 1))) for half in halves]
        return plan, step

    step = engine.runner.step

    def step_late(plan_words, read_masks):
        def late(plan):
            came.append(plan.step)
            if not delayed:
                return read_masks(plan)
            box, ready = [], threading.Event()
            threading.Timer(0.01, lambda: (box.append(read_masks(plan)), ready.set())).start()
            ready.wait()
            return box[0]

        return step(plan_words, late)

    engine.scheduler.schedule, engine.runner.step = masked, step_late
    return came


@pytest.mark.parametrize("delayed", [False, True])
def test_masks_that_allow_everything_change_nothing_however_late(delayed):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    want = InlineEngine(tiny_model("llama")).generate(PROMPTS, params)
    engine = InlineEngine(tiny_model("llama"))
    came = with_masks(engine, delayed=delayed)
    assert engine.generate(PROMPTS, params) == want
    assert len(came) >= 12


def test_a_mask_binds():
    engine = InlineEngine(tiny_model("llama"))
    with_masks(engine, allowed=[17, 400])
    outs = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert {t for out in outs for t in out} <= {17, 400}


def test_a_mask_binds_its_own_row_in_its_own_step():
    """In turns one row of the batch has a mask: all others, and itself in the next step, go on as they would without."""
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine = InlineEngine(tiny_model("llama"))
    with_masks(engine, allowed=range(engine.runner.ctx.config.vocab_size), rows=lambda plan: [plan.step % plan.num_rows])
    want = InlineEngine(tiny_model("llama")).generate(PROMPTS, params)
    assert engine.generate(PROMPTS, params) == want
    engine = InlineEngine(tiny_model("llama"))
    with_masks(engine, allowed=[17], rows=lambda plan: [1] if plan.step == 3 else [])
    outs = engine.generate(PROMPTS, params)
    assert [out[:2] for out in outs] == [out[:2] for out in want] and outs[1][2] == 17
    assert [outs[i] for i in (0, 2, 3)] == [want[i] for i in (0, 2, 3)]


def test_a_row_without_its_mask_has_no_token_and_the_others_theirs():
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    want = InlineEngine(tiny_model("llama")).generate(PROMPTS, params)
    engine = InlineEngine(tiny_model("llama"))
    with_masks(engine, rows=lambda plan: [1, 2], missing=(2,))
    assert engine.generate(PROMPTS, params) == [*want[:2], [NO_TOKEN], want[3]]


def test_a_row_without_its_masks_has_no_token_in_a_step_with_windows():
    """At its first sample, wherever that lies; the others have theirs, from places without masks, too."""
    params, found = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), []

    def results(missing):
        speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3, enable_adaptive_verification=False)
        engine = InlineEngine(tiny_model("llama"), speculation=speculation)
        engine.runner.device.drafter = DrafterOfTexts(engine.runner.ctx.cache, 0, lambda text: [7] * (len(text) % 4 + 1))
        schedule, take = engine.scheduler.schedule, engine._results

        def masked(now=0.0):
            if (made := schedule(now)) is None:
                return None
            plan, step = made
            if plan.window > 1:
                plan = dataclasses.replace(plan, sections={**plan.sections, "mask_rows": np.arange(4, dtype=np.int32)})
                rows = np.asarray([row for row in (2, 0, 1, 3) if row not in missing], np.int32)
                masks = np.full((len(rows), mask_words(engine.runner.ctx.config.vocab_size)), -1, np.int32)
                engine.masks[plan.step] = [(mask_names(rows, np.zeros_like(rows)), masks)]
            return plan, step

        def until_drafts(step):
            samples = take(step)
            if samples.drafted.all():
                found.append(samples.of_rows(np.arange(4)))
                raise KeyError("drafts in all rows")
            return samples

        engine.scheduler.schedule, engine._results = masked, until_drafts
        with pytest.raises(KeyError, match="drafts in all rows"):
            engine.generate(PROMPTS, params)

    results(())
    results((1, 3))
    whole, lacking = found
    assert all(whole) and [lacking[i] for i in (0, 2)] == [whole[i] for i in (0, 2)]
    assert [lacking[i][0] for i in (1, 3)] == [NO_TOKEN] * 2


def test_every_section_applied_on_the_host_has_its_applier():
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    runner = InlineEngine(tiny_model("qwen3.5"), speculation=config).runner
    of_items = {"encoder_runs"}  # of models that take items beside text
    assert runner._appliers.keys() | of_items == {s.name for s in SECTIONS if s.applied == "host"}


@pytest.mark.parametrize(
    "scheduling",
    [
        {},
        {"budget": 7},
        {"max_num_seqs": 1},
        {"num_blocks": 14, "look_ahead": False},
        {"enable_prefix_caching": False, "depth": 1},
    ],
)
def test_a_seeded_request_gets_the_same_tokens_in_any_company(scheduling):
    params = [
        SamplingParams(temperature=1.0, seed=n, max_tokens=30, ignore_eos=True, top_p=0.9 if n % 2 else 1.0, top_k=40 * (n % 3))
        for n in range(4)
    ]
    alone = [InlineEngine(tiny_model("qwen3")).generate([p], [q])[0] for p, q in zip(PROMPTS, params, strict=True)]
    engine = InlineEngine(tiny_model("qwen3"), **scheduling)
    assert engine.generate(PROMPTS, params) == alone
    assert engine.generate(PROMPTS, params) == alone  # now from the prefix cache, where there is one


def test_penalties_survive_preemption():
    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5
    )
    want = InlineEngine(tiny_model("llama")).generate(PROMPTS, params)
    engine = InlineEngine(tiny_model("llama"), num_blocks=12, look_ahead=False)
    assert engine.generate(PROMPTS, params) == want
    assert engine.scheduler.counters.preemptions > 0


def test_counts_beyond_a_byte_survive_preemption():
    """One token again and again, until its penalty outweighs its bias: later than a byte counts."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, frequency_penalty=0.5, logit_bias={77: 80.0})
    want = InlineEngine(tiny_model("llama")).generate(PROMPTS, params)
    engine = InlineEngine(tiny_model("llama"), num_blocks=36, look_ahead=False)
    assert engine.generate(PROMPTS, params) == want
    assert engine.scheduler.counters.preemptions > 0
    assert all(130 < out.count(77) < 199 for out in want)


@pytest.mark.parametrize("budget", [512, 16])
def test_prompt_logprobs_equal_transformers(budget):
    engine = InlineEngine(tiny_model("llama"), budget=budget)
    prompt = PROMPTS[1]
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=5))
    got = torch.cat([r.logprobs for r in engine.prompt_rows])
    with torch.inference_mode():
        want = reference("llama")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(got) == len(prompt) - 1
    torch.testing.assert_close(got, want[torch.arange(len(prompt) - 1), prompt[1:]], atol=1e-4, rtol=1e-4)
    top = torch.cat([r.top_ids for r in engine.prompt_rows])
    assert top.shape == (len(prompt) - 1, 5) and (top[:, 0] == want[:-1].argmax(-1)).all()


def test_n_children_share_the_prompts_blocks_and_differ_by_seed():
    for caching in (True, False):
        engine = InlineEngine(tiny_model("llama"), enable_prefix_caching=caching)
        name = engine.add(PROMPTS[1], SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True))
        outs = engine.run()
        children = [tuple(outs[name << 8 | c]) for c in range(3)]
        assert len(set(children)) == 3
        assert engine.scheduler.counters.cached_tokens == 2 * 32  # of 40 prompt tokens, two whole blocks, by two children


def test_min_tokens_bad_words_bias_and_allowed_ids_bind():
    engine = InlineEngine(tiny_model("llama"), eos=range(0, 512, 2))
    params = [SamplingParams(temperature=0.0, max_tokens=30, min_tokens=m) for m in (0, 20)]
    early, late = engine.generate([[5, 6, 7]] * 2, params)
    assert len(early) < 20 <= len(late) and all(t % 2 for t in late[:20])
    free = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))[0]
    banned = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, bad_words_token_ids=[free[:1], free[2:4]])
    out = engine.generate([[5, 6, 7]], banned)[0]
    assert free[0] not in out
    only = SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True, allowed_token_ids=[3, 9, 27])
    assert set(engine.generate([[5, 6, 7]], only)[0]) <= {3, 9, 27}
    biased = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logit_bias={77: 100.0})
    assert engine.generate([[5, 6, 7]], biased)[0] == [77, 77, 77]
