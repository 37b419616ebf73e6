"""Drafters of the tiny model for training: a Llama of two layers and an EAGLE-3 head, in plain PyTorch.

Both learn what the tiny model would say next: the loss is the cross entropy with its probabilities, where documents have
LOSS_BIT. The head learns several steps at once, each from its own output before (arXiv:2503.01840, 3): a token's second entry
sees the first ones of the tokens before it, and itself. Used by train_tiny.py --draft. Names of weights are a checkpoint's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tiny_llama import Mlp, Norm, Tiny, TinyConfig, rotate
from tiny_rows import LOSS_BIT
from torch import nn

STEPS = 3  # that a head is trained for
TAPS = (1, 3, 5)
DRAFT = TinyConfig(
    hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64
)


class Target:
    """The tiny model, which is not trained any more. taps: layers; a head reads their inputs."""

    def __init__(self, model, taps=()):
        self.model, self.bos, self.taps = model.train(False).requires_grad_(False), model.bos, taps

    @torch.no_grad()
    def __call__(self, ids, place):
        """ids [B, T] -> (logits [B, T, V], the taps side by side [B, T, n H])."""
        x, seen = self.model.embed_tokens(ids), []
        for number, layer in enumerate(self.model.layers):
            if number in self.taps:
                seen.append(x)
            x = layer(x, *place)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight), torch.cat(seen, -1) if seen else None

    def place(self, ids):
        """(cos, sin, mask) of rows of documents, each of which begins with the BOS token."""
        index = torch.arange(ids.shape[1])
        start = torch.where(ids == self.bos, index, 0).cummax(1).values
        angle = (index - start).float()[..., None] * self.model.inverse_frequency
        angle = torch.cat((angle, angle), -1)[:, None]
        mask = ((start[:, :, None] == start[:, None]) & (index[:, None] >= index))[:, None]
        return angle.cos(), angle.sin(), mask


class Draft(Tiny):
    """Two layers. It begins with the tiny model's embedding, projected to its own width."""

    def __init__(self, target):
        super().__init__(DRAFT, target.bos)
        self.__dict__["target"] = target  # no child: it is not trained
        table = target.model.embed_tokens.weight
        _, _, directions = torch.linalg.svd(table, full_matrices=False)
        self.embed_tokens.weight.data.copy_(table @ directions[: DRAFT.hidden_size].T)

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, rows):
        """rows [batch, length] of int16 -> the mean loss."""
        ids, counts = split(rows)
        place = self.target.place(ids)
        wanted, _ = self.target(ids, place)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, *place)
        at = counts[:, 1:]
        return distance(F.linear(self.norm(x)[:, :-1][at], self.embed_tokens.weight), wanted[:, :-1][at])


def distance(logits, wanted):
    """The cross entropy of logits [n, V] with the probabilities of `wanted`."""
    return -(wanted.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()


@dataclass(frozen=True)
class HeadConfig:
    hidden_size: int = 256
    intermediate_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    draft_vocab_size: int = 768
    num_taps: int = 3


class Head(nn.Module):
    """chosen: the target's ids that it knows, rising. It begins by saying what the last tap would say."""

    def __init__(self, target, chosen, shape=HeadConfig()):
        super().__init__()
        self.shape, size = shape, shape.hidden_size
        self.__dict__.update(target=target, chosen=chosen)
        self.fc = nn.Linear(shape.num_taps * size, size, bias=False)
        self.midlayer = nn.ModuleDict({
            "input_layernorm": Norm(shape),
            "hidden_norm": Norm(shape),
            "self_attn": nn.ModuleDict({
                "q_proj": nn.Linear(2 * size, shape.num_attention_heads * shape.head_dim, bias=False),
                "k_proj": nn.Linear(2 * size, shape.num_key_value_heads * shape.head_dim, bias=False),
                "v_proj": nn.Linear(2 * size, shape.num_key_value_heads * shape.head_dim, bias=False),
                "o_proj": nn.Linear(shape.num_attention_heads * shape.head_dim, size, bias=False),
            }),
            "post_attention_layernorm": Norm(shape),
            "mlp": Mlp(shape),
        })  # fmt: skip
        self.norm = Norm(shape)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        for weight in (self.midlayer.self_attn.o_proj.weight, self.midlayer.mlp.down_proj.weight):
            weight.data.mul_(0.2)
        self.fc.weight.data.mul_(0.1)
        self.fc.weight.data[:, -size:].add_(torch.eye(size))
        self.norm.weight.data.copy_(target.model.norm.weight)
        self.lm_head.weight.data.copy_(target.model.embed_tokens.weight[chosen])

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, rows):
        """rows [batch, length] of int16 -> the mean loss over STEPS.

        Entry t embeds token t and has the feature of token t - 1; in step n + 1 it has what step n made of entry t - 1."""
        ids, counts = split(rows)
        cos, sin, mask = self.target.place(ids)
        wanted, taps = self.target(ids, (cos, sin, mask))
        embedded = self.target.model.embed_tokens(ids)
        seen = mask & ~(ids == self.target.bos)[:, None, None]  # a document's first token has no feature before it
        seen = seen | torch.eye(ids.shape[1], dtype=torch.bool)  # but for itself, so that there is no row without keys
        feature, keys, values, losses = _later(self.fc(taps)), [], [], []
        for step in range(STEPS):
            x = self._entry(embedded, feature, cos, sin, seen, keys, values)
            at = counts[:, 1 + step :]  # entry t says token t + 1, of which `step` tokens before are drafts
            at = F.pad(at, (step, 0)) & (ids[:, :-1] != self.target.bos)
            losses.append(distance(self.lm_head(self.norm(x)[:, :-1][at]), wanted[:, :-1][at][:, self.chosen]))
            feature = _later(x)
        return sum(losses) / STEPS

    def _entry(self, embedded, feature, cos, sin, seen, keys, values):
        """[B, T, H] before the last norm. keys, values: of the steps before; those of this one are added.

        In step n an entry sees the first step's entries up to n tokens before it, and one entry of each later step: its own
        chain's."""
        layer, shape = self.midlayer, self.shape
        both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(feature)), -1)
        batch, length, _ = both.shape
        q, k, v = (
            layer.self_attn[name](both).view(batch, length, -1, shape.head_dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k, group = rotate(q, cos, sin), rotate(k, cos, sin), shape.num_attention_heads // shape.num_key_value_heads
        keys.append(k.repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        step = len(keys) - 1
        index = torch.arange(length)
        first = seen & (index[:, None] >= index + step) if step else seen
        scores = (q @ keys[0].transpose(-1, -2) * shape.head_dim**-0.5).masked_fill(~first, -1e9)
        chain = [(_back(k, step - n), _back(v, step - n)) for n, (k, v) in enumerate(zip(keys, values, strict=True)) if n]
        own = [(q * k).sum(-1, keepdim=True) * shape.head_dim**-0.5 for k, _ in chain]
        weights = torch.cat((scores, *own), -1).softmax(-1)
        out = weights[..., :length] @ values[0]
        for n, (_, v) in enumerate(chain):
            out = out + weights[..., length + n : length + n + 1] * v
        x = feature + layer.self_attn.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return x + layer.mlp(layer.post_attention_layernorm(x))


def _later(x):
    """Each token gets what the one before it has."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


def _back(x, tokens):
    """[B, heads, T, D]: each token gets what the one so many tokens before it has."""
    return F.pad(x[:, :, : x.shape[2] - tokens], (0, 0, tokens, 0)) if tokens else x


def split(rows):
    """int16 rows -> (ids, the tokens to learn)."""
    return (rows & (LOSS_BIT - 1)).long(), (rows & LOSS_BIT) > 0


def common_ids(rows, count):
    """The `count` ids that are most often learnt in these rows, rising."""
    ids, counts = split(rows)
    seen = torch.bincount(ids[counts], minlength=LOSS_BIT)
    return seen.topk(count).indices.sort().values


def head_tensors(head):
    """A head's tensors for its checkpoint, bf16, with d2t: how much greater the target's id is than the head's."""
    named = {f"{name}.weight": module.weight for name, module in head.named_modules() if isinstance(module, nn.Linear | Norm)}
    tensors = {name: weight.detach().bfloat16().contiguous() for name, weight in named.items()}
    return tensors | {"d2t": head.chosen - torch.arange(len(head.chosen))}


def head_config(head, target_config):
    """The fields of config.json. target_config: the tiny model's."""
    shape = head.shape
    same = ("vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "hidden_act", "dtype")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "draft_vocab_size")
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    taps = {"eagle_aux_hidden_state_layer_ids": list(TAPS)}
    return own | {name: target_config[name] for name in same} | {name: getattr(shape, name) for name in names} | taps
