"""Gemma 3: Gemma 2's block with QK-norm (by 1 + w), five layers with a sliding window for each with full attention, and a
rotary table for each of the two kinds; rotary scaling applies to full attention only.
"""

import msgspec

from quire.workers.models.config import LayerSpec, ModelConfigError, RopeConfig
from quire.workers.models.decoder import Family
from quire.workers.models.families.gemma2 import FIELDS as GEMMA_FIELDS
from quire.workers.models.families.gemma2 import GemmaBlock, gemma_layers, gemma_model, plain_fields, read_gemma_attention
from quire.workers.models.fields import (
    Json,
    read_rope,
    rms_norm_eps,
    size,
    sliding_window,
    with_windows,
)
from quire.workers.models.spellings import ACTIVATIONS, windows_but_every

# transformers' model ignores attn_logit_softcapping and _sliding_window_pattern, the multimodal one also
# final_logit_softcapping
FIELDS = GEMMA_FIELDS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"}
TYPES = frozenset({"full_attention", "sliding_attention"})
OF_ALL_TYPES = frozenset({"rope_parameters", "rope_scaling", "original_max_position_embeddings"})


def by_layer_type(fields: Json, head_dim: int, local: Json, theta: float) -> dict[bool, RopeConfig]:
    """Rotary embedding of layers with full attention (False) and with a sliding window (True).

    transformers 5 has both in rope_parameters; in older configs rope_scaling and rope_theta are for full attention, and layers
    with a window have `local`. theta: the default of rope_theta. Raises for fields that transformers ignores: parameters of no
    layer type, a `type` in rope_scaling without rope_type, and a truncate of false.
    """
    given, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if not isinstance(given, dict) or not isinstance(scaling, dict):
        raise ModelConfigError("config.json: rope_parameters and rope_scaling must be objects")
    if unknown := sorted(given.keys() - TYPES):
        raise ModelConfigError(
            f"config.json: rope_parameters sets {', '.join(unknown)} outside of full_attention and sliding_attention"
        )
    of_all, of_window = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    if not isinstance(of_all, dict) or not isinstance(of_window, dict):
        raise ModelConfigError("config.json: rope_parameters of a layer type must be an object")
    if "rope_type" not in scaling and scaling.get("type") not in (None, "default"):
        raise ModelConfigError("config.json: rope_scaling sets type: only rope_type is supported here")
    return {
        False: rope_of_type(fields, head_dim, {**of_all, **scaling}, theta),
        True: rope_of_type(fields, head_dim, {**local, **of_window}, 10000.0),
    }


def rope_of_type(fields: Json, head_dim: int, params: Json, theta: float = 10000.0) -> RopeConfig:
    """Rotary embedding by the parameters of a layer type. transformers reads no truncate there, and no
    original_max_position_embeddings outside of them."""
    if params.get("truncate") not in (None, True):
        raise ModelConfigError("config.json: rope_parameters of a layer type sets truncate to false: only true is supported")
    plain = {name: value for name, value in fields.items() if name not in OF_ALL_TYPES}
    return read_rope(plain, head_dim, params=params, theta=theta)


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    plain = {name: value for name, value in fields.items() if name not in ("rope_scaling", "rope_parameters")}
    attention = msgspec.structs.replace(
        read_gemma_attention(plain), softcap=0.0, qk_norm_eps=rms_norm_eps(fields), qk_norm_weighs="plus_one"
    )
    local = {"rope_theta": fields.get("rope_local_base_freq") or 10000.0}
    ropes = by_layer_type(fields, attention.head_dim, local, 1000000.0)
    every = size(fields, "sliding_window_pattern", 6)
    windows = windows_but_every(fields, sliding_window(fields), every)
    layers = [msgspec.structs.replace(a, rope=ropes[a.window > 0]) for a in with_windows(attention, windows)]
    return gemma_layers(fields, layers)


FAMILY = Family(
    "gemma3",
    FIELDS,
    read_layers,
    GemmaBlock,
    read_model=gemma_model,
    plain_fields=plain_fields,
    activations=frozenset(ACTIVATIONS),
)
