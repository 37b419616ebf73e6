"""Encoders as they are published: first configs and names, adapters in the checkpoint, models that transformers does not have.

Also what is refused, and ranks that share a model.
"""

import json

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
from safetensors.torch import load_file, save_file
from thread_ranks import on_every_rank

from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.alibi import alibi_slopes
from quire.workers.models.config import ModelConfigError
from quire.workers.models.encoder import relative_buckets
from quire.workers.models.encoders.table import ENCODERS, build_encoder, read_encoder_config
from quire.workers.parallel import Parallel

F = torch.nn.functional


def close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def rewritten(folder, fields, tensors=None):
    (folder / "config.json").write_text(json.dumps(fields))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


# ------------------------------------------------------------------------------------------------------------- JinaBERT
class JinaReference:
    """jina-embeddings-v2 in plain torch, from section 2 of arXiv:2310.19923 (ALiBi to both sides, GLU, post-norm)."""

    def __init__(self, fields, tensors):
        self.fields, self.t = fields, tensors

    def linear(self, x, name):
        return F.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.t[f"{name}.weight"], self.t[f"{name}.bias"], self.fields["layer_norm_eps"])

    def __call__(self, ids, types):
        x = self.t["embeddings.word_embeddings.weight"][ids] + self.t["embeddings.token_type_embeddings.weight"][types]
        x = self.norm(x, "embeddings.LayerNorm")
        at = torch.arange(len(ids))
        heads = self.fields["num_attention_heads"]
        bias = -torch.tensor(alibi_slopes(heads))[:, None, None] * (at[None] - at[:, None]).abs()
        for i in range(self.fields["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            q, k, v = (
                self.linear(x, f"{layer}.attention.self.{n}").unflatten(1, (heads, -1)).transpose(0, 1)
                for n in ("query", "key", "value")
            )
            weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias).softmax(-1)
            out = self.linear((weights @ v).transpose(0, 1).flatten(1), f"{layer}.attention.output.dense")
            x = self.norm(out + x, f"{layer}.attention.output.LayerNorm")
            gate, rest = self.linear(x, f"{layer}.mlp.gated_layers").chunk(2, -1)
            act = F.gelu if self.fields["feed_forward_type"] == "geglu" else F.relu
            x = self.norm(self.linear(act(gate) * rest, f"{layer}.mlp.wo") + x, f"{layer}.mlp.layernorm")
        return x


def jina_v2(folder, feed_forward="geglu", heads=HEADS):
    fields = {
        **SMALL, "architectures": ["JinaBertModel"], "model_type": "bert", "position_embedding_type": "alibi",
        "feed_forward_type": feed_forward, "layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu",
        "emb_pooler": "mean", "attn_implementation": "torch", "model_max_length": POSITIONS, "num_attention_heads": heads,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(6)

    def drawn(*shape, mean=0.0):
        return torch.randn(shape, generator=generator) * 0.3 + mean

    def norm(name, size=HIDDEN):
        return {f"{name}.weight": drawn(size, mean=1.0), f"{name}.bias": drawn(size)}

    def linear(name, out, size, bias=True):
        return {f"{name}.weight": drawn(out, size), **({f"{name}.bias": drawn(out)} if bias else {})}

    tensors = {
        "embeddings.word_embeddings.weight": drawn(VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": drawn(2, HIDDEN),
        **norm("embeddings.LayerNorm"),
        **linear("pooler.dense", HIDDEN, HIDDEN),
    }
    for i in range(fields["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{name}", HIDDEN, HIDDEN)
        tensors |= linear(f"{layer}.attention.output.dense", HIDDEN, HIDDEN) | norm(f"{layer}.attention.output.LayerNorm")
        tensors |= linear(f"{layer}.mlp.gated_layers", 2 * INNER, HIDDEN, bias=False) | linear(f"{layer}.mlp.wo", HIDDEN, INNER)
        tensors |= norm(f"{layer}.mlp.layernorm")
    return rewritten(folder, fields, tensors), JinaReference(fields, tensors)


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


class NomicReference:
    """Nomic Embed v2 in plain torch, from sections 3 and 4 of arXiv:2502.07972 and megablocks' dropless mixture."""

    def __init__(self, fields, tensors):
        self.fields, self.t = fields, tensors

    def linear(self, x, name):
        return F.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.t[f"{name}.weight"], self.t[f"{name}.bias"], 1e-5)

    def rotated(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def mixture(self, x, name):
        experts, inner = self.fields["num_experts"], self.fields["n_inner"]
        w1, w2 = (self.t[f"{name}.experts.mlp.{w}"].view(experts, inner, -1) for w in ("w1", "w2"))
        weights, chosen = self.linear(x, f"{name}.router.layer").softmax(-1).topk(self.fields["moe_top_k"])
        rows = []
        for row, own, experts_of_row in zip(x, weights, chosen, strict=True):
            rows.append(sum(w * (F.gelu(w1[e] @ row) @ w2[e]) for w, e in zip(own, experts_of_row, strict=True)))
        return torch.stack(rows) + self.t[f"{name}.experts.bias"]

    def __call__(self, ids):
        x = self.norm(
            self.t["embeddings.word_embeddings.weight"][ids] + self.t["embeddings.token_type_embeddings.weight"][0], "emb_ln"
        )
        for i in range(self.fields["n_layer"]):
            layer = f"encoder.layers.{i}"
            q, k, v = self.linear(x, f"{layer}.attn.Wqkv").unflatten(1, (3, HEADS, -1)).permute(1, 2, 0, 3)
            q, k = self.rotated(q), self.rotated(k)
            out = ((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = self.norm(self.linear(out, f"{layer}.attn.out_proj") + x, f"{layer}.norm1")
            dense = self.linear(F.gelu(self.linear(x, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2") if i % 2 == 0 else None
            x = self.norm((self.mixture(x, f"{layer}.mlp") if dense is None else dense) + x, f"{layer}.norm2")
        return x


def nomic_v2(folder):
    fields = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS,
        "n_inner": INNER, "n_layer": 4, "n_positions": POSITIONS, "activation_function": "gelu", "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "type_vocab_size": 1,
        "layer_norm_epsilon": 1e-5, "num_experts": 4, "moe_every_n_layers": 2, "moe_top_k": 2, "expert_choice_router": False,
        "moe_normalize_expert_weights": False, "num_shared_experts": 0, "ffn_div": 1, "moe_impl": "megablocks",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape, mean=0.0):
        return torch.randn(shape, generator=generator) * 0.3 + mean

    def layer(name, *shape, mean=0.0):
        return {f"{name}.weight": drawn(*shape, mean=mean), f"{name}.bias": drawn(shape[0])}

    tensors = {"embeddings.word_embeddings.weight": drawn(VOCAB, HIDDEN), **layer("emb_ln", HIDDEN, mean=1.0)}
    tensors["embeddings.token_type_embeddings.weight"] = drawn(1, HIDDEN)
    for i in range(4):
        at = f"encoder.layers.{i}"
        tensors |= layer(f"{at}.attn.Wqkv", 3 * HIDDEN, HIDDEN) | layer(f"{at}.attn.out_proj", HIDDEN, HIDDEN)
        tensors |= layer(f"{at}.norm1", HIDDEN, mean=1.0) | layer(f"{at}.norm2", HIDDEN, mean=1.0)
        if i % 2 == 0:
            tensors |= layer(f"{at}.mlp.fc1", INNER, HIDDEN) | layer(f"{at}.mlp.fc2", HIDDEN, INNER)
            continue
        tensors |= {f"{at}.mlp.experts.mlp.{w}": drawn(4 * INNER, HIDDEN) for w in ("w1", "w2")}
        tensors |= {f"{at}.mlp.router.layer.weight": drawn(4, HIDDEN), f"{at}.mlp.experts.bias": drawn(HIDDEN)}
    return rewritten(folder, fields, tensors), NomicReference(fields, tensors)


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
TASKS = ["retrieval.query", "retrieval.passage", "separation"]


def jina_v3(folder, merged_task=None):
    """A checkpoint as it is published, with adapters of all products and tables, and transformers' model with one merged."""
    config = transformers.JinaEmbeddingsV3Config(**SMALL, type_vocab_size=1)
    theirs = build(transformers.JinaEmbeddingsV3Model, config)
    theirs.save_pretrained(folder)
    plain, stored, generator = load_file(folder / "model.safetensors"), {}, torch.Generator().manual_seed(8)
    for name, tensor in plain.items():
        if tensor.dim() < 2:
            stored[f"roberta.{name}"] = tensor
            continue
        layer, (rows, columns) = name.removesuffix(".weight"), tensor.shape
        is_table = "embeddings" in name
        a = torch.randn(3, *((rows, 4) if is_table else (4, columns)), generator=generator) * 0.5
        b = torch.randn(3, *((4, columns) if is_table else (rows, 4)), generator=generator) * 0.5
        stored[f"roberta.{layer}.parametrizations.weight.original"] = tensor
        stored[f"roberta.{layer}.parametrizations.weight.0.lora_A"] = a
        stored[f"roberta.{layer}.parametrizations.weight.0.lora_B"] = b
        if merged_task is not None:
            plain[name] = tensor + (a[merged_task] @ b[merged_task] if is_table else b[merged_task] @ a[merged_task]) * 0.25
    if merged_task is not None:
        other = folder / "merged"
        theirs.config.save_pretrained(other)
        save_file(plain, other / "model.safetensors", {"format": "pt"})
        theirs = transformers.JinaEmbeddingsV3Model.from_pretrained(other).eval()
    fields = {
        **SMALL, "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0, "lora_adaptations": TASKS, "lora_alpha": 1, "lora_rank": 4, "lora_dropout_p": 0.0,
        "lora_main_params_trainable": False, "load_trained_adapters": True, "layer_norm_eps": 1e-5, "type_vocab_size": 1,
        "matryoshka_dimensions": [8, 16], "task_instructions": {}, "truncate_dim": None, "use_flash_attn": True,
        "pad_token_id": 1,
    }  # fmt: skip
    return rewritten(folder, fields, stored), theirs


@pytest.mark.parametrize("task", [None, 0, 2])
def test_one_task_is_merged(tmp_path, task):
    folder, theirs = jina_v3(tmp_path, task)
    row = texts([31])[0]
    ours = loaded(folder, {} if task is None else {"jina_task": TASKS[task]})
    close(our_hidden(ours, [row])[0], their_hidden(theirs, row))
    if task is not None:
        assert not torch.allclose(our_hidden(loaded(folder), [row])[0], their_hidden(theirs, row), atol=1e-2)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path):
    folder, _ = jina_v3(tmp_path)
    with pytest.raises(ModelConfigError, match="jina_task 'other' is not among"):
        loaded(folder, {"jina_task": "other"})
    tensors = load_file(folder / "model.safetensors")
    name = "roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.mlp\.up_proj\.lora_A does not fit"):
        loaded(folder, {"jina_task": TASKS[0]})


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
