"""EAGLE-3 heads in fp32 on the CPU: their logits are those of a plain reference, behind whatever a sequence went through.

Random heads are hardly ever right, so what is right here is drawn from the reference's logits, not from acceptance.
"""

import pytest
import torch
from eagle3_heads import HIDDEN, TAPS, Head, assert_right, head_of, note_drafts
from inline_engine import InlineEngine
from test_speculation import EOS, MAX_LEN, SCHEDULING, assert_equal, config, outputs_of, without_drafts
from thread_ranks import engine_of_ranks
from tiny_models import VOCAB_SIZE, tiny_model

from quire.ipc.sampling import SamplingParams
from quire.workers.models.config import ModelConfigError

PROMPT = [(5 * k * k) % 400 + 4 for k in range(70)]
LAYOUTS = {
    "plain": ({}, {}),
    "few ids": ({"draft_vocab": 300}, {}),
    "narrow": ({"size": 48, "draft_vocab": 300}, {}),
    "norms": ({"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}, {}),
    "norms of each tap": ({"draft_vocab": 200, "fc_norm": True}, {"speculators": True}),
    "speculators": ({"draft_vocab": 200, "norm_before_residual": True}, {"speculators": True}),
    "the target's embedding": ({"embedding": True, "draft_vocab": 300}, {}),
}


def eagle3(folder, window, **more):
    return config(window, method="eagle3", model=str(folder), **more)


def engine_with(speculation, family="llama", **how):
    return InlineEngine(tiny_model(family), **{"max_model_len": MAX_LEN, "eos": (EOS,), "speculation": speculation, **how})


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_reference(name, tmp_path):
    """Of every layout, behind prompts in chunks, accepted and rejected drafts, steps without drafts and the ends of blocks."""
    how, saved = LAYOUTS[name]
    head = head_of(**how)
    engine = engine_with(eagle3(head.save(tmp_path, **saved), 5), budget=24, max_num_seqs=5, max_model_len=200)
    found = note_drafts(engine)
    prompts = [[7], *(PROMPT[: 12 + 10 * i] for i in range(6))]
    engine.generate(prompts, [SamplingParams(max_tokens=20, temperature=0.7, seed=i, ignore_eos=True) for i in range(7)])
    assert_right(found, head, "llama")


def test_fields_may_be_in_an_eagle_config(tmp_path):
    head = head_of(taps=(2, 0, 1), norm_before_fc=True)
    own = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "norm_before_fc": True, "use_aux_hidden_state": True}
    head.save(tmp_path, eagle_config=own, norm_before_fc=None, eagle_aux_hidden_state_layer_ids=None)
    engine = engine_with(eagle3(tmp_path, 4))
    found = note_drafts(engine)
    engine.generate([PROMPT[: 20 + i] for i in range(3)], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    assert_right(found, head, "llama", 10)


@pytest.mark.parametrize("family", ["qwen2-mixed", "gpt-oss", "bloom"])
def test_other_families_are_tapped(family, tmp_path):
    head = head_of(family, draft_vocab=300)
    engine = engine_with(eagle3(head.save(tmp_path), 4), family)
    found = note_drafts(engine)
    engine.generate([PROMPT[: 20 + i] for i in range(3)], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    assert_right(found, head, family, 12)


def test_a_prefix_that_is_hit_is_whole_and_right(tmp_path):
    """No token is computed twice for its hidden state: the feature before a hit's end is kept with its block."""
    head = head_of(draft_vocab=300)
    plain, engine = (engine_with(c, max_model_len=400) for c in (None, eagle3(head.save(tmp_path), 5)))
    found, params = note_drafts(engine), SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    outputs, cached = [], []
    for each in (plain, engine):
        (first,) = each.generate([PROMPT], params)
        before = len(found)
        others = [PROMPT[:64] + [9, 8, 7], PROMPT[:48] + [5], PROMPT + first, PROMPT + first[:26] + [11]]
        outputs.append([first, *each.generate([PROMPT, *others], params)])
        cached.append(each.scheduler.counters.cached_tokens)
    assert outputs[0] == outputs[1] and cached[0] == cached[1] > 300
    assert_right(found[before:], head, "llama")


def test_late_positions_are_as_the_first(tmp_path):
    """A head's config may say that it was trained for short texts: its positions go as far as the model's all the same."""
    head = head_of(draft_vocab=300)
    engine = engine_with(eagle3(head.save(tmp_path, max_position_embeddings=32), 5), max_model_len=700)
    found = note_drafts(engine)
    engine.generate([(PROMPT * 9)[:600]], SamplingParams(max_tokens=40, temperature=0.7, seed=1, ignore_eos=True))
    assert_right(found, head, "llama", 8)


@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_tokens_are_those_without_drafts(scheduling, tmp_path):
    engine = engine_with(eagle3(head_of(draft_vocab=300).save(tmp_path), 4), **SCHEDULING[scheduling])
    assert_equal(outputs_of(engine), without_drafts("llama"))
    assert engine.scheduler.counters.windows.so_far().draft_tokens > 0


@pytest.mark.parametrize("for_norms", [False, True])
def test_ranks_draft_alike(for_norms, tmp_path):
    """Also where sums over the ranks are formed with the norms behind them, which taps come before."""
    speculation = eagle3(head_of(draft_vocab=300).save(tmp_path), 4)
    engine = engine_of_ranks(tiny_model("llama"), 2, max_model_len=MAX_LEN, speculation=speculation, for_norms=for_norms)
    alone = engine_with(eagle3(tmp_path, 4))
    prompts, params = [PROMPT[:20], PROMPT[:33]], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    assert engine.generate(prompts, params) == alone.generate(prompts, params)
    ranks, one = (e.scheduler.counters.windows.so_far() for e in (engine, alone))
    assert ranks == one and one.draft_tokens > 0


def test_a_head_that_is_never_right_still_reads_every_step(tmp_path):
    head = head_of()
    engine = engine_with(eagle3(head.save(tmp_path), 5, enable_adaptive_verification=True), max_model_len=400)
    found, drafter = note_drafts(engine), engine.runner.device.drafter
    run, passes = drafter.run, []
    drafter.run = lambda some, *rest: (passes.append(some.depth), run(some, *rest))
    engine.generate([[4, 5, 6]], SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    assert len(passes) > 250 and passes.count(0) > 150
    assert_right(found[-40:], head, "llama", 20)


@pytest.mark.slow
def test_many_rows_that_enter_new_blocks_together_are_still_read(tmp_path):
    """Each lacks its last token then, so that a pass behind the next step has two tokens of each."""
    head = head_of(draft_vocab=300)
    speculation = eagle3(head.save(tmp_path), 4, enable_adaptive_verification=True)
    engine = engine_with(speculation, max_num_seqs=66, budget=600)
    found, params = note_drafts(engine), SamplingParams(max_tokens=55, temperature=0.7, seed=1, ignore_eos=True)
    engine.generate([[4 + i, 5, 6, 7, 8] for i in range(66)], params)
    assert_right(found[-150:], head, "llama")


@pytest.mark.parametrize(
    ("how", "changes", "said"),
    [
        ({"taps": (0, 1, 3)}, {}, "it reads the input of layer 3, and the model has layers 0 to 2"),
        ({}, {"eagle_aux_hidden_state_layer_ids": ["a"]}, "must be a list of integers"),
        ({}, {"fc_norm": True, "norm_before_fc": True}, "sets norm_before_fc and fc_norm"),
        ({}, {"parallel_drafting": True}, "sets parallel_drafting"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({}, {"sliding_window": 8}, "sets sliding_window"),
        ({}, {"strange": 1}, "config.json sets strange"),
        ({}, {"eagle_config": {"strange": 1}}, "config.json sets strange"),
        ({}, {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm to False: only True"),
        ({"speculators": True}, {"strange": 1}, "config.json sets strange"),
        ({"speculators": True}, {"transformer_layer_config": {"model_type": "qwen3"}}, "model_type 'qwen3'"),
        ({}, {"target_hidden_size": 96}, "target_hidden_size is 96, and the model's hidden_size 64"),
        ({}, {"vocab_size": 600}, "its vocabulary has 600 tokens, and the model's 512"),
        ({}, {"draft_vocab_size": 100}, "it has 100 tokens and no d2t"),
        ({"size": 48, "embedding": True}, {}, "it has no embedding"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_one_line(how, changes, said, tmp_path):
    how = dict(how)
    layout = {"speculators": how.pop("speculators", False)}
    head = head_of(**how) if "embedding" not in how else Head(HIDDEN, VOCAB_SIZE, size=48, taps=TAPS, embedding=torch.zeros(1))
    with pytest.raises(ModelConfigError, match=r"^--speculative-config: model ") as refused:
        engine_with(eagle3(head.save(tmp_path, **layout, **changes), 4))
    assert said in str(refused.value) and "\n" not in str(refused.value)
