"""Eagle3Head: a head of one layer that drafts from the target's hidden states (EAGLE-3, arXiv:2503.01840).

    feature(t)  = fc(the target's residual stream at token t, as it enters three of the layers; or norms of them)
    entry(t)    : attention's input is norm(embedding of token t) beside norm(feature of the token before it); the residual is
                  that feature, or its norm if the config has norm_before_residual
    logits      = lm_head(norm(output)) over a part of the target's ids: id i of the head is i + d2t[i]
    a draft's feature is the head's own output before the last norm, or behind it if the config has norm_output

An entry lies in the KV slot of the token that it embeds and depends on no later one. A sequence's first token has no feature,
so its entry is hidden from all others (the window of -1 in the layer's attention).
"""

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import nn

from quire.workers.layers.embedding import Embedding
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module, WeightOwner
from quire.workers.layers.norm import make_norm
from quire.workers.loading.weight_loader import WeightLoader
from quire.workers.models.blocks import GatedMLP
from quire.workers.models.config import LayerSpec, ModelConfigError
from quire.workers.models.decoder import CausalLM
from quire.workers.models.fused import HeadRows, separate
from quire.workers.models.step_context import StepContext
from quire.workers.parallel import Parallel
from quire.workers.shard import whole
from quire.workers.speculation.eagle3_config import Eagle3Config
from quire.workers.speculation.head import Head


class TargetIds(WeightOwner):
    """The target's id of each of the head's: the checkpoint's d2t is the difference of the two."""

    def __init__(self, count: int, device: torch.device):
        super().__init__()
        self.ids = torch.arange(count, device=device)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        count = len(self.ids)
        yield name, WeightLoader((count,), (slice(0, count),), ("I64", "I32"), partial(_add, self.ids))

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        """The first ids."""


def _add(ids: torch.Tensor, piece: torch.Tensor, row: int) -> None:
    ids[row : row + len(piece)] += piece.to(ids.device, ids.dtype)


class Eagle3Attention(Module):
    """As blocks.SelfAttention, of an input twice as wide as its output."""

    def __init__(self, spec: LayerSpec, hidden_size: int, place: Placement):
        super().__init__()
        attention, place = spec.attention, place.at("self_attn")
        heads, kv_heads = place.parallel.split(attention.num_heads), place.parallel.kv_heads(attention.num_kv_heads)
        rows = separate(HeadRows(heads, kv_heads, attention.head_dim))
        bias = spec.attention_bias
        self.qkv_proj = Linear(whole(2 * hidden_size), rows, bias, place)
        self.o_proj = Linear(heads.times(attention.head_dim), {"o_proj": whole(hidden_size)}, bias, place)


class Eagle3Block(Module):
    def __init__(self, config: Eagle3Config, place: Placement):
        super().__init__()
        spec, size = config.layer.layers[0], config.layer.hidden_size
        norm = config.layer.model.norm, size, place.dtype, place.device
        self.input_layernorm, self.hidden_norm = make_norm(*norm), make_norm(*norm)
        self.self_attn = Eagle3Attention(spec, size, place)
        self.post_attention_layernorm = make_norm(*norm)
        self.mlp = GatedMLP(size, spec.intermediate_size, place, has_bias=spec.mlp_bias, activation=spec.activation)
        self._norm_before_residual = config.norm_before_residual

    def forward(
        self, embedded: torch.Tensor, feature: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual), not yet added; with logits_indices, of these tokens only."""
        attended, normed = self.attend(embedded, feature, context)
        residual = normed if self._norm_before_residual else feature
        if logits_indices is not None:
            attended, residual = attended.index_select(0, logits_indices), residual.index_select(0, logits_indices)
        return self.mlp(self.self_attn.o_proj.split_k(attended), residual, self.post_attention_layernorm)

    def attend(
        self, embedded: torch.Tensor, feature: torch.Tensor, context: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(attention's output, the feature's norm); the cache gets the entries."""
        normed = self.hidden_norm(feature)
        qkv = self.self_attn.qkv_proj(torch.cat((self.input_layernorm(embedded), normed), 1))
        return context.attend(0, qkv, None, None), normed


class Eagle3Model(Module):
    def __init__(self, config: Eagle3Config, place: Placement, target: CausalLM, has_embedding: bool):
        super().__init__()
        size = config.layer.hidden_size
        if has_embedding:
            self.embed_tokens = Embedding(config.layer.vocab_size, size, place.dtype, place.device, 1.0, place.table_dtype)
        else:  # past nn.Module: it is the target's, which loads it
            self.__dict__["embed_tokens"] = target.model.embed_tokens
        self.layers = nn.ModuleList([Eagle3Block(config, place.at("model.layers.0"))])
        self.norm = make_norm(config.layer.model.norm, size, place.dtype, place.device)


class Eagle3Head(Head):
    writes_alone = True

    def __init__(
        self,
        config: Eagle3Config,
        dtype: torch.dtype,
        parallel: Parallel,
        target: CausalLM,
        *,
        has_embedding: bool,
        has_ids: bool,
    ):
        """has_embedding: the checkpoint has an embedding of its own; has_ids: it has d2t. Raises ModelConfigError."""
        super().__init__()
        layer, theirs = config.layer, target.config
        if layer.vocab_size != theirs.vocab_size:
            raise ModelConfigError(f"its vocabulary has {layer.vocab_size} tokens, and the model's {theirs.vocab_size}")
        if not has_embedding and layer.hidden_size != theirs.hidden_size:
            raise ModelConfigError(
                f"it has no embedding, and hidden_size {layer.hidden_size} where the model's is {theirs.hidden_size}"
            )
        if not has_ids and config.draft_vocab_size != layer.vocab_size:
            raise ModelConfigError(
                f"it has {config.draft_vocab_size} tokens and no d2t, which says which of the model's they are"
            )
        place = Placement(dtype, parallel, layer.quantization)
        self.config, self._parallel, self._norm_output = layer, parallel, config.norm_output
        self.model = Eagle3Model(config, place, target, has_embedding)
        taps = len(config.taps) * theirs.hidden_size
        if config.norm_before_fc:
            self.input_norm = make_norm(layer.model.norm, taps, dtype, parallel.device)
        if config.fc_norm:
            norm = layer.model.norm, theirs.hidden_size, dtype, parallel.device
            self.fc_norm = nn.ModuleList([make_norm(*norm) for _ in config.taps])
        self._norms, self._norms_each = config.norm_before_fc, config.fc_norm
        self.fc = Linear(whole(taps), {"fc": whole(layer.hidden_size)}, False, Placement(dtype, parallel))
        outputs = {"lm_head": parallel.vocabulary(config.draft_vocab_size)}
        self.lm_head = Linear(whole(layer.hidden_size), outputs, False, Placement(dtype, parallel))
        if has_ids:
            self.d2t = TargetIds(config.draft_vocab_size, parallel.device)
        self._has_ids, self._draft_vocab_size = has_ids, config.draft_vocab_size

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [T, several H] -> features [T, D]."""
        if self._norms_each:
            each = taps.chunk(len(self.fc_norm), 1)
            taps = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, each, strict=True)], 1)
        return self.fc(self.input_norm(taps) if self._norms else taps)

    def forward(
        self, input_ids: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, residual = self.model.layers[0](self.model.embed_tokens(input_ids), self.given, context, logits_indices)
        hidden = self.model.norm.add(x, residual)
        self.given = hidden if self._norm_output else residual
        return hidden

    def write(self, input_ids: torch.Tensor, context: StepContext, logits_indices: torch.Tensor) -> None:
        """Without what lies behind attention, which reads most of the layer's weights."""
        block = cast(Eagle3Block, self.model.layers[0])
        block.attend(self.model.embed_tokens(input_ids), self.given, context)

    def compute_logits(self, hidden_rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of all of the target's ids, -inf for those that the head does not know, on every rank."""
        logits = self._parallel.all_logits(self.lm_head(hidden_rows), self._draft_vocab_size)
        if not self._has_ids:
            return logits
        full = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return full.index_copy_(1, self.d2t.ids, logits)
