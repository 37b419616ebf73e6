"""Mistral: Llama's block without biases. All layers have a sliding window (Mistral 7B v0.1) or full attention (later ones)."""

from quire.workers.models.config import LayerSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.llama import LlamaBlock
from quire.workers.models.fields import Json, read_attention, size, sliding_window, uniform_windows, with_windows
from quire.workers.models.spellings import ACTIVATIONS, activation


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    inner, act = size(fields, "intermediate_size"), activation(fields)
    windows = uniform_windows(fields, "mistral", sliding_window(fields))
    layers = with_windows(read_attention(fields, default_kv_heads=8), windows)
    return tuple(LayerSpec(attention=attention, intermediate_size=inner, activation=act) for attention in layers)


FAMILY = Family("mistral", frozenset(), read_layers, LlamaBlock, activations=frozenset(ACTIVATIONS))
