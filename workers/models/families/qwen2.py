"""Qwen2 and Qwen2.5: Llama's block with biases of q, k and v, but not of o. With `use_sliding_window`, layers from
`max_window_layers` on have a sliding window, and those before have full attention: two KV groups.
"""

import msgspec

from quire.workers.models.config import LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.llama import LlamaBlock
from quire.workers.models.fields import Json, qwen_windows, read_attention, size, with_windows
from quire.workers.models.spellings import ACTIVATIONS, activation


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner, act = size(fields, "intermediate_size"), activation(fields)
    layers = with_windows(read_attention(fields, default_kv_heads=32), qwen_windows(fields))
    layer = LayerSpec(attention=layers[0], intermediate_size=inner, attention_bias=True, output_bias=False, activation=act)
    return tuple(msgspec.structs.replace(layer, attention=attention) for attention in layers)


FIELDS = frozenset({"use_sliding_window", "max_window_layers"})

FAMILY = Family("qwen2", FIELDS, read_layers, LlamaBlock, activations=frozenset(ACTIVATIONS))
