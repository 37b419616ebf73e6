"""Poolers against sentence-transformers' formulas, written for padded texts; heads against transformers' own models.

The formulas are those of sentence_transformers/sentence_transformer/modules/pooling.py, base/modules/dense.py and
sparse_encoder/modules/splade_pooling.py, version 5.
"""

import json
from itertools import accumulate

import pytest
import torch
import transformers
from encoder_cases import HIDDEN, POSITIONS, SMALL, VOCAB, our_hidden, pair, texts, types_of
from safetensors.torch import save_file

from quire.workers.models.encoder import hidden_states
from quire.workers.pooling.poolers import DEFAULT, LabelPooler, SentencePooler, Spans, SparsePooler, TokenPooler, cut, pooled
from quire.workers.pooling.sentence_transformers import (
    MODES,
    PoolingConfigError,
    PoolingStage,
    SpladeStage,
    read_sentence_transformers,
)

CPU = torch.device("cpu")
LENGTHS = [4, 1, 9, 6]


def packed(lengths=LENGTHS, prompts=None):
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    hidden = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(2))
    return hidden, Spans.of(bounds, None if prompts is None else torch.tensor(prompts, dtype=torch.int32))


def padded(hidden, lengths=LENGTHS):
    x = torch.zeros(len(lengths), max(lengths), hidden.shape[1])
    for row, own in zip(x, hidden.split(lengths), strict=True):
        row[: len(own)] = own
    return x, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def by_formula(x, mask, mode, prompt=0):
    """What sentence-transformers computes for x [B, L, H] and its attention mask, without the first `prompt` tokens."""
    mask = mask.clone()
    mask[:, :prompt] = 0
    wide = mask.unsqueeze(-1).float()
    if mode == "cls":
        return x[torch.arange(len(x)), mask.argmax(1)]
    if mode == "max":
        return x.masked_fill(wide == 0, float("-inf")).max(1).values
    if mode == "lasttoken":
        values, indices = mask.flip(1).max(1)
        last = x.shape[1] - torch.where(values == 0, x.shape[1] - 1, indices) - 1
        return x[torch.arange(len(x)), last]
    weights = torch.arange(1, x.shape[1] + 1)[None, :, None] * wide if mode == "weightedmean" else wide
    total = weights.sum(1).clamp(min=1e-9)
    return (x * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_the_formula(mode):
    hidden, spans = packed()
    torch.testing.assert_close(pooled(hidden, spans, mode), by_formula(*padded(hidden), mode))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "lasttoken"])
def test_prompts_are_left_out(mode):
    hidden, spans = packed([4, 6, 9, 6], [3] * 4)
    expected = by_formula(*padded(hidden, [4, 6, 9, 6]), mode, prompt=3)
    torch.testing.assert_close(pooled(hidden, spans, mode, include_prompt=False), expected)
    assert not torch.allclose(pooled(hidden, spans, mode), expected)


def test_a_row_that_is_all_prompt():
    hidden, spans = packed([3, 5], [9, 2])
    assert not pooled(hidden, spans, "mean", include_prompt=False)[0].any()
    assert torch.equal(pooled(hidden, spans, "cls", include_prompt=False)[0], hidden[0])


def write(folder, modules, **files):
    folder.mkdir(exist_ok=True)
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, value in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return folder


ST = "sentence_transformers.models."
TRANSFORMER, POOLING = (f"{ST}Transformer", ""), (f"{ST}Pooling", "1_Pooling")
DENSE, NORMALIZE = (f"{ST}Dense", "2_Dense"), (f"{ST}Normalize", "3_Normalize")
MEAN = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def dense_files(folder, out=20, bias=True, activation="torch.nn.modules.activation.Tanh", as_torch=False, **more):
    (folder / "2_Dense").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(4)
    weights = {"linear.weight": torch.randn(out, HIDDEN, generator=generator)}
    if bias:
        weights["linear.bias"] = torch.randn(out, generator=generator)
    if as_torch:
        torch.save(weights, folder / "2_Dense" / "pytorch_model.bin")
    else:
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    return {"in_features": HIDDEN, "out_features": out, "bias": bias, "activation_function": activation, **more}, weights


@pytest.mark.parametrize("as_torch", [False, True])
def test_dense_comes_before_the_norm(tmp_path, as_torch):
    config, weights = dense_files(tmp_path, as_torch=as_torch)
    folder = write(
        tmp_path, [TRANSFORMER, POOLING, DENSE, NORMALIZE], **{"1_Pooling__config_json": MEAN, "2_Dense__config_json": config}
    )
    pooler = SentencePooler(read_sentence_transformers(folder), folder, HIDDEN, CPU)
    hidden, spans = packed()
    mean = by_formula(*padded(hidden), "mean")
    expected = torch.tanh(mean @ weights["linear.weight"].T + weights["linear.bias"])
    expected = expected / expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(pooler(hidden, spans), expected)
    assert pooler.size == 20 and pooler.normalizes
    wrong = torch.nn.functional.normalize(mean, dim=-1) @ weights["linear.weight"].T + weights["linear.bias"]
    assert not torch.allclose(torch.nn.functional.normalize(torch.tanh(wrong), dim=-1), expected, atol=1e-3)


def test_modes_stand_side_by_side_and_residuals_are_added(tmp_path):
    modes = {"embedding_dimension": HIDDEN, "pooling_mode": ["cls", "mean"]}
    folder = write(tmp_path, [TRANSFORMER, POOLING], **{"1_Pooling__config_json": modes})
    pooler = SentencePooler(read_sentence_transformers(folder), folder, HIDDEN, CPU)
    hidden, spans = packed()
    both = torch.cat([by_formula(*padded(hidden), mode) for mode in ("cls", "mean")], -1)
    torch.testing.assert_close(pooler(hidden, spans), both)
    config, weights = dense_files(
        tmp_path, out=HIDDEN, bias=False, activation="torch.nn.modules.linear.Identity", use_residual=True
    )
    files = {"1_Pooling__config_json": MEAN, "2_Dense__config_json": config}
    folder = write(tmp_path, [TRANSFORMER, POOLING, DENSE], **files)
    pooler = SentencePooler(read_sentence_transformers(folder), folder, HIDDEN, CPU)
    mean = by_formula(*padded(hidden), "mean")
    torch.testing.assert_close(pooler(hidden, spans), mean @ weights["linear.weight"].T + mean)
    assert not pooler.normalizes


def test_a_result_depends_on_its_row_alone():
    hidden, spans = packed()
    pooler = SentencePooler(DEFAULT, None, HIDDEN, CPU)
    for mode in MODES:
        together = pooled(hidden, spans, mode)
        for row, (first, end) in enumerate(spans.lists()):
            alone = pooled(hidden[first:end], Spans.of(torch.tensor([0, end - first], dtype=torch.int32)), mode)
            assert torch.equal(alone[0], together[row])
    torch.testing.assert_close(pooler(hidden, spans).norm(dim=-1), torch.ones(len(LENGTHS)))


def test_vectors_are_cut_and_normed_again():
    x = torch.nn.functional.normalize(torch.randn(3, 16), dim=-1)
    short = cut(x, 4, normalizes=True)
    torch.testing.assert_close(short, x[:, :4] / x[:, :4].norm(dim=-1, keepdim=True))
    assert torch.equal(cut(x, 4, normalizes=False), x[:, :4])


def test_vectors_of_tokens(tmp_path):
    config, weights = dense_files(tmp_path, bias=False, activation="torch.nn.modules.linear.Identity")
    folder = write(
        tmp_path, [TRANSFORMER, ("pylate.models.Dense.Dense", "2_Dense")], **{"2_Dense__config_json": config},
        config_sentence_transformers_json={"query_prefix": "[unused0]", "document_prefix": "[unused1]", "query_length": 24},
    )  # fmt: skip
    spec = read_sentence_transformers(folder)
    assert spec.late.query_prefix == "[unused0]" and spec.late.query_length == 24 and spec.late.expands
    hidden, spans = packed()
    got = TokenPooler(spec, folder, HIDDEN, CPU)(hidden, spans)
    assert [len(row) for row in got] == LENGTHS
    torch.testing.assert_close(torch.cat(got), hidden @ weights["linear.weight"].T)


def test_files_are_read(tmp_path):
    folder = write(
        tmp_path, [TRANSFORMER, POOLING], **{"1_Pooling__config_json": {**MEAN, "include_prompt": False}},
        sentence_bert_config_json={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers_json={
            "__version__": {"torch": "2"}, "prompts": {"query": "query: ", "none": None}, "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
    )  # fmt: skip
    spec = read_sentence_transformers(folder)
    assert spec.stages == (PoolingStage(("mean",), include_prompt=False),)
    assert (spec.max_seq_length, spec.do_lower_case, spec.similarity) == (256, True, "dot")
    assert (spec.prompts, spec.default_prompt_name, spec.normalizes) == ({"query": "query: "}, "query", False)
    assert read_sentence_transformers(tmp_path / "elsewhere") is None
    folder = write(tmp_path, [("custom_st.Transformer", ""), POOLING])
    assert read_sentence_transformers(folder).stages == spec.stages


@pytest.mark.parametrize(
    ("modules", "files", "text"),
    [
        ([TRANSFORMER, (f"{ST}WeightedLayerPooling", "1")], {}, "WeightedLayerPooling"),
        ([(f"{ST}StaticEmbedding", "0")], {}, "first module is a StaticEmbedding"),
        ([TRANSFORMER, ("mine.Pooling", "1_Pooling")], {}, "mine.Pooling"),
        ([TRANSFORMER, (f"{ST}Pooling", "../1_Pooling")], {}, "leaves the folder"),
        ([TRANSFORMER, POOLING], {"1_Pooling__config_json": {**MEAN, "pooling_mode_new": True}}, "pooling_mode_new"),
        ([TRANSFORMER, POOLING], {"1_Pooling__config_json": {"pooling_mode": "median"}}, "median"),
        ([TRANSFORMER, POOLING], {"sentence_bert_config_json": {"max_seq_length": 0}}, "max_seq_length"),
        ([TRANSFORMER, POOLING], {"sentence_bert_config_json": {"new_field": 1}}, "new_field"),
        ([TRANSFORMER, POOLING], {"config_sentence_transformers_json": {"default_prompt_name": "q"}}, "default_prompt_name"),
        ([TRANSFORMER, POOLING], {"config_sentence_transformers_json": {"similarity_fn_name": "odd"}}, "odd"),
        ([TRANSFORMER, POOLING], {"config_sentence_transformers_json": []}, "not a JSON object"),
        (
            [TRANSFORMER, POOLING, DENSE],
            {"2_Dense__config_json": {"in_features": 2, "out_features": 2, "activation_function": "os.system"}},
            "os.system",
        ),
    ],
)
def test_what_is_unknown_is_refused_by_name(tmp_path, modules, files, text):
    with pytest.raises(PoolingConfigError, match=text):
        read_sentence_transformers(write(tmp_path, modules, **files))


def test_wrong_orders_and_sizes_are_refused(tmp_path):
    config, _ = dense_files(tmp_path)
    files = {"1_Pooling__config_json": MEAN, "2_Dense__config_json": {**config, "in_features": 5}}
    for modules, text in (
        ([TRANSFORMER, POOLING, DENSE], "in_features is 5"),
        ([TRANSFORMER, NORMALIZE, POOLING], "NormalizeStage"),
        ([TRANSFORMER, POOLING, POOLING], "one Pooling"),
        ([TRANSFORMER], "one Pooling"),
    ):
        folder = write(tmp_path, modules, **files)
        with pytest.raises(PoolingConfigError, match=text):
            SentencePooler(read_sentence_transformers(folder), folder, HIDDEN, CPU)


# --------------------------------------------------------------------------------------------------------------- heads
LABELS = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id"), 0)
ROBERTA = {**SMALL, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "type_vocab_size": 1}
DISTIL = {
    "vocab_size": VOCAB, "dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": POSITIONS,
}  # fmt: skip
MODERN = {**SMALL, **IDS, "local_attention": 10}
EURO = {**SMALL, **IDS, "num_key_value_heads": 2}
FAMILIES = {
    "Bert": SMALL,
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "DistilBert": DISTIL,
    "MPNet": {**SMALL, "max_position_embeddings": POSITIONS + 2},
    "ModernBert": MODERN,
    "EuroBert": EURO,
    "NomicBert": SMALL,
    "Gte": SMALL,
    "JinaEmbeddingsV3": SMALL,
}
MORE = {  # a name of the case -> (family, further fields)
    "ModernBert-mean": ("ModernBert", {**MODERN, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}),
    "EuroBert-mean": ("EuroBert", {**EURO, "classifier_pooling": "mean"}),
    "EuroBert-bos": ("EuroBert", {**EURO, "classifier_pooling": "bos"}),
}
CASES = {**{name: (name, fields) for name, fields in FAMILIES.items()}, **MORE}


def made(name, kind, folder):
    family, fields = CASES[name]
    cls = getattr(transformers, f"{family}{kind}")
    return pair(cls, cls.config_class(**fields, **LABELS), folder)


def each(theirs, rows, types=None):
    for i, row in enumerate(rows):
        more = {} if types is None else {"token_type_ids": torch.tensor([types[i]])}
        with torch.no_grad():
            yield theirs(input_ids=torch.tensor([row]), **more).logits[0]


def spans_of(rows):
    return Spans.of(torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32))


@pytest.mark.parametrize("name", CASES)
def test_sequence_classification_equals_transformers(name, tmp_path):
    theirs, ours = made(name, "ForSequenceClassification", tmp_path)
    rows = texts([1, 7, 20])
    types = types_of(rows) if name == "Bert" else None
    hidden = hidden_states(ours, rows, types)
    pooler = LabelPooler(ours.head, "softmax")
    expected = torch.stack(list(each(theirs, rows, types)))
    torch.testing.assert_close(pooler.logits(hidden, spans_of(rows)), expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(pooler(hidden, spans_of(rows)), expected.softmax(-1), rtol=2e-4, atol=2e-5)
    if types is not None:
        lost = pooler.logits(hidden_states(ours, rows), spans_of(rows))
        assert not torch.allclose(lost, expected, atol=1e-2)


@pytest.mark.parametrize("name", FAMILIES)
def test_token_classification_equals_transformers(name, tmp_path):
    theirs, ours = made(name, "ForTokenClassification", tmp_path)
    rows = texts([1, 7])
    got = LabelPooler(ours.head, "identity").of_tokens(hidden_states(ours, rows), spans_of(rows))
    for scores, expected in zip(got, each(theirs, rows), strict=True):
        torch.testing.assert_close(scores, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stage", [SpladeStage(), SpladeStage("sum", 2)], ids=["max", "sum"])
def test_splade_equals_the_formula_on_transformers_logits(name, stage, tmp_path, monkeypatch):
    monkeypatch.setattr("quire.workers.pooling.poolers.LOGITS_AT_ONCE", 8)
    theirs, ours = made(name, "ForMaskedLM", tmp_path)
    rows = texts([1, 19])
    got = SparsePooler(stage, ours.compute_all_logits, VOCAB)(hidden_states(ours, rows), spans_of(rows))
    for vector, logits in zip(got, each(theirs, rows), strict=True):
        weights = torch.log1p(torch.relu(logits))
        weights = torch.log1p(weights) if stage.times == 2 else weights
        expected = weights.amax(0) if stage.strategy == "max" else weights.sum(0)
        torch.testing.assert_close(vector, expected, rtol=2e-4, atol=2e-5)


def test_a_masked_language_model_serves_as_embedder_without_its_head(tmp_path):
    theirs, ours = made("Bert", "ForMaskedLM", tmp_path)
    row = texts([9])[0]
    with torch.no_grad():
        expected = theirs.bert(input_ids=torch.tensor([row])).last_hidden_state[0]
    torch.testing.assert_close(our_hidden(ours, [row])[0], expected, rtol=2e-4, atol=2e-5)
