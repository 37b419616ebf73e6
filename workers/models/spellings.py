"""config.json in a family's own spelling -> the names and defaults that fields.py reads, for a family's `plain_fields`.

Also readers that several families share: activations, and windows that follow a pattern.
"""

from collections.abc import Mapping
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
    """The activation of hidden_act, which refuse_unknown has checked."""
    return ACTIVATIONS[fields.get("hidden_act") or default]


def renamed(fields: Json, names: Mapping[str, str], defaults: Mapping[str, Any]) -> Json:
    """Fields renamed by `names`, with `defaults` of absent ones. A field under the name that fields.py reads has precedence."""
    others = {names[name]: value for name, value in fields.items() if name in names}
    return {**defaults, **others, **{name: value for name, value in fields.items() if name not in names}}


def windows_but_every(fields: Json, window: int, every: int) -> tuple[int, ...]:
    """Windows by layer_types; without them, layers with a number, from 1, that is a multiple of `every` have full attention."""
    num_layers = size(fields, "num_hidden_layers")
    if fields.get("layer_types") is None:
        types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
        fields = {**fields, "layer_types": types}
    return windows_by_type(fields, window) or ()


def only(fields: Json, family: str, **allowed: Any) -> None:
    """Raise ModelConfigError if one of these fields is set to another value than the one that is implemented."""
    for name, value in allowed.items():
        found = fields.get(name)
        if found is not None and found != value:
            raise ModelConfigError(f"config.json sets {name} to {found!r:.60}: only {value!r} is supported for {family} models")


def plain_rotation(fields: Json) -> Json:
    """The fields without sections of the rotation: the three positions of a token of text are equal, so they change nothing."""
    found = dict(fields)
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(params := found.get(name), dict) or not {"mrope_section", "mrope_interleaved"} & params.keys():
            continue
        params = {key: value for key, value in params.items() if key not in ("mrope_section", "mrope_interleaved")}
        found[name] = {key: "default" if value == "mrope" else value for key, value in params.items()}
    return found
