"""EAGLE-3 heads for tests: random ones as checkpoints in both layouts, and a plain torch reference of what a head computes."""

import json

import torch
from safetensors.torch import save_file
from tiny_models import VOCAB_SIZE, reference
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

EPS = 1e-5
HIDDEN, TAPS = 64, (0, 1, 2)  # of the tiny llama
PLAIN = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


class Head:
    """A head for a target of this hidden size and vocabulary. Its methods are the reference, for one sequence."""

    def __init__(self, target_size, vocab, *, size=None, draft_vocab=None, taps=None, embedding=None, seed=0, **flags):
        """embedding: the target's, if the head has none. draft_vocab None: all of the target's ids."""
        self.size, self.vocab, self.draft_vocab = size or target_size, vocab, draft_vocab or vocab
        self.heads, self.kv_heads, self.head_dim, self.inner = 4, 2, 16, 96
        self.flags, self.taps, self.embedding = {**PLAIN, **flags}, taps, embedding
        self.target_size = target_size
        generator, d = torch.Generator().manual_seed(seed), self.size

        def new(*shape, std=0.15):
            return torch.randn(shape, generator=generator) * std

        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": new(q, 2 * d), "self_attn.k_proj": new(kv, 2 * d), "self_attn.v_proj": new(kv, 2 * d),
            "self_attn.o_proj": new(d, q), "mlp.gate_proj": new(self.inner, d), "mlp.up_proj": new(self.inner, d),
            "mlp.down_proj": new(d, self.inner), "input_layernorm": 1 + new(d), "hidden_norm": 1 + new(d),
            "post_attention_layernorm": 1 + new(d),
        }  # fmt: skip
        self.layer = layer
        self.rest = {"fc": new(d, 3 * target_size, std=0.05), "norm": 1 + new(d), "lm_head": new(self.draft_vocab, d, std=0.3)}
        if embedding is None:
            self.rest["embed_tokens"] = new(vocab, d, std=1.0)
        if self.flags["norm_before_fc"]:
            self.rest["input_norm"] = 1 + new(3 * target_size)
        if self.flags["fc_norm"]:
            self.rest |= {f"fc_norm.{i}": 1 + new(target_size) for i in range(3)}
        chosen = torch.randperm(vocab, generator=generator)[: self.draft_vocab].sort().values
        self.ids = torch.arange(vocab) if draft_vocab is None else chosen

    def save(self, folder, *, speculators=False, **changes):
        folder.mkdir(parents=True, exist_ok=True)
        layer = "layers.0." if speculators else "midlayer."
        tensors = {f"{layer}{name}.weight": x for name, x in self.layer.items()} | {
            f"{k}.weight": x for k, x in self.rest.items()
        }
        if self.draft_vocab != self.vocab:
            tensors["d2t"] = self.ids - torch.arange(self.draft_vocab)
            tensors["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill_(0, self.ids, True)
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        inner = {
            "hidden_size": self.size, "intermediate_size": self.inner, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "num_hidden_layers": 1, "vocab_size": self.vocab,
            "rms_norm_eps": EPS, "max_position_embeddings": 128, "hidden_act": "silu", "model_type": "llama",
            "rope_theta": 10000.0,
        }  # fmt: skip
        own = {"draft_vocab_size": self.draft_vocab, **{name: value for name, value in self.flags.items() if value}}
        own |= {} if self.taps is None else {"eagle_aux_hidden_state_layer_ids": list(self.taps)}
        if speculators:
            config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], **own}
            config |= {"transformer_layer_config": inner, "target_hidden_size": self.target_size}
        else:
            config = {**inner, "architectures": ["LlamaForCausalLMEagle3"], **own}
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    def drafts(self, ids, taps, drafts):
        """Logits [1 + len(drafts), vocab] behind `ids`, and behind each of `drafts`. taps: [len(ids) - 1 or more, 3 H]."""
        if self.flags["norm_before_fc"]:
            taps = rms_norm(taps, taps.shape[-1:], self.rest["input_norm"], EPS)
        if self.flags["fc_norm"]:
            each = zip(taps.chunk(3, 1), (self.rest[f"fc_norm.{i}"] for i in range(3)), strict=True)
            taps = torch.cat([rms_norm(x, x.shape[-1:], weight, EPS) for x, weight in each], 1)
        features = [*(taps[: len(ids) - 1] @ self.rest["fc"].T)]
        tokens, logits = list(ids[1:]), []
        for draft in [*drafts, None]:
            prenorm = self._forward(torch.tensor(tokens), torch.stack(features))
            normed = rms_norm(prenorm, (self.size,), self.rest["norm"], EPS)
            full = torch.full((self.vocab,), -torch.inf)
            full[self.ids] = self.rest["lm_head"] @ normed[-1]
            logits.append(full)
            tokens.append(draft)
            features.append(normed[-1] if self.flags["norm_output"] else prenorm[-1])
        return torch.stack(logits)

    def _forward(self, tokens, features):
        w, table = self.layer, self.embedding if self.embedding is not None else self.rest["embed_tokens"]
        norm = {name: w[name] for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        normed = rms_norm(features, (self.size,), norm["hidden_norm"], EPS)
        x = torch.cat((rms_norm(table[tokens], (self.size,), norm["input_layernorm"], EPS), normed), 1)
        q, k, v = ((x @ w[f"self_attn.{name}_proj"].T).unflatten(1, (-1, self.head_dim)).transpose(0, 1) for name in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        residual = normed if self.flags["norm_before_residual"] else features
        residual = residual + attended.transpose(0, 1).flatten(1) @ w["self_attn.o_proj"].T
        h = rms_norm(residual, (self.size,), norm["post_attention_layernorm"], EPS)
        h = silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)
        return residual + h @ w["mlp.down_proj"].T

    def _rotated(self, x):
        """By positions from 1 on; only differences count."""
        half = self.head_dim // 2
        angles = torch.arange(1, x.shape[1] + 1)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def head_of(family="llama", **how) -> Head:
    if how.get("embedding"):
        how["embedding"] = reference(family).get_input_embeddings().weight.detach().clone()
    return Head(reference(family).config.hidden_size, VOCAB_SIZE, **{"taps": TAPS, **how})


def note_drafts(engine, wrong=True):
    """A list that gets (known ids, drafts, logits of what follows) of each draft; every other draft is then made wrong."""
    drafter, found = engine.runner.device.drafter, []
    draw, size = drafter.draw_tokens, engine.runner.ctx.cache.block_size

    def note(logits, slots, positions, window, tables, kind):
        for row, (slot, position, place) in enumerate(
            zip(slots.tolist(), positions.tolist(), window.places.tolist(), strict=True)
        ):
            if slot == tables.max_num_seqs:
                continue
            known = position - place
            text = drafter.state.text.view(-1, size)[tables.block_table[0, slot, : -(-known // size)].long()].view(-1)
            own = window.input_ids[row * window.stride : row * window.stride + place + 1].tolist()
            found.append(([*text[: known - 1].tolist(), own[0]], own[1:], logits[row].clone()))
        drawn = draw(logits, slots, positions, window, tables, kind)
        is_right = torch.arange(len(drawn), device=drawn.device) % 2 == 0
        return torch.where(is_right, drawn, (drawn + 1) % VOCAB_SIZE) if wrong else drawn

    drafter.draw_tokens = note
    return found


def assert_right(found, head, family, most=40):
    model = reference(family)
    assert len(found) > 30
    for ids, drafts, logits in found[:: max(len(found) // most, 1)]:
        with torch.inference_mode():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            expected = head.drafts(ids, torch.cat([states[i][0] for i in TAPS], 1), drafts)[-1]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
