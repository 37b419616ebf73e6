"""A draft model, fp32 on the CPU: it reads each sequence's whole text, drafts what the target would draw, and changes nothing.

test_speculation.py has it among all other drafters; here is what only a draft model has.
"""

import json
import shutil

import pytest
import torch
from inline_engine import InlineEngine
from safetensors.torch import load_file, save_file
from test_speculation import EOS, MAX_LEN, assert_equal, draft_model, outputs_of, without_drafts
from tiny_models import VOCAB_SIZE, reference, tiny_model

from quire.ipc.messages.workers import FullAttention
from quire.ipc.sampling import SamplingParams
from quire.workers.models.config import ModelConfigError

GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
PROMPT = [(5 * k * k) % 400 + 4 for k in range(70)]


def engine_with(speculation, family="llama", **how):
    return InlineEngine(tiny_model(family), **{"max_model_len": MAX_LEN, "eos": (EOS,), "speculation": speculation, **how})


def acceptance(engine, before=None):
    """The part of drafts that was accepted, and the statistics so far; `before`: those to leave out."""
    now = engine.scheduler.counters.windows.so_far()
    accepted, drafted = sum(now.accepted_by_place), now.draft_tokens
    if before is not None:
        accepted, drafted = accepted - sum(before.accepted_by_place), drafted - before.draft_tokens
    assert drafted > 0
    return accepted / drafted, now


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed", "gemma3"])
def test_a_prefix_that_is_hit_is_drafted_from(family):
    """By any number of sequences, also those that go on from what decode rows have computed; and hits stay whole."""
    plain, engine = (engine_with(c, family, max_model_len=400) for c in (None, draft_model(family, 5)))
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    outputs, cached, seen = [], [], None
    for each in (plain, engine):
        (first,) = each.generate([PROMPT], params)
        outputs.append([first, *each.generate([PROMPT] * 2 + [PROMPT + first, PROMPT + first[:40] + [9]], params)])
        cached.append(each.scheduler.counters.cached_tokens)
    assert outputs[0] == outputs[1]
    assert cached[0] == cached[1] > 300
    rate, seen = acceptance(engine)
    assert rate >= 0.99
    lengths = []
    run = engine.runner.device.drafter.run
    engine.runner.device.drafter.run = lambda some, *rest: (lengths.append(some.tokens), run(some, *rest))
    engine.generate([PROMPT + first], params)
    assert acceptance(engine, seen)[0] >= 0.99
    assert max(lengths) <= 64  # nothing of the prefix is computed again


def test_hits_of_a_model_that_has_not_caught_up():
    """The first sequence ends before its prompt is read: passes have room for a few tokens only. Later ones read it."""
    engine = engine_with(draft_model("llama", 4), max_model_len=400)
    drafter = engine.runner.device.drafter
    drafter.max_tokens = 16
    (once,) = engine.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    assert int(drafter.state.filled.max()) == 16 and int((drafter.state.filled > 0).sum()) < len(PROMPT) // 16
    (output,) = engine.generate([PROMPT], GREEDY)
    assert output[:1] == once and engine.scheduler.counters.cached_tokens == 64
    rate, stats = acceptance(engine)
    assert rate >= 0.99 and stats.num_drafts > 10


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed", "deepseek-v3", "bloom"])
def test_logits_are_those_of_a_plain_forward(family):
    """Of every draft: behind prompts, hits and chunks, accepted and rejected drafts."""
    engine = engine_with(draft_model(family, 5), budget=24, max_num_seqs=5, max_model_len=200)
    drafter, group = engine.runner.device.drafter, 0
    assert isinstance(engine.runner.ctx.cache.kinds[group], FullAttention)
    found, draw = [], drafter.draw_tokens

    def note(logits, slots, positions, window, tables, kind):
        for row, (slot, position, place) in enumerate(
            zip(slots.tolist(), positions.tolist(), window.places.tolist(), strict=True)
        ):
            if slot == tables.max_num_seqs:
                continue
            known = position - place  # tokens
            blocks = tables.block_table[group, slot, : -(-known // 16)].long()
            text = drafter.state.text.view(-1, 16)[blocks].view(-1)[: known - 1].tolist()
            drafts = window.input_ids[row * window.stride : row * window.stride + place + 1].tolist()
            found.append((text + drafts, logits[row].clone()))
        drawn = draw(logits, slots, positions, window, tables, kind)
        return torch.where(torch.arange(len(drawn)) % 2 == 0, drawn, (drawn + 1) % VOCAB_SIZE)  # so that half are rejected

    drafter.draw_tokens = note
    prompts = [PROMPT[: 20 + 10 * i] for i in range(6)]
    engine.generate(prompts, [SamplingParams(max_tokens=20, temperature=0.7, seed=i, ignore_eos=True) for i in range(6)])
    assert len(found) > 60
    model = reference(family)
    with torch.inference_mode():
        for ids, logits in found[:: len(found) // 40]:
            torch.testing.assert_close(logits, model(torch.tensor([ids])).logits[0, -1], atol=2e-4, rtol=1e-4)


def test_hostile_drafts_change_nothing():
    engine = engine_with(draft_model("llama", 8))
    generator, drafter = torch.Generator().manual_seed(0), engine.runner.device.drafter
    draw = drafter.draw_tokens

    def hostile(*arguments):
        drawn = draw(*arguments)
        others = torch.randint(-1, VOCAB_SIZE, drawn.shape, generator=generator, dtype=torch.int32)
        return torch.where(torch.rand(drawn.shape, generator=generator) < 0.5, others, drawn)

    drafter.draw_tokens = hostile
    assert_equal(outputs_of(engine), without_drafts("llama"))
    assert 0 < acceptance(engine)[0] < 0.9


def test_a_shorter_context_is_drafted_up_to():
    engine = engine_with(draft_model("llama", 4, max_model_len=60), max_model_len=200)
    plain = engine_with(None, max_model_len=200)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    prompts = [PROMPT[:20], PROMPT[:64]]
    assert engine.generate(prompts, params) == plain.generate(prompts, params)
    rate, stats = acceptance(engine)
    # of the first sequence, 40 tokens or a few more: the last drafts are of tokens behind the context
    assert rate >= 0.99 and 30 <= stats.draft_tokens <= 44


@pytest.mark.parametrize("vocab", [480, 544])
def test_vocabularies_may_be_padded_to_other_sizes(vocab, tmp_path):
    """Ids that a draft model does not know are never drafted, and known to it as another token."""
    source, folder = tiny_model("llama"), tmp_path / "draft"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kept = tensors[name][:vocab]
        tensors[name] = torch.cat((kept, kept.new_zeros(vocab - len(kept), kept.shape[1])))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": vocab}))
    engine = engine_with(draft_model("llama", 5, model=str(folder)))
    assert_equal(outputs_of(engine), without_drafts("llama"))
    assert acceptance(engine)[0] > (0.2 if vocab < VOCAB_SIZE else 0.99)


def test_a_model_that_is_never_right_rests():
    """Where no draft is accepted, it only reads prompts, and drafts before the next try."""
    engine = engine_with(draft_model("llama", 5, enable_adaptive_verification=True), max_model_len=400)
    drafter = engine.runner.device.drafter
    draw, run, depths = drafter.draw_tokens, drafter.run, []
    drafter.draw_tokens = lambda *arguments: (draw(*arguments) + 1) % VOCAB_SIZE
    drafter.run = lambda some, *rest: (depths.append(some.depth), run(some, *rest))
    engine.generate([[4, 5, 6]], SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    stats = engine.scheduler.counters.windows.so_far()
    assert 12 <= stats.num_drafts < 40  # until it is clear that none pays, and then one step in 64
    assert len(depths) < 70 and set(depths) <= {0, 1, 2, 3, 4}  # no deeper than steps verify, but to learn times
    drafter.draw_tokens = draw  # it is right again: the next tries find that out
    engine.generate([[4, 5, 6]], SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    assert engine.scheduler.counters.windows.so_far().num_drafts > stats.num_drafts + 30


def test_preempted_sequences_and_slots_of_others():
    """Blocks and slots change hands all the time, and what was computed of them is known."""
    engine = engine_with(draft_model("llama", 6), num_blocks=24, look_ahead=False, block_size=8, max_model_len=120)
    plain = engine_with(None, max_model_len=120)
    prompts = [PROMPT[i : i + 24 + 3 * i] for i in range(9)]
    params = [SamplingParams(max_tokens=40, temperature=0.8, seed=i, ignore_eos=True) for i in range(9)]
    assert engine.generate(prompts, params) == plain.generate(prompts, params)
    assert engine.scheduler.counters.preemptions > 3
    assert acceptance(engine)[0] >= 0.99


def test_recurrent_draft_models_are_refused():
    with pytest.raises(ModelConfigError, match=r"speculative-config: model .*: it has recurrent layers"):
        engine_with(draft_model("qwen3-next", 4))
