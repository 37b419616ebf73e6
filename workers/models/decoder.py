"""The decoder-only transformer that the Llama, Mistral, Qwen2 and Qwen3 families share; what differs is in their files.

Pre-norm blocks over a residual stream: x += attention(norm(x)); x += mlp(norm(x)), MLP = down(silu(gate) · up). A sublayer gets
the residual and its norm, for addition, norm and the first product may be one kernel. Module names are the checkpoint's. What
is not here: QK-norm, rotary embedding, KV write and attention itself, which the runner passes in as one callable, for it owns
the cache and the step's metadata. Nothing here depends on data: forward can be captured in a graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import nn

from quire.workers.layers.linear import WHOLE, Embedding, Linear, LMHead, Module, RMSNorm, Shard
from quire.workers.models.config import ModelConfig


class Attend(Protocol):
    """The runner's attention: qkv [T, (Hq + 2 Hkv) D] = q|k|v of `layer` -> [T, Hq D].

    Norm weights [D] are those of QK-norm (applied to each head before the rotation), None where the model has none.
    """

    def __call__(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor: ...


class Variant(NamedTuple):
    """What a family makes of the shared block."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class Placement(NamedTuple):
    """Dtype, device and shard of a model's parameters."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = WHOLE


class SelfAttention(Module):
    """The projections around attention; q, k and v are one matrix product."""

    def __init__(self, config: ModelConfig, variant: Variant, place: Placement, layer: int):
        super().__init__()
        self.layer = layer
        parts = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, "out", variant.qkv_bias, *place)
        self.o_proj = Linear(config.q_size, {"o_proj": config.hidden_size}, "in", variant.o_bias, *place)
        if variant.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place.dtype, place.device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place.dtype, place.device)
        self.qk_norm = variant.qk_norm

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: RMSNorm, attend: Attend, wanted: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_norm, k_norm = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm else (None, None)
        qkv, residual = self.qkv_proj.normed(x, residual, norm)
        out = attend(self.layer, qkv, q_norm, k_norm)
        if wanted is not None:
            out, residual = out.index_select(0, wanted), residual.index_select(0, wanted)
        return self.o_proj.before_norm(out), residual


class MLP(Module):
    """down(silu(gate(x)) · up(x)); gate and up are one matrix product."""

    def __init__(self, config: ModelConfig, variant: Variant, place: Placement):
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = Linear(config.hidden_size, parts, "out", variant.mlp_bias, *place)
        self.down_proj = Linear(config.intermediate_size, {"down_proj": config.hidden_size}, "in", variant.mlp_bias, *place)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        h, residual = self.gate_up_proj.normed(x, residual, norm, gated=True)
        return self.down_proj.before_norm(h), residual


class DecoderLayer(Module):
    """One block: (output of the last sublayer, residual without it) -> the same of this block. The residual may change.

    With `wanted`, of these tokens only: keys and values are there for all, the rest is computed for some.
    """

    def __init__(self, config: ModelConfig, variant: Variant, place: Placement, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        self.self_attn = SelfAttention(config, variant, place, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place.dtype, place.device)
        self.mlp = MLP(config, variant, place)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, attend, wanted)
        return self.mlp(x, residual, self.post_attention_layernorm)


class Decoder(Module):
    """Embedding, blocks, final norm: token ids int32 [T] -> hidden states [T, H], or [R, H] of those wanted."""

    def __init__(self, config: ModelConfig, variant: Variant, place: Placement):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, place.dtype, place.device)
        self.layers = nn.ModuleList(DecoderLayer(config, variant, place, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place.dtype, place.device)

    def forward(self, input_ids: torch.Tensor, attend: Attend, wanted: torch.Tensor | None) -> torch.Tensor:
        x, residual = None, self.embed_tokens(input_ids)
        *layers, last = self.layers
        for layer in layers:
            x, residual = layer(x, residual, attend)
        x, residual = last(x, residual, attend, wanted)
        return self.norm.add(x, residual)


class CausalLM(Module):
    """A decoder and its language-model head: the interface that the runner and weights.py use, whatever the family."""

    def __init__(self, config: ModelConfig, variant: Variant, place: Placement):
        super().__init__()
        self.config = config
        self.model = Decoder(config, variant, place)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, place.dtype, place.device, tied_to)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input_ids, positions int32 [T] -> hidden [T, H] after the final norm; with wanted int32 [R], of these tokens, [R, H].

        After the last layer's attention nobody needs the others: of a prompt that is most of a layer, 3 % of a model of 28.
        Rotary families leave `positions` to `attention`; a family with learned positions would read them here.
        """
        return self.model(input_ids, attention, wanted)

    @property
    def weights_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())

    @contextmanager
    def short(self, layers: Sequence[int]) -> Iterator[None]:
        """Within, forward goes through these layers only: to see each kernel, not to compute."""
        whole = self.model.layers
        self.model.layers = nn.ModuleList(whole[i] for i in layers)
        try:
            yield
        finally:
            self.model.layers = whole

    def compute_logits(self, hidden_rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_rows [R, H] -> logits [R, vocab_size], in the model's dtype; into `out` if it is given (on a GPU)."""
        return self.lm_head(hidden_rows, out)
