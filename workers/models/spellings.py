"""config.json in a family's own spelling -> the names and defaults that fields.py reads: a family's `plain_fields`.

Also what families name alike: activations, and which layers see a window where a pattern says it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from quire.kernels.elementwise.activation_cpu import Activation
from quire.workers.models.config import ModelConfigError
from quire.workers.models.fields import Json, size, windows_by_type

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


def activation(fields: Json, default: str = "silu") -> Activation:
    """Of hidden_act, whose values refuse_unknown has seen."""
    return ACTIVATIONS[fields.get("hidden_act") or default]


def renamed(fields: Json, names: Mapping[str, str], defaults: Mapping[str, Any]) -> Json:
    """Fields by other names, and transformers' defaults of absent ones; a field by the name that fields.py reads goes first."""
    others = {names[name]: value for name, value in fields.items() if name in names}
    return {**defaults, **others, **{name: value for name, value in fields.items() if name not in names}}


def text_config(fields: Json, ignored: Collection[str]) -> Json:
    """The text part of a multimodal model's config, with what stands beside it, but for the `ignored`, which are of images.

    A field that both have is the text's, and `architectures` the whole model's.
    """
    text = fields.get("text_config")
    if not isinstance(text, dict):
        raise ModelConfigError("config.json lacks text_config, or it is not an object")
    beside = {name: value for name, value in fields.items() if name not in ignored and name != "text_config"}
    return {**beside, **text, "architectures": fields.get("architectures")}


def windows_but_every(fields: Json, window: int, every: int) -> tuple[int, ...]:
    """Windows by layer_types; without them, every layer whose number is a multiple of `every`, counted from 1, sees all."""
    num_layers = size(fields, "num_hidden_layers")
    if fields.get("layer_types") is None:
        types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
        fields = {**fields, "layer_types": types}
    return windows_by_type(fields, window) or ()


def only(fields: Json, family: str, **allowed: Any) -> None:
    """Raise for a field of the family's that is set to anything else than this, which is all that is implemented."""
    for name, value in allowed.items():
        found = fields.get(name)
        if found is not None and found != value:
            raise ModelConfigError(f"config.json sets {name} to {found!r:.60}: only {value!r} is supported for {family} models")
