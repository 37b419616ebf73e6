"""Readers of config.json's fields of Mamba 2 layers, besides those of fields.py. All raise ModelConfigError."""

import math
from typing import Any

from quire.workers.models.config import ModelConfigError
from quire.workers.models.fields import Json, flag, size, words
from quire.workers.models.mamba2 import MambaSpec

MAMBA, ATTENTION = "linear_attention", "full_attention"  # names of layers' kinds in transformers 5
OLD_KINDS = {"mamba": MAMBA, "attention": ATTENTION}  # and in 4

# Read by families with Bamba's names; the last say how other code computes.
BAMBA_FIELDS = words(
    "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_conv_bias mamba_proj_bias",
    "time_step_limit mamba_chunk_size use_mamba_kernels",
)


def mixers(fields: Json, name: str) -> list[str]:
    """MAMBA or ATTENTION for each layer; all are MAMBA if config.json does not say. name: of the field."""
    types, num_layers = fields.get(name), size(fields, "num_hidden_layers")
    if types is None:
        return [MAMBA] * num_layers
    known = {**OLD_KINDS, **{kind: kind for kind in OLD_KINDS.values()}}
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise ModelConfigError(f"config.json: {name} must list one of {', '.join(known)} for each of {num_layers} layers")
    return [known[kind] for kind in types]


def read_time_step_limit(fields: Json) -> tuple[float, float]:
    """The least and the greatest step. Infinity is a number of Python's JSON, or
    {"__float__": "Infinity"}; a process that passes a config on in strict JSON writes null."""
    value = fields.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    if not isinstance(value, list) or len(value) != 2:
        raise ModelConfigError(f"config.json: time_step_limit must be a list of two numbers, not {value!r:.80}")
    low, high = _number(value[0]), math.inf if value[1] is None else _number(value[1])
    if not 0.0 <= low < high:
        raise ModelConfigError(f"config.json: time_step_limit must be two numbers, the lesser first, not {value!r:.80}")
    return low, high


def _number(value: Any) -> float:
    if isinstance(value, dict) and value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "inf"):
        return math.inf
    return float(value) if type(value) in (int, float) else math.nan


def check_time_step_limit(fields: Json) -> None:
    """Raise for a time_step_limit that limits anything."""
    if read_time_step_limit(fields) != (0.0, math.inf):
        raise ModelConfigError(
            f"config.json sets time_step_limit to {fields['time_step_limit']!r:.80}: only [0.0, Infinity] is supported"
        )


def check_groups(spec: MambaSpec) -> MambaSpec:
    """The spec. Raises ModelConfigError if its sizes do not fit together."""
    if spec.num_heads % spec.num_groups:
        raise ModelConfigError(f"config.json: {spec.num_heads} Mamba heads are not a multiple of {spec.num_groups} groups")
    if spec.window < 2:
        raise ModelConfigError("config.json: a Mamba layer's convolution must see at least 2 tokens")
    return spec


def read_mamba(fields: Json, inner: int | None = None) -> MambaSpec:
    """A layer by Bamba's names. inner: elements of all heads, if that is not mamba_expand times the hidden size."""
    inner = size(fields, "mamba_expand", 2) * size(fields, "hidden_size") if inner is None else inner
    num_heads, head_dim = size(fields, "mamba_n_heads", 128), fields.get("mamba_d_head")
    head_dim = inner // num_heads if head_dim in (None, "auto") else size(fields, "mamba_d_head")
    if num_heads * head_dim != inner:
        raise ModelConfigError(
            f"config.json: mamba_n_heads {num_heads} times mamba_d_head {head_dim} is not the layers' size {inner}"
        )
    bias = flag(fields, "mamba_proj_bias")
    dt_min, dt_max = read_time_step_limit(fields)
    return check_groups(
        MambaSpec(
            num_heads=num_heads,
            head_dim=head_dim,
            num_groups=size(fields, "mamba_n_groups", 1),
            state_size=size(fields, "mamba_d_state", 256),
            window=size(fields, "mamba_d_conv", 4),
            has_conv_bias=flag(fields, "mamba_conv_bias", True),
            in_bias=bias,
            out_bias=bias,
            dt_min=dt_min,
            dt_max=dt_max,
        )
    )
