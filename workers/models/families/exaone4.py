"""EXAONE 4: norms after the sublayers, x += norm(attention(x)); x += norm(mlp(x)), and an RMSNorm of each head of q and k. In
the 32B model layers have a sliding window and rotation, except for every fourth, which has full attention without rotation.
Without windows all layers rotate. The block is OLMo 2's (olmo2.py).
"""

import msgspec

from quire.workers.layers.norm import NormSpec
from quire.workers.models.config import LayerSpec, ModelConfigError, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.olmo2 import OlmoBlock
from quire.workers.models.fields import Json, number, read_attention, size, sliding_window, windows_by_type
from quire.workers.models.spellings import ACTIVATIONS, activation

FIELDS = frozenset({"sliding_window_pattern", "attn_reorder_and_upcast"})


def _windows(fields: Json, window: int) -> tuple[int, ...]:
    """Windows by layer_types, or by sliding_window_pattern: a number (multiples have full attention), or letters L and G."""
    num_layers, pattern = size(fields, "num_hidden_layers"), fields.get("sliding_window_pattern", 4)
    if (by_type := windows_by_type(fields, window)) is not None:
        return by_type
    if not window or pattern is None:
        return (0,) * num_layers
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        sees = [pattern[i % len(pattern)] == "L" and i < num_layers - 1 for i in range(num_layers)]
        return tuple(window if local else 0 for local in sees)
    if type(pattern) is not int or pattern < 1:
        raise ModelConfigError(f"config.json: sliding_window_pattern must be a number or like LLLG, not {pattern!r:.40}")
    return tuple(window if (i + 1) % pattern else 0 for i in range(num_layers))


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    window, replace = sliding_window(fields), msgspec.structs.replace
    eps = number(fields, "rms_norm_eps", 1e-5)
    attention = replace(read_attention(fields, default_kv_heads=32), qk_norm_eps=eps)
    return tuple(
        LayerSpec(
            attention=replace(attention, window=own, rope=attention.rope if own or not window else None),
            intermediate_size=size(fields, "intermediate_size"),
            activation=activation(fields),
        )
        for own in _windows(fields, window)
    )


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=number(fields, "rms_norm_eps", 1e-5)))


FAMILY = Family("exaone4", FIELDS, read_layers, OlmoBlock, read_model, activations=frozenset(ACTIVATIONS))
