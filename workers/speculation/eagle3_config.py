"""Fields of an EAGLE-3 head's config.json: LlamaForCausalLMEagle3, or the layout of the speculators library.

The fields of its one layer are read as those of a Llama of one layer. Fields of the head itself are read here, and others that
are set are refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.family_table import parse_model_config
from quire.workers.models.fields import flag, size, words

NAMES = CheckpointNames(
    prefixes=(("model.", ""), ("midlayer.", "layers.0.")), ignored=("t2d", "verifier_lm_head.", "verifier_norm.")
)
_HEAD = words(
    "draft_vocab_size target_hidden_size norm_before_residual norm_before_fc norm_output fc_norm eagle_config",
    "eagle_aux_hidden_state_layer_ids tie_word_embeddings",
)
# of no meaning for what a head computes
_OTHERS = words(
    "speculators_config speculators_version speculators_model_type transformer_layer_config embed_requires_grad model_type",
    "has_no_defaults_at_init auto_map target_model_type num_lookahead_tokens tokenizer_class bias parallel_drafting",
)
_PLAIN = words("architectures dtype torch_dtype transformers_version quantization_config head_dim eagle_decoder_type")
# with the one value that is supported
_ONLY = {
    "use_aux_hidden_state": True,
    "has_lm_head": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


class Eagle3Config(NamedTuple):
    """layer: a model of one layer that sees all tokens but the first, with the target's vocabulary."""

    layer: ModelConfig
    draft_vocab_size: int
    taps: tuple[int, ...]  # layers of the target whose inputs it reads
    norm_before_residual: bool
    norm_before_fc: bool  # one norm of all taps
    fc_norm: bool  # a norm of each tap (EAGLE-3.1)
    norm_output: bool


def read_eagle3_config(folder: str, num_layers: int, hidden_size: int, quantization: str | None = None) -> Eagle3Config:
    """num_layers, hidden_size: the target's. Raises ModelConfigError, which names the field."""
    try:
        fields = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"config.json cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ModelConfigError("config.json is not a JSON object")
    head = {**fields, **_object(fields, "eagle_config")}
    inner = _object(fields, "transformer_layer_config")
    _refuse(head, inner, head if inner else _object(fields, "eagle_config"))
    inner = inner or {name: value for name, value in fields.items() if name not in _HEAD | _OTHERS}
    given = {**inner, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    given["initializer_range"] = inner.get("initializer_range") or 0.02
    config = parse_model_config(given, quantization=quantization)
    if len(config.layers) != 1:
        raise ModelConfigError(f"num_hidden_layers is {len(config.layers)}: an EAGLE-3 head has one layer")
    if head.get("target_hidden_size") not in (None, hidden_size):
        raise ModelConfigError(f"target_hidden_size is {head['target_hidden_size']}, and the model's hidden_size {hidden_size}")
    attention = msgspec.structs.replace(config.layers[0].attention, window=-1)
    layers = (msgspec.structs.replace(config.layers[0], attention=attention),)
    return Eagle3Config(
        layer=msgspec.structs.replace(config, layers=layers, names=NAMES),
        draft_vocab_size=size(head, "draft_vocab_size", config.vocab_size),
        taps=_taps(head, num_layers),
        norm_before_residual=flag(head, "norm_before_residual"),
        norm_before_fc=flag(head, "norm_before_fc"),
        fc_norm=flag(head, "fc_norm"),
        norm_output=flag(head, "norm_output"),
    )


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _refuse(head: Mapping[str, Any], inner: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """own: the fields that are the head's alone; those of its layer are checked as a Llama's."""
    if head.get("fc_norm") and head.get("norm_before_fc"):
        raise ModelConfigError("config.json sets norm_before_fc and fc_norm, which exclude each other")
    if inner.get("model_type", "llama") != "llama":
        raise ModelConfigError(f"the head's layer is of model_type {inner['model_type']!r:.40}: only llama's is supported")
    types = inner.get("layer_types")
    if isinstance(types, list) and any(kind != "full_attention" for kind in types):
        raise ModelConfigError("layer_types: an EAGLE-3 head with a sliding window is not supported")
    if head.get("parallel_drafting") or head.get("num_lookahead_tokens"):
        raise ModelConfigError("config.json sets parallel_drafting: P-EAGLE is not supported")
    for name, only in _ONLY.items():
        if own.get(name) not in (None, only):
            raise ModelConfigError(f"config.json sets {name} to {own[name]!r:.40}: only {only!r} is supported")
    known = _HEAD | _OTHERS | _PLAIN | _ONLY.keys()
    if unknown := sorted(name for name in own if name not in known and own[name] is not None):
        raise ModelConfigError(f"config.json sets {', '.join(unknown)}: not known for EAGLE-3 heads")


def _taps(head: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    given = head.get("eagle_aux_hidden_state_layer_ids")
    if not given:
        return 2, num_layers // 2, num_layers - 3
    if not isinstance(given, list) or not all(type(i) is int for i in given):
        raise ModelConfigError("config.json: eagle_aux_hidden_state_layer_ids must be a list of integers")
    return tuple(given)
