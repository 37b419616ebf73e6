"""Encoders behind the engine's scheduler: whole prompts, no cache, vectors and scores as transformers' models give them."""

import json

import numpy as np
import pytest
import torch
import transformers
from encoder_cases import HIDDEN, POSITIONS, SMALL, build, pair, texts, their_hidden
from inline_engine import InlineEngine
from safetensors.torch import load_file, save_file

from quire.ipc.pooling import PoolingParams
from quire.ipc.step.plan import decode_plan
from quire.workers.models.config import ModelConfigError

F = torch.nn.functional
BUDGET = POSITIONS  # a step has room for one of the longest texts
LENGTHS = [3, 20, POSITIONS, 1, 40, POSITIONS, 7, 2, 2]
ST = "sentence_transformers.models."


def engine_of(folder, **pooling):
    return InlineEngine(folder, pooling=pooling, budget=BUDGET, max_model_len=POSITIONS)


def with_modules(folder, mode, dense=False):
    """sentence-transformers' files, with a dense layer's weight if asked for."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Dense", "2_Dense")] if dense else []), ("Normalize", "3_N")]
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"{ST}{kind}"} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN, "pooling_mode": mode}))
    weight = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(1))
    if dense:
        fields = {
            "in_features": HIDDEN,
            "out_features": 12,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        (folder / "2_Dense" / "config.json").write_text(json.dumps(fields))
        save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    return weight


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, pair(transformers.BertModel, transformers.BertConfig(**SMALL), folder).theirs


def close(got, expected, most=2e-6):
    assert np.abs(np.asarray(got) - np.asarray(expected)).max() <= most


def test_vectors_of_texts_of_all_lengths(bert):
    folder, theirs = bert
    engine, rows = engine_of(folder), texts(LENGTHS)
    assert engine.runner.ctx.cache.groups == [] and engine.runner.ctx.cache.block_bytes == 0
    for row, got in zip(rows, engine.pool(rows), strict=True):
        close(got, F.normalize(their_hidden(theirs, row)[0], dim=-1))
        close(got, engine.pool([row])[0], 1e-6)


def test_no_step_has_a_part_of_a_text(bert):
    engine, plans = engine_of(bert[0]), []
    step = engine.runner.step

    def watched(words, read_masks):
        plans.append(decode_plan(words, np.zeros(0, np.int32)).prefill_rows["length"].tolist())
        return step(words, read_masks)

    engine.runner.step = watched
    engine.pool(texts(LENGTHS))
    assert sorted(n for plan in plans for n in plan) == sorted(LENGTHS) and all(sum(plan) <= BUDGET for plan in plans)
    assert any(len(plan) > 1 for plan in plans)


@pytest.mark.parametrize(("mode", "dense"), [("mean", False), ("weightedmean", False), ("max", False), ("mean", True)])
def test_the_checkpoints_files_count(tmp_path, mode, dense):
    theirs = pair(transformers.ModernBertModel, modern(), tmp_path).theirs
    weight = with_modules(tmp_path, mode, dense)
    engine, rows = engine_of(tmp_path), texts([5, 33])
    for row, got in zip(rows, engine.pool(rows), strict=True):
        states = their_hidden(theirs, row)
        weights = torch.arange(1.0, len(row) + 1)[:, None]
        pooled = {"mean": states.mean(0), "max": states.amax(0), "weightedmean": (states * weights).sum(0) / weights.sum()}[
            mode
        ]
        close(got, F.normalize(pooled @ weight.T if dense else pooled, dim=-1), 1e-5)
    assert engine.choice.info.embedding_size == (12 if dense else HIDDEN)


def test_a_prompt_does_not_count_and_vectors_are_cut_where_the_files_say_so(bert, tmp_path):
    theirs = pair(transformers.BertModel, transformers.BertConfig(**SMALL), tmp_path).theirs
    with_modules(tmp_path, "mean")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 8}))
    engine, rows, counts = engine_of(tmp_path), texts([9, 30, 5]), [4, 11, 0]
    assert engine.choice.info.skips_prompts and engine.choice.info.do_lower_case
    for row, count, got in zip(rows, counts, engine.pool(rows, seconds=counts), strict=True):
        close(got, F.normalize(their_hidden(theirs, row)[count:].mean(0)[:8], dim=-1), 1e-5)


@pytest.mark.parametrize(
    ("config", "text"),
    [({"max_embed_len": 100}, "enable_chunked_processing"), ({"enable_chunked_processing": True}, "max_embed_len")],
)
def test_longer_texts_need_both_options(bert, config, text):
    with pytest.raises(ModelConfigError, match=text):
        engine_of(bert[0], pooler_config=config)
    both = {"enable_chunked_processing": True, "max_embed_len": 100}
    assert engine_of(bert[0], pooler_config=both).choice.info.max_embed_len == 100


def modern():
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    return transformers.ModernBertConfig(**SMALL, **ids, local_attention=10)


def test_options_of_requests_and_flags(bert, tmp_path):
    folder, theirs = bert
    row = texts([9])[0]
    states = their_hidden(theirs, row)
    engine = engine_of(folder, pooler_config={"seq_pooling_type": "MEAN", "use_activation": False})
    close(engine.pool([row])[0], states.mean(0), 2e-5)
    close(engine.pool([row], PoolingParams(use_activation=True))[0], F.normalize(states.mean(0), dim=-1))
    close(engine.pool([row], PoolingParams(task="token_embed"))[0], states, 2e-5)
    for flags, text in (({"runner": "generate"}, "writes no text"), ({"convert": "classify"}, "no head of labels")):
        with pytest.raises(ModelConfigError, match=text):
            engine_of(folder, **flags)


def test_matryoshka_vectors_are_cut(bert):
    folder, theirs = bert
    row = texts([9])[0]
    engine = InlineEngine(folder, pooling={}, model_options={"overrides": {"matryoshka_dimensions": [8]}}, budget=BUDGET)
    close(engine.pool([row], PoolingParams(dimensions=8))[0], F.normalize(their_hidden(theirs, row)[0][:8], dim=-1))
    with pytest.raises(ValueError, match="dimensions must be one of 8"):
        engine.pool([row], PoolingParams(dimensions=4))


@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_of_pairs_know_the_second_text(tmp_path, num_labels):
    labels = {"id2label": {i: f"l{i}" for i in range(num_labels)}, "label2id": {f"l{i}": i for i in range(num_labels)}}
    theirs = pair(transformers.BertForSequenceClassification, transformers.BertConfig(**SMALL, **labels), tmp_path).theirs
    engine, rows, seconds = engine_of(tmp_path), texts([9, 30, 4]), [5, 11, 0]
    results = engine.pool(rows, seconds=seconds)
    for row, second, got in zip(rows, seconds, results, strict=True):
        types = [int(second > 0 and at >= second) for at in range(len(row))]
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([row]), token_type_ids=torch.tensor([types])).logits[0]
        expected = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
        close(got, expected, 2e-5)


def test_wrong_seconds_are_refused(bert):
    engine, rows = engine_of(bert[0]), texts([9])
    for seconds in ([9], [1, 2], [-1]):
        with pytest.raises(ValueError, match="seconds"):
            engine.pool(rows, seconds=seconds)


def test_scores_of_tokens(tmp_path):
    theirs = pair(transformers.BertForTokenClassification, transformers.BertConfig(**SMALL), tmp_path).theirs
    engine, rows = engine_of(tmp_path), texts([9, 30])
    for row, got in zip(rows, engine.pool(rows), strict=True):
        with torch.no_grad():
            close(got, theirs(input_ids=torch.tensor([row])).logits[0].softmax(-1), 2e-5)


TWO_WAY = {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("name", ["Qwen2Model", "Qwen2ForCausalLM"])
def test_a_decoder_whose_tokens_see_both_ways(tmp_path, name):
    """gte-Qwen2: transformers' own model, told so."""
    cls = getattr(transformers, name)
    theirs = build(cls, transformers.Qwen2Config(**SMALL, **TWO_WAY, is_causal=False))
    theirs.save_pretrained(tmp_path)
    theirs = getattr(theirs, "model", theirs)
    with_modules(tmp_path, "lasttoken")
    engine, rows = engine_of(tmp_path), texts([1, 9, POSITIONS, 30])
    for row, got in zip(rows, engine.pool(rows), strict=True):
        close(got, F.normalize(their_hidden(theirs, row)[-1], dim=-1))
    assert engine.runner.ctx.cache.groups == []
    causal = F.normalize(their_hidden(build(cls, transformers.Qwen2Config(**SMALL, **TWO_WAY)).base_model, rows[1])[0], dim=-1)
    first = engine_of(tmp_path, pooler_config={"seq_pooling_type": "CLS"}).pool([rows[1]])[0]
    assert np.abs(first - causal.numpy()).max() > 1e-2


def test_a_llama_whose_tokens_see_both_ways(tmp_path):
    """It computes what EuroBERT does."""
    theirs = build(transformers.EuroBertModel, transformers.EuroBertConfig(**SMALL, **TWO_WAY, mask_token_id=3))
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    own = ("classifier_pooling", "mask_token_id")
    plain = {name: value for name, value in fields.items() if name not in own}
    changes = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "pooling": "avg"}
    (tmp_path / "config.json").write_text(json.dumps({**plain, **changes}))
    engine, rows = engine_of(tmp_path), texts([9, 30])
    for row, got in zip(rows, engine.pool(rows), strict=True):
        close(got, F.normalize(their_hidden(theirs, row).mean(0), dim=-1))
    with pytest.raises(ModelConfigError, match="makes vectors"):
        engine_of(tmp_path, runner="generate")


@pytest.mark.parametrize(("pooling", "labels"), [(None, 3), ("avg", 1)])
def test_a_two_way_decoder_with_labels(tmp_path, pooling, labels):
    """With one label it is a reranker, as llama-nemotron-rerank, which takes the mean."""
    theirs = build(transformers.EuroBertModel, transformers.EuroBertConfig(**SMALL, **TWO_WAY, mask_token_id=3))
    theirs.save_pretrained(tmp_path)
    weight = torch.randn(labels, HIDDEN, generator=torch.Generator().manual_seed(5))
    save_file({**load_file(tmp_path / "model.safetensors"), "score.weight": weight}, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    plain = {name: value for name, value in fields.items() if name not in ("classifier_pooling", "mask_token_id")}
    changes = {"architectures": ["LlamaBidirectionalForSequenceClassification"], "model_type": "llama_bidirec"}
    changes |= {"num_labels": labels} | ({} if pooling is None else {"pooling": pooling})
    (tmp_path / "config.json").write_text(json.dumps({**plain, **changes}))
    engine, rows = engine_of(tmp_path), texts([9, 30, 1])
    for row, got in zip(rows, engine.pool(rows), strict=True):
        states = their_hidden(theirs, row)
        logits = (states.mean(0) if pooling else states[-1]) @ weight.T
        close(got, logits.sigmoid() if labels == 1 else logits.softmax(-1), 1e-5)
    assert engine.choice.info.tasks == ["classify"] and engine_of(tmp_path, convert="embed").choice.info.tasks[0] == "embed"


def test_a_window_cannot_be_two_way(tmp_path):
    config = transformers.MistralConfig(**SMALL, **TWO_WAY, sliding_window=8, is_causal=False)
    build(transformers.MistralModel, config).save_pretrained(tmp_path)
    with pytest.raises(ModelConfigError, match="with windows"):
        engine_of(tmp_path)


def test_splade_vectors(tmp_path):
    theirs = pair(transformers.BertForMaskedLM, transformers.BertConfig(**SMALL), tmp_path).theirs
    sparse = "sentence_transformers.sparse_encoder.models."
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{sparse}MLMTransformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{sparse}SpladePooling"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    engine, rows = engine_of(tmp_path), texts([9, 30])
    for row, got in zip(rows, engine.pool(rows), strict=True):
        with torch.no_grad():
            close(got, torch.log1p(theirs(input_ids=torch.tensor([row])).logits[0].relu()).amax(0), 2e-5)
    assert engine.choice.info.tasks == ["embed", "embed_sparse"] and engine.choice.info.embedding_size == SMALL["vocab_size"]


def test_a_masked_language_model_is_an_embedder_without_its_head(tmp_path):
    theirs = pair(transformers.BertForMaskedLM, transformers.BertConfig(**SMALL), tmp_path).theirs
    row = texts([9])[0]
    with torch.no_grad():
        states = theirs.bert(input_ids=torch.tensor([row])).last_hidden_state[0]
    close(engine_of(tmp_path).pool([row])[0], F.normalize(states[0], dim=-1))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sentence_bert_config.json": {"do_upper_case": True}}, "do_upper_case"),
        ({"1_Pooling/config.json": {"pooling_mode": "median"}}, "median"),
    ],
)
def test_what_is_not_served_yet_is_refused_by_name(tmp_path, change, text):
    pair(transformers.BertModel, transformers.BertConfig(**SMALL), tmp_path)
    with_modules(tmp_path, "mean")
    for name, fields in change.items():
        (tmp_path / name).write_text(json.dumps(fields))
    with pytest.raises(ModelConfigError, match=text):
        engine_of(tmp_path)
