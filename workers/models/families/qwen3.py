"""Qwen3 (dense): Llama's block, with an RMSNorm on each head of q and k before the rotation, and optional attention biases.
Windows as in Qwen2. The head size is its own field and often not hidden_size / num_heads.
"""

import msgspec

from quire.workers.models.config import LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.llama import LlamaBlock
from quire.workers.models.fields import Json, flag, qwen_windows, read_attention, rms_norm_eps, size, with_windows
from quire.workers.models.spellings import ACTIVATIONS, activation


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner, bias, act = size(fields, "intermediate_size"), flag(fields, "attention_bias"), activation(fields)
    attention = read_attention(fields, default_kv_heads=32, default_head_dim=128)
    attention = msgspec.structs.replace(attention, qk_norm_eps=rms_norm_eps(fields))
    layers = with_windows(attention, qwen_windows(fields))
    return tuple(LayerSpec(attention=a, intermediate_size=inner, attention_bias=bias, activation=act) for a in layers)


FIELDS = frozenset({"use_sliding_window", "max_window_layers", "attention_bias"})

FAMILY = Family("qwen3", FIELDS, read_layers, LlamaBlock, activations=frozenset(ACTIVATIONS))
