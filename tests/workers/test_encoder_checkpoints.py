"""Encoders as they are published: first configs and names, adapters in the checkpoint, models that transformers does not have.

Also what is refused, and ranks that share a model.
"""

import pytest
import torch
import transformers
from encoder_cases import (
    HEADS,
    HIDDEN,
    INNER,
    POSITIONS,
    SMALL,
    VOCAB,
    build,
    loaded,
    our_hidden,
    pair,
    texts,
    their_hidden,
    types_of,
)
from encoder_references import jina_v2, nomic_v2, rewritten
from jina_checkpoints import V3_TASKS, write_jina_v3
from safetensors.torch import load_file, save_file
from thread_ranks import on_every_rank

from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.config import ModelConfigError
from quire.workers.models.encoder import relative_buckets
from quire.workers.models.encoders.table import ENCODERS, build_encoder, read_encoder_config
from quire.workers.parallel import Parallel

F = torch.nn.functional


def close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


# ------------------------------------------------------------------------------------------------------------- JinaBERT
@pytest.mark.parametrize(("feed_forward", "heads"), [("geglu", 4), ("reglu", 8)])
def test_jina_v2_equals_its_description(tmp_path, feed_forward, heads):
    folder, reference = jina_v2(tmp_path, feed_forward, heads)
    rows = texts([1, 2, 7, POSITIONS])
    types = types_of(rows)
    for row, own, got in zip(rows, types, our_hidden(loaded(folder), rows, types), strict=True):
        close(got, reference(torch.tensor(row), torch.tensor(own)))


# ------------------------------------------------------------------------------------------------------ first configs
def test_gte_as_it_was_published(tmp_path):
    """NewModel's names and fields, with its rotation of the type ntk: arXiv:2309.00071 cites it, kexue.fm/archives/9706."""
    theirs = build(transformers.GteModel, transformers.GteConfig(**SMALL, type_vocab_size=1))
    theirs.save_pretrained(tmp_path)
    factor, theta, dim = 8.0, 20000.0, HIDDEN // HEADS
    fields = {
        **SMALL, "architectures": ["NewModel"], "model_type": "new", "hidden_act": "gelu", "layer_norm_type": "layer_norm",
        "layer_norm_eps": 1e-12, "pack_qkv": True, "position_embedding_type": "rope", "rope_theta": theta, "type_vocab_size": 1,
        "rope_scaling": {"factor": factor, "type": "ntk"}, "logn_attention_scale": False, "unpad_inputs": False,
    }  # fmt: skip
    tensors = {f"new.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    ours = loaded(rewritten(tmp_path, fields, tensors))
    frequencies = 1.0 / (theta * factor) ** (torch.arange(0, dim, 2).float() / dim) / factor ** (2 / dim)
    theirs.rotary_emb.inv_freq = frequencies
    row = texts([40])[0]
    close(our_hidden(ours, [row])[0], their_hidden(theirs, row))
    theirs.rotary_emb.inv_freq = frequencies * factor ** (2 / dim)
    assert not torch.allclose(our_hidden(ours, [row])[0], their_hidden(theirs, row), atol=1e-3)


def test_nomic_as_it_was_published(tmp_path):
    theirs = build(transformers.NomicBertModel, transformers.NomicBertConfig(**SMALL))
    theirs.save_pretrained(tmp_path)
    fields = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS,
        "n_inner": INNER, "n_layer": 3, "n_positions": POSITIONS, "activation_function": "swiglu", "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "layer_norm_epsilon": 1e-12, "type_vocab_size": 2, "prenorm": False, "causal": False,
        "use_rms_norm": False, "rotary_scaling_factor": None, "summary_type": "cls_index", "scale_attn_weights": True,
    }  # fmt: skip
    row = texts([23])[0]
    close(our_hidden(loaded(rewritten(tmp_path, fields)), [row])[0], their_hidden(theirs, row))


@pytest.mark.parametrize("ranks", [1, 2])
def test_nomic_v2_equals_its_description(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr("quire.workers.loading.weights.SLICE_BYTES", HIDDEN * 4 * 50)  # slices that no expert ends with
    folder, reference = nomic_v2(tmp_path)
    rows = texts([1, 2, 7, POSITIONS])
    results, _ = on_every_rank(ranks, lambda parallel: our_hidden(loaded(folder, parallel=parallel), rows))
    for row, *got in zip(rows, *results, strict=True):
        for one in got:
            close(one, reference(torch.tensor(row)))


# --------------------------------------------------------------------------------------------------- jina-embeddings-v3
@pytest.mark.parametrize("task", [None, 0, 2])
def test_one_task_is_merged(tmp_path, task):
    folder, theirs = write_jina_v3(tmp_path, task)
    row = texts([31])[0]
    ours = loaded(folder, {} if task is None else {"jina_task": V3_TASKS[task]})
    close(our_hidden(ours, [row])[0], their_hidden(theirs, row))
    if task is not None:
        assert not torch.allclose(our_hidden(loaded(folder), [row])[0], their_hidden(theirs, row), atol=1e-2)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path):
    folder, _ = write_jina_v3(tmp_path)
    with pytest.raises(ModelConfigError, match="jina_task 'other' is not among"):
        loaded(folder, {"jina_task": "other"})
    tensors = load_file(folder / "model.safetensors")
    name = "roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.mlp\.up_proj\.lora_A does not fit"):
        loaded(folder, {"jina_task": V3_TASKS[0]})


# ------------------------------------------------------------------------------------------------------ files and refusals
def test_weights_of_torch_save_are_read(tmp_path):
    theirs, ours = pair(transformers.BertModel, transformers.BertConfig(**SMALL), tmp_path)
    row = texts([9])[0]
    expected = our_hidden(ours, [row])[0]
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(our_hidden(loaded(tmp_path), [row])[0], expected)


def test_old_names_of_norms_are_read(tmp_path):
    theirs, _ = pair(transformers.BertModel, transformers.BertConfig(**SMALL), tmp_path)
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file({**old, "cls.seq_relationship.weight": torch.zeros(2, HIDDEN)}, tmp_path / "model.safetensors")
    row = texts([9])[0]
    close(our_hidden(loaded(tmp_path), [row])[0], their_hidden(theirs, row))


@pytest.mark.parametrize(
    ("architecture", "changes", "text"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("BertModel", {"is_decoder": True}, "is_decoder"),
        ("BertModel", {"new_field": 3}, "new_field"),
        ("BertModel", {"hidden_act": "odd"}, "hidden_act"),
        ("BertModel", {"num_attention_heads": 5}, "num_attention_heads"),
        ("NomicBertModel", {"num_experts": 8, "moe_every_n_layers": 2}, "gelu alone"),
        ("NomicBertModel", {"num_shared_experts": 1}, "num_shared_experts"),
        ("NomicBertModel", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        ("NewModel", {"pack_qkv": False}, "pack_qkv"),
        ("JinaBertModel", {"feed_forward_type": "original"}, "feed_forward_type"),
        ("ModernBertForSequenceClassification", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("EuroBertForSequenceClassification", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("MPNetModel", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
    ],
)
def test_what_is_not_served_is_refused_by_name(architecture, changes, text):
    with pytest.raises(ModelConfigError, match=text):
        read_encoder_config({**SMALL, "architectures": [architecture], **changes}, architecture)


# Further fields of published configs, as they are spelt there.
PUBLISHED = {
    "BertModel": {"classifier_dropout": None, "gradient_checkpointing": False, "position_embedding_type": "absolute"},
    "ModernBertModel": {
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "local_attention": 128,
        "hidden_activation": "gelu", "layer_norm_eps": 1e-5, "norm_eps": 1e-5, "position_embedding_type": "absolute",
        "reference_compile": None, "repad_logits_with_grad": False, "sparse_prediction": False, "gradient_checkpointing": False,
    },
    "EuroBertModel": {
        "bos_token": "<|begin_of_text|>", "clf_dropout": 0.0, "clf_pooling": "late", "hidden_dropout": 0.0, "head_dim": 8,
        "mask_token": "<|mask|>", "pad_token": "<|end_of_text|>", "rope_theta": 250000, "num_key_value_heads": 4,
    },
    "JinaBertForMaskedLM": {
        "attn_implementation": None, "emb_pooler": "mean", "feed_forward_type": "geglu", "position_embedding_type": "alibi",
    },
    "MPNetModel": {"relative_attention_num_buckets": 32},
    "NewForSequenceClassification": {
        "logn_attention_clip1": False, "layer_norm_type": "layer_norm", "use_memory_efficient_attention": False,
        "rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000, "unpad_inputs": False, "type_vocab_size": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_fields_are_known(architecture):
    read_encoder_config({**SMALL, "architectures": [architecture], **PUBLISHED[architecture]}, architecture)


def test_lengths_end_where_positions_do():
    fields = {**SMALL, "max_position_embeddings": 514, "pad_token_id": 1}
    assert read_encoder_config(fields, "RobertaModel").longest == 512
    assert read_encoder_config(fields, "MPNetModel").longest == 512
    assert read_encoder_config(fields, "BertModel").longest is None
    assert len(ENCODERS) > 30 and all(spec.is_causal is False for spec in attention_of(fields, "BertModel"))


def attention_of(fields, architecture):
    return [layer.attention for layer in read_encoder_config(fields, architecture).layers]


def test_buckets_equal_transformers():
    distances = torch.arange(-128, 129)
    theirs = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket(distances, num_buckets=32)
    assert torch.equal(relative_buckets(32), theirs)


# --------------------------------------------------------------------------------------------------------------- ranks
RANKED = {
    "bert": ("BertModel", {}),
    "mpnet": ("MPNetModel", {"max_position_embeddings": POSITIONS + 2}),
    "modernbert": ("ModernBertModel", {**dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)}),
    "nomic": ("NomicBertModel", {}),
    "gte": ("GteModel", {}),
}


@pytest.mark.parametrize("name", RANKED)
def test_ranks_share_a_model(tmp_path, name):
    cls, changes = RANKED[name]
    cls = getattr(transformers, cls)
    _, ours = pair(cls, cls.config_class(**{**SMALL, **changes}), tmp_path)
    rows = texts([5, 20])
    expected = our_hidden(ours, rows)
    results, _ = on_every_rank(2, lambda parallel: our_hidden(loaded(tmp_path, parallel=parallel), rows))
    for got in results:
        for a, b in zip(got, expected, strict=True):
            close(a, b)


def test_ranks_that_cannot_share_it_are_refused():
    config = read_encoder_config({**SMALL, "architectures": ["BertModel"]}, "BertModel")
    with pytest.raises(ModelConfigError, match="tensor-parallel-size 3"):
        build_encoder(config, torch.float32, Parallel(0, 3))
