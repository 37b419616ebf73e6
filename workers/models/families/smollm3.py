"""SmolLM3: Llama's block; every fourth layer does not rotate, and may have a sliding window."""

import msgspec

from quire.workers.models.config import LayerSpec, ModelConfigError
from quire.workers.models.decoder import Family
from quire.workers.models.families.llama import LlamaBlock
from quire.workers.models.fields import Json, flag, read_attention, size, sliding_window, windows_by_type, words
from quire.workers.models.spellings import ACTIVATIONS, activation

FIELDS = words(
    "attention_bias mlp_bias no_rope_layers no_rope_layer_interval use_sliding_window max_window_layers",
)


def plain_fields(fields: Json) -> Json:
    return {"tie_word_embeddings": True, "rope_theta": 2000000.0, "sliding_window": None, **fields}


def _rotates(fields: Json) -> tuple[bool, ...]:
    """Whether each layer rotates."""
    num_layers, flags = size(fields, "num_hidden_layers"), fields.get("no_rope_layers")
    if flags is None:
        every = size(fields, "no_rope_layer_interval", 4)
        return tuple((i + 1) % every != 0 for i in range(num_layers))
    if not isinstance(flags, list) or len(flags) != num_layers or any(x not in (0, 1) for x in flags):
        raise ModelConfigError(f"config.json: no_rope_layers must list 0 or 1 for each of {num_layers} layers")
    return tuple(bool(x) for x in flags)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    window, rotates = sliding_window(fields) if flag(fields, "use_sliding_window") else 0, _rotates(fields)
    windows = windows_by_type(fields, window) or tuple(0 if yes else window for yes in rotates)
    attention, replace = read_attention(fields, default_kv_heads=4), msgspec.structs.replace
    return tuple(
        LayerSpec(
            attention=replace(attention, window=window, rope=attention.rope if yes else None),
            intermediate_size=size(fields, "intermediate_size"),
            attention_bias=flag(fields, "attention_bias"),
            mlp_bias=flag(fields, "mlp_bias"),
            activation=activation(fields),
        )
        for window, yes in zip(windows, rotates, strict=True)
    )


FAMILY = Family("smollm3", FIELDS, read_layers, LlamaBlock, plain_fields=plain_fields, activations=frozenset(ACTIVATIONS))
