"""Encoders that transformers does not have, in plain torch, as their papers describe them, and tiny checkpoints of these."""

import json

import torch
from encoder_cases import HEADS, HIDDEN, INNER, POSITIONS, SMALL, VOCAB
from safetensors.torch import save_file

from quire.workers.models.alibi import alibi_slopes

F = torch.nn.functional


def rewritten(folder, fields, tensors=None):
    (folder / "config.json").write_text(json.dumps(fields))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


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
