"""fp32 vectors and scores of decoders equal transformers' hidden states pooled plainly: alone, in company, in chunks, from the
prefix cache, on two ranks; and what a checkpoint and the flags say of pooling."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from inline_engine import InlineEngine
from safetensors.torch import save_file
from thread_ranks import engine_of_ranks
from tiny_models import tiny_model
from tiny_pools import PROMPTS, as_sentence_transformer, classifier, hidden_states, logits, vector

from quire.ipc.pooling import PoolingParams
from quire.ipc.sampling import SamplingParams
from quire.workers.memory import largest_plan
from quire.workers.models.config import ModelConfigError
from quire.workers.pooling.chunks import ChunkPooler
from quire.workers.pooling.poolers import Spans, pooled
from quire.workers.runner import no_masks

CLOSE = 3e-6  # of normalized vectors; the models' weights are large
SCHEDULING = {
    "as they fit": {},
    "in chunks": {"budget": 16},
    "nothing cached": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 16, "max_model_len": 128, "look_ahead": False},
    "alone": {"max_num_seqs": 1},
    "context filled": {"max_model_len": 100},  # by the longest prompt
}


def embedder(name: str = "qwen3", pooling: str = "LAST", runner: str = "pooling", make=InlineEngine, **more) -> InlineEngine:
    flags = {"runner": runner, "convert": "embed", "pooler_config": {"seq_pooling_type": pooling}}
    return make(tiny_model(name), pooling=flags, **more)


def apart(found: list[np.ndarray], name: str, pooling: str = "LAST") -> float:
    return max(float(np.abs(f - vector(name, p, pooling)).max()) for f, p in zip(found, PROMPTS, strict=True))


@pytest.mark.parametrize("scheduling", SCHEDULING.values(), ids=SCHEDULING)
@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
def test_vectors_equal_transformers_states_pooled_plainly(pooling, scheduling):
    engine = embedder(pooling=pooling, **scheduling)
    assert apart(engine.pool(PROMPTS), "qwen3", pooling) < CLOSE
    cached = engine.scheduler.counters.cached_tokens
    assert apart(engine.pool(PROMPTS), "qwen3", pooling) < CLOSE
    hits = engine.scheduler.counters.cached_tokens - cached
    assert bool(hits) == (pooling == "LAST" and scheduling.get("enable_prefix_caching", True))
    assert engine.scheduler.is_idle and engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("scheduling", SCHEDULING.values(), ids=SCHEDULING)
@pytest.mark.parametrize(
    ("mode", "pooling"),
    [("max_tokens", "MAX"), ("weightedmean_tokens", "WEIGHTED_MEAN"), ("mean_sqrt_len_tokens", "SQRT_MEAN")],
)
def test_modes_of_the_checkpoint_are_kept_over_chunks(mode, pooling, scheduling):
    engine = InlineEngine(as_sentence_transformer("qwen3", mode), pooling={}, **scheduling)
    assert apart(engine.pool(PROMPTS), "qwen3", pooling) < CLOSE
    plain = engine.pool(PROMPTS[3:5], PoolingParams(use_activation=False))  # a length, which normalizing would hide
    wanted = [vector("qwen3", prompt, pooling, normalizes=False) for prompt in PROMPTS[3:5]]
    for got, expected in zip(plain, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert engine.scheduler.is_idle


@pytest.mark.parametrize("scheduling", list(SCHEDULING.values())[:4])
def test_several_modes_stand_side_by_side_and_prompts_may_not_count(scheduling, tmp_path):
    """As the encoders' poolers have it, which equal sentence-transformers' formulas."""
    modes = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
    folder = as_sentence_transformer("qwen3", modules=("Pooling",))
    fields = {"embedding_dimension": 64, "pooling_mode": modes, "include_prompt": False}
    (Path(folder) / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    engine = InlineEngine(folder, pooling={}, **scheduling)
    prompts, counts = PROMPTS[2:6], [3, 20, 0, 70]
    for prompt, count, found in zip(prompts, counts, engine.pool(prompts, seconds=counts), strict=True):
        states = hidden_states("qwen3", tuple(prompt))
        spans = Spans.of(torch.tensor([0, len(states)], dtype=torch.int32), torch.tensor([count], dtype=torch.int32))
        wanted = torch.cat([pooled(states, spans, mode, include_prompt=False)[0] for mode in modes])
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)
    assert engine.choice.info.embedding_size == 6 * 64 and not engine.choice.info.may_hit


@pytest.mark.parametrize("name", ["llama-tied", "mistral-sliding", "gemma2", "qwen2", "falcon-h1"])
def test_families_pool_alike(name):
    assert apart(embedder(name, "MEAN", budget=24).pool(PROMPTS), name, "MEAN") < 2e-5
    assert apart(embedder(name, budget=24).pool(PROMPTS), name) < 2e-5


@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_two_ranks_make_the_vectors_of_one(pooling):
    def make(folder, **options):
        return engine_of_ranks(folder, 2, **options)

    assert apart(embedder(pooling=pooling, make=make, budget=32).pool(PROMPTS), "qwen3", pooling) < CLOSE


def test_rows_that_generate_and_rows_that_pool_share_steps_and_change_nothing():
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = PROMPTS[2:5]
    alone = InlineEngine(tiny_model("qwen3")).generate(prompts, greedy)
    engine = embedder(pooling="MEAN", runner="generate", budget=40)
    names = [engine.add(prompt, greedy) for prompt in prompts]
    pool, kinds = engine.add_pool(PROMPTS), set()

    def note(plan) -> bool:
        kinds.add((len(plan.decode_rows) > 0, plan.wants_vectors))
        return False

    outputs = engine.run(until=note)
    assert (True, True) in kinds
    assert {key: outputs[key] for key in outputs} == {name << 8: tokens for name, tokens in zip(names, alone, strict=True)}
    assert apart([np.concatenate(engine.pooled[pool << 8 | i]) for i in range(len(PROMPTS))], "qwen3", "MEAN") < CLOSE


def test_vectors_of_tokens_come_with_each_chunk():
    for scheduling in ({}, {"budget": 16}, SCHEDULING["preempted"]):
        engine = embedder(**scheduling)
        for use in (False, True):
            for found, prompt in zip(
                engine.pool(PROMPTS, PoolingParams(task="token_embed", use_activation=use)), PROMPTS, strict=True
            ):
                states = hidden_states("qwen3", tuple(prompt))
                wanted = states / states.norm(dim=-1, keepdim=True) if use else states
                assert found.shape == wanted.shape and np.abs(found - wanted.numpy()).max() < 4 * CLOSE * float(
                    wanted.abs().max()
                )


def test_dimensions_are_cut_and_normalized_again():
    engine = embedder(model_options={"overrides": {"matryoshka_dimensions": [16, 32]}})
    for n in (16, 32):
        for found, prompt in zip(engine.pool(PROMPTS, PoolingParams(dimensions=n)), PROMPTS, strict=True):
            assert np.abs(found - vector("qwen3", prompt, dimensions=n)).max() < CLOSE and found.shape == (n,)
    plain = engine.pool(PROMPTS, PoolingParams(dimensions=16, use_activation=False))
    assert np.abs(plain[3] - vector("qwen3", PROMPTS[3], normalizes=False, dimensions=16)).max() < 4 * CLOSE
    for dimensions, text in ((8, "one of 16, 32"), (64, "one of 16, 32")):
        with pytest.raises(ValueError, match=text):
            engine.pool(PROMPTS, PoolingParams(dimensions=dimensions))


def test_vectors_are_cut_as_the_checkpoint_says():
    engine = InlineEngine(as_sentence_transformer("qwen3", truncate_dim=16), pooling={})
    for found, prompt in zip(engine.pool(PROMPTS), PROMPTS, strict=True):
        assert np.abs(found - vector("qwen3", prompt, dimensions=16)).max() < CLOSE and found.shape == (16,)
    assert engine.pool(PROMPTS[:1], PoolingParams(task="token_embed"))[0].shape == (len(PROMPTS[0]), 64)
    with pytest.raises(ModelConfigError, match="truncate_dim"):
        InlineEngine(as_sentence_transformer("qwen3", truncate_dim="16"), pooling={})


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
def test_classifiers_equal_transformers(name, kind):
    folder, model = classifier(name, kind)
    engine = InlineEngine(folder, pooling={}, budget=48)
    assert engine.choice.info.labels == ["kind 0", "kind 1", "kind 2"]
    task = "classify" if kind == "ForSequenceClassification" else "token_classify"
    raw, probable = (engine.pool(PROMPTS, PoolingParams(task=task, use_activation=use)) for use in (False, True))
    for found, probs, prompt in zip(raw, probable, PROMPTS, strict=True):
        wanted = logits(model, prompt)
        assert np.abs(found - wanted).max() < 2e-5
        assert np.abs(probs - torch.softmax(torch.from_numpy(wanted), -1).numpy()).max() < 1e-5


def test_a_lone_label_has_a_sigmoid_and_a_checkpoint_may_say_otherwise():
    folder, model = classifier("qwen3", "ForSequenceClassification", labels=1)
    wanted = torch.sigmoid(torch.from_numpy(logits(model, PROMPTS[3]))).numpy()
    assert np.abs(InlineEngine(folder, pooling={}).pool(PROMPTS[3:4])[0] - wanted).max() < 1e-5
    named = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    engine = InlineEngine(folder, pooling={}, model_options={"overrides": named})
    assert np.abs(engine.pool(PROMPTS[3:4])[0] - logits(model, PROMPTS[3])).max() < 1e-5
    with pytest.raises(ModelConfigError, match=r"mine\.Relu"):
        InlineEngine(folder, pooling={}, model_options={"overrides": {"sbert_ce_default_activation_function": "mine.Relu"}})


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied"])
@pytest.mark.parametrize("method", [None, "no_post_processing"])
def test_the_scores_of_two_tokens_are_those_rows_of_the_head(name, method):
    from tiny_models import reference

    vocabulary = json.loads((tiny_model(name) / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = (token for i in (300, 301) for token, at in vocabulary.items() if at == i)
    over = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": [no, yes], "method": method}
    engine = InlineEngine(tiny_model(name), pooling={}, model_options={"overrides": over})
    for found, prompt in zip(engine.pool(PROMPTS), PROMPTS, strict=True):
        with torch.no_grad():
            wanted = reference(name)(torch.tensor([prompt])).logits[0, -1, [300, 301]].float().softmax(-1).numpy()
        assert np.abs(found - (wanted[1:] if method is None else wanted)).max() < 1e-5
    assert "lm_head.weight" not in dict(engine.model.named_parameters())


# ------------------------------------------------------------------------------------------------- what the checkpoint says
def test_sentence_transformers_files_say_how_to_pool():
    folder = as_sentence_transformer("qwen3", "mean_tokens", prompts={"query": "Find: "}, default_prompt_name="query")
    engine = InlineEngine(folder, pooling={})
    info = engine.choice.info
    assert (info.pooling_type, info.use_activation, info.prompts, info.default_prompt_name) == (
        "MEAN",
        True,
        {"query": "Find: "},
        "query",
    )
    assert not engine.model.has_head and apart(engine.pool(PROMPTS), "qwen3", "MEAN") < CLOSE
    plain = InlineEngine(as_sentence_transformer("qwen3", modules=("Pooling",)), pooling={})
    assert np.abs(plain.pool(PROMPTS)[3] - vector("qwen3", PROMPTS[3], normalizes=False)).max() < 4 * CLOSE
    generates = InlineEngine(folder, pooling={"runner": "generate"})
    assert generates.choice.info is None and generates.model.has_head


@pytest.mark.parametrize(
    ("make", "flags", "text"),
    [
        (lambda: as_sentence_transformer("qwen3", "median_tokens"), {}, "no pooling is not supported"),
        (lambda: as_sentence_transformer("qwen3", modules=("Pooling", "Dense")), {}, "lacks in_features"),
        (lambda: as_sentence_transformer("qwen3", similarity_fn_name="odd"), {}, "similarity_fn_name 'odd'"),
        (lambda: tiny_model("qwen3"), {"runner": "pooling", "convert": "none"}, "--convert embed makes it an embedder"),
        (lambda: tiny_model("qwen3"), {"convert": "classify"}, "has no head of labels"),
        (lambda: tiny_model("qwen3"), {"runner": "pooling", "pooler_config": {"pooling_type": "MAX"}}, "CLS, LAST, MEAN"),
        (
            lambda: tiny_model("qwen3"),
            {"runner": "pooling", "pooler_config": {"step_tag_id": 3}},
            "step_tag_id is not supported",
        ),
        (lambda: classifier("qwen3", "ForSequenceClassification")[0], {"runner": "generate"}, "no head over the vocabulary"),
    ],
)
def test_what_is_not_served_is_refused_by_name(make, flags, text):
    with pytest.raises(ModelConfigError, match=text):
        InlineEngine(make(), pooling=flags)


def test_the_largest_step_is_run_with_its_results():
    for engine in (embedder(pooling="MEAN"), embedder(runner="generate")):
        sizes = SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=4, max_model_len=101)
        (result,) = engine.runner.step(largest_plan(sizes, engine.choice.info).encode(), no_masks)
        assert result.values.numpy().shape == (256, 64) and result.lengths == [100, 100, 56]


def test_dense_layers_stand_behind_a_decoders_pooling(tmp_path):
    folder = as_sentence_transformer("qwen3", modules=("Pooling", "Dense", "Normalize"))
    weight, bias = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)), torch.ones(12)
    fields = {"in_features": 64, "out_features": 12, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    (Path(folder) / "2_Dense" / "config.json").write_text(json.dumps(fields))
    save_file({"linear.weight": weight, "linear.bias": bias}, Path(folder) / "2_Dense" / "model.safetensors")
    engine = InlineEngine(folder, pooling={}, budget=40)
    assert (engine.choice.info.embedding_size, engine.choice.info.token_size) == (12, 64)
    for prompt, found in zip(PROMPTS, engine.pool(PROMPTS), strict=True):
        wanted = torch.tanh(hidden_states("qwen3", tuple(prompt))[-1] @ weight.T + bias)
        assert np.abs(found - (wanted / wanted.norm()).numpy()).max() < 4 * CLOSE
    assert engine.pool(PROMPTS[:1], PoolingParams(task="token_embed"))[0].shape == (1, 64)


# ------------------------------------------------------------------------------------------------- faults that must be seen
@pytest.mark.parametrize("fault", ["starts again in each chunk", "counts the chunk", "one token off"])
def test_faults_are_seen(fault, monkeypatch):
    take = ChunkPooler.take

    def faulty(self, hidden, chunks, buffers, **about):
        if fault == "starts again in each chunk":
            chunks = chunks._replace(starts=np.zeros_like(chunks.starts))
        elif fault == "one token off":
            chunks = chunks._replace(lengths=np.maximum(chunks.lengths - 1, 1))
        elif fault == "counts the chunk":
            lengths = chunks.lengths.astype(np.float32)[:, None]
            return take(self, hidden, chunks, buffers, **about) * torch.from_numpy(
                (chunks.starts[:, None] + lengths) / lengths * (1 + (chunks.starts[:, None] > 0))
            )
        return take(self, hidden, chunks, buffers, **about)

    monkeypatch.setattr(ChunkPooler, "take", faulty)
    engine = embedder(pooling="MEAN", budget=24)
    found = engine.pool(PROMPTS, PoolingParams(use_activation=False))
    wanted = [vector("qwen3", p, "MEAN", normalizes=False) for p in PROMPTS]
    assert max(float(np.abs(f - w).max()) for f, w in zip(found, wanted, strict=True)) > 1e-3
