"""ModernBERT (arXiv:2412.13663): pre-norm layers with rotary embedding and a gated MLP. Every third layer sees the whole text,
the others `local_attention` / 2 tokens to each side, and both kinds have a base of their own. The first layer has no norm
before attention, since the embedding has one.
"""

import msgspec
import torch

from quire.workers.layers.heads import HeadKind, HeadPooling, HeadSpec
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NoNorm, NormSpec, make_norm
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import GatedMLP, SelfAttention
from quire.workers.models.config import EncoderSpec, LayerSpec, ModelConfig, ModelConfigError, ModelSpec
from quire.workers.models.encoders.family import EncoderFamily, activation_of, layer_norm, num_labels, read_heads
from quire.workers.models.families.gemma3 import by_layer_type
from quire.workers.models.fields import Json, flag, number, size, windows_by_type, words
from quire.workers.models.fused import stacked, stacked_pair
from quire.workers.models.spellings import renamed
from quire.workers.models.step_context import StepContext

FIELDS = words(
    "norm_eps norm_bias local_attention attention_bias mlp_bias decoder_bias classifier_pooling classifier_bias",
    "classifier_activation global_attn_every_n_layers global_rope_theta local_rope_theta embedding_dropout mlp_dropout",
    "initializer_cutoff_factor deterministic_flash_attn sparse_prediction sparse_pred_ignore_index reference_compile",
    "repad_logits_with_grad position_embedding_type",
)
PREFIXES = (
    ("model.", ""),
    ("embeddings.tok_embeddings.", "model.embed_tokens."),
    ("embeddings.norm.", "model.embed_norm."),
    ("layers.", "model.layers."),
    ("final_norm.", "model.norm."),
    ("classifier.", "head.out."),
    ("decoder.", "lm_head."),
)
LAYERS = (("attn.Wqkv.", "self_attn.Wqkv."), ("attn.Wo.", "self_attn.o_proj."), ("mlp.Wo.", "mlp.down_proj."))
UNUSED = ("head.", "lm_head.")
POOLING: dict[str, HeadPooling] = {"cls": "cls", "mean": "mean"}
KINDS: dict[str, HeadKind] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForMaskedLM": "masked_lm",
}


class ModernBertBlock(Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int):
        super().__init__()
        hidden_size, norm = config.hidden_size, (config.model.norm, config.hidden_size, place.dtype, place.device)
        bias, qkv = spec.attention_bias, stacked("Wqkv")
        self.attn_norm = make_norm(*norm) if layer else NoNorm()
        self.self_attn = SelfAttention(spec.attention, hidden_size, place, layer, qkv_bias=bias, o_bias=bias, qkv=qkv)
        self.mlp_norm = make_norm(*norm)
        how = {"has_bias": spec.mlp_bias, "activation": spec.activation}
        self.mlp = GatedMLP(hidden_size, spec.intermediate_size, place, gate_up=stacked_pair("Wi"), **how)  # type: ignore[arg-type]

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(x, residual, self.attn_norm, context, logits_indices)
        return self.mlp(x, residual, self.mlp_norm)


def plain_fields(fields: Json) -> Json:
    return renamed(fields, {"hidden_activation": "hidden_act"}, {"tie_word_embeddings": True, "max_position_embeddings": 8192})


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    attention, num_layers = read_heads(fields), size(fields, "num_hidden_layers")
    every, window = size(fields, "global_attn_every_n_layers", 3), size(fields, "local_attention", 128) // 2 + 1
    if fields.get("layer_types") is None:
        types = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
        fields = {**fields, "layer_types": types}
    local = {"rope_theta": number(fields, "local_rope_theta", 10000.0)}
    theta = number(fields, "global_rope_theta", 160000.0)
    ropes = by_layer_type(fields, attention.head_dim, local, theta)
    inner, act = size(fields, "intermediate_size"), activation_of(fields, "hidden_act", "gelu")
    return tuple(
        LayerSpec(
            attention=msgspec.structs.replace(attention, window=seen, rope=ropes[seen > 0]),
            intermediate_size=inner,
            attention_bias=flag(fields, "attention_bias"),
            mlp_bias=flag(fields, "mlp_bias"),
            activation=act,
        )
        for seen in windows_by_type(fields, window) or ()
    )


def read_norm(fields: Json) -> NormSpec:
    norm = layer_norm(fields, "norm_eps", 1e-5)
    return msgspec.structs.replace(norm, has_bias=flag(fields, "norm_bias"))


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=read_norm(fields), embedding_norm=read_norm(fields))


def read_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    return EncoderSpec(has_final_norm=True, head=head)


def read_head(fields: Json, kind: str) -> HeadSpec | None:
    if kind == "Model":
        return None
    pooling = fields.get("classifier_pooling") or "cls"
    if pooling not in POOLING:
        raise ModelConfigError(f"config.json sets classifier_pooling to {pooling!r:.60}: only 'cls' and 'mean' are supported")
    is_masked = kind == "ForMaskedLM"
    return HeadSpec(
        kind=KINDS[kind],
        num_outputs=size(fields, "vocab_size") if is_masked else num_labels(fields),
        pooling=POOLING[pooling],
        dense=activation_of(fields, "classifier_activation", "gelu"),
        dense_bias=flag(fields, "classifier_bias"),
        norm=read_norm(fields),
        out_bias=flag(fields, "decoder_bias", True) if is_masked else True,
    )


def read_names(fields: Json, kind: str) -> CheckpointNames:
    return CheckpointNames(PREFIXES, UNUSED if kind == "Model" else (), inner=LAYERS)


FAMILY = EncoderFamily(
    "ModernBERT", FIELDS, read_layers, ModernBertBlock, read_model, read_encoder, read_head, read_names, plain_fields
)
