"""NomicBERT (arXiv:2402.01613): a post-norm encoder with rotary embedding and gated MLPs. Version 2 (arXiv:2502.07972) has MLPs
without a gate, and in every second layer a mixture of such ones instead.

    y = sum_j w_j W2[e_j]ᵀ gelu(W1[e_j] h) + b,     w = softmax(R h) of the best experts, which is not normed again

The checkpoints have the names of flash-attention's code, the mixtures those of megablocks': all experts' rows in two tensors.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from quire.kernels.experts.experts_reference import Gelu
from quire.kernels.experts.routing_reference import Routing
from quire.workers.layers.experts import Experts, Router
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module, WeightOwner, new_parameter
from quire.workers.layers.stacked_experts import Names
from quire.workers.loading.names import CheckpointNames
from quire.workers.loading.weight_loader import FLOATS, WeightLoader, copied
from quire.workers.models.config import ExpertsSpec, LayerSpec, ModelConfig, ModelConfigError
from quire.workers.models.encoders.bert import BERT, BUFFERS, FLASH_EMBEDDINGS, HEADS, UNUSED
from quire.workers.models.encoders.bert import FIELDS as BERT_FIELDS
from quire.workers.models.encoders.family import PostNormBlock, read_typed_encoder, rotary_layers
from quire.workers.models.fields import Json, flag, size, words
from quire.workers.models.fused import pair, stacked
from quire.workers.models.spellings import only, renamed
from quire.workers.shard import whole

FIELDS = BERT_FIELDS | words(
    "rotary_emb_fraction rotary_emb_interleaved rotary_emb_scale_base rotary_scaling_factor max_trained_positions prenorm",
    "parallel_block parallel_block_tied_norm use_rms_norm qkv_proj_bias mlp_fc1_bias mlp_fc2_bias causal scale_attn_weights",
    "scale_attn_by_inverse_layer_idx reorder_and_upcast_attn fused_bias_fc fused_dropout_add_ln dense_seq_output",
    "pad_vocab_size_multiple use_xentropy summary_activation summary_first_dropout summary_proj_to_labels summary_type",
    "summary_use_proj add_pooling_layer num_experts expert_choice_router moe_every_n_layers moe_impl",
    "moe_normalize_expert_weights moe_resid_pdrop moe_top_k num_shared_experts ffn_div has_gate",
)
RENAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
}
LAYERS = (
    ("attn.Wqkv.", "self_attn.Wqkv."),
    ("attn.out_proj.", "self_attn.o_proj."),
    ("norm1.", "post_attention_layernorm."),
    ("norm2.", "post_mlp_layernorm."),
    ("mlp.fc11.", "mlp.up_proj."),
    ("mlp.fc12.", "mlp.gate_proj."),
    ("mlp.fc1.", "mlp.up_proj."),
    ("mlp.fc2.", "mlp.down_proj."),
    ("mlp.router.layer.", "mlp.router."),
    ("mlp.experts.bias", "mlp.added.bias"),
)
GLU = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}  # the activations' names of the first configs


class NomicExperts(Experts):
    """Experts of two tensors, w1 and w2 [E I, H], of which w2 is turned."""

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        shape = self._experts.full * self._inner.full, self._sizes.hidden
        for tensor, is_down in (("w1", False), ("w2", True)):
            yield f"{name}.mlp.{tensor}", WeightLoader(shape, (), FLOATS, partial(self._take_rows, is_down))

    def _take_rows(self, is_down: bool, piece: torch.Tensor, row: int) -> None:
        """Take this rank's of some rows, from number `row` of all experts' on."""
        piece = piece.to(self.gate_up.device, self.gate_up.dtype)
        numbers = torch.arange(row, row + len(piece), device=piece.device)
        expert, inner = numbers // self._inner.full - self._experts.start, numbers % self._inner.full - self._inner.start
        own = (expert >= 0) & (expert < self._experts.size) & (inner >= 0) & (inner < self._inner.size)
        expert, inner, piece = expert[own], inner[own], piece[own]
        if is_down:
            self.down[expert, :, inner] = piece
        else:
            self.gate_up[expert, inner] = piece


class AddedBias(WeightOwner):
    """A bias [H] of a mixture's sum."""

    def __init__(self, hidden_size: int, place: Placement):
        super().__init__()
        self.bias = new_parameter((hidden_size,), place.dtype, place.device)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        yield f"{name}.bias", copied(self.bias, (whole(len(self.bias)),))


class NomicMixture(Module):
    """The mixture of the module's formula, as a block's MLP."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, place: Placement):
        super().__init__()
        self._parallel, place = place.parallel, place._replace(quantization=None)
        own, inner = place.parallel.experts(spec.routing.num_experts), place.parallel.of_each_expert(spec.intermediate_size)
        self.router = Router("router", spec.routing, hidden_size, place)
        self.experts = NomicExperts(own, hidden_size, inner, place.at("experts"), act=spec.act, names=Names(gate=""))
        self.added = AddedBias(hidden_size, place)

    def of(self, h: torch.Tensor) -> torch.Tensor:
        """The output for h [T, H]."""
        return self._parallel.all_reduce(self.experts(h, *self.router(h))).add_(self.added.bias)


def _block(config: ModelConfig, spec: LayerSpec, place: Placement, layer: int) -> Module:
    experts, gate_up = spec.experts, pair if spec.has_gate else None
    mlp = None if experts is None else partial(NomicMixture, experts, config.hidden_size)
    return PostNormBlock(config, spec, place, layer, qkv=stacked("Wqkv"), gate_up=gate_up, mlp=mlp)


def plain_fields(fields: Json) -> Json:
    found = renamed(fields, RENAMED, {"tie_word_embeddings": True, "type_vocab_size": 2})
    given = found.get("hidden_act", "silu")
    if "activation_function" in fields and given not in GLU:
        found["has_gate"] = False
    return {**found, "hidden_act": GLU.get(given, given)}


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(
        fields,
        "NomicBERT",
        prenorm=False,
        parallel_block=False,
        use_rms_norm=False,
        causal=False,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        expert_choice_router=False,
        moe_normalize_expert_weights=False,
        ffn_div=1,
    )
    for name in ("rotary_emb_scale_base", "rotary_scaling_factor", "num_shared_experts"):
        if fields.get(name):
            raise ModelConfigError(f"config.json sets {name}: not supported for NomicBERT models")
    up_bias, down_bias = flag(fields, "mlp_fc1_bias"), flag(fields, "mlp_fc2_bias")
    if not (has_gate := flag(fields, "has_gate", True)) and up_bias != down_bias:
        raise ModelConfigError(
            "config.json sets mlp_fc1_bias and mlp_fc2_bias to different values: not supported without a gate"
        )
    layers = rotary_layers(fields, 1000.0, flag(fields, "qkv_proj_bias"), up_bias, down_bias)
    layers = tuple(msgspec.structs.replace(layer, has_gate=has_gate) for layer in layers)
    every = fields.get("moe_every_n_layers") if fields.get("num_experts") else None
    if not every:
        return layers
    every, experts = size(fields, "moe_every_n_layers"), read_experts(fields)
    return tuple(msgspec.structs.replace(layer, experts=experts if i % every == 1 else None) for i, layer in enumerate(layers))


def read_experts(fields: Json) -> ExpertsSpec:
    if fields["hidden_act"] != "gelu" or flag(fields, "has_gate", True):
        raise ModelConfigError("config.json: mixtures of NomicBERT models are supported with gelu alone")
    routing = Routing(num_experts=size(fields, "num_experts"), top_k=size(fields, "moe_top_k", 1))
    return ExpertsSpec(routing=routing, intermediate_size=size(fields, "intermediate_size"), act=Gelu())


def read_names(fields: Json, kind: str) -> CheckpointNames:
    heads: Any = [(theirs.replace("transform.LayerNorm", "transform.layer_norm"), ours) for theirs, ours in HEADS[kind]]
    prefixes = (("nomic_bert.", ""), ("bert.", ""), *FLASH_EMBEDDINGS, *heads)
    return CheckpointNames(prefixes, (*BUFFERS, *UNUSED[kind]), inner=LAYERS)


FAMILY = BERT._replace(
    name="NomicBERT",
    fields=FIELDS,
    read_layers=read_layers,
    make_block=_block,
    read_encoder=read_typed_encoder,
    names=read_names,
    plain_fields=plain_fields,
)
