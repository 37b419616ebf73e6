"""A config of a wrapper's text model -> the same with the wrapper's encoder, for models that take items beside text.

The table of these models is media/spec.py. Called by family_table.py, unless the model is served for its text alone.
"""

import json

import msgspec

from quire.ipc.text_config import nested_text
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import LayerSpec, ModelConfig
from quire.workers.models.fields import Json
from quire.workers.models.media.spec import SEES, Axes, MediaSpec, axes_of

TOWER = "tower."  # before the names of the encoder's tensors in the model


def seeing(fields: Json, config: ModelConfig) -> ModelConfig:
    """The config with its MediaSpec; the same config if the architecture is not in the table, or has no encoder."""
    names = fields.get("architectures")
    sees = SEES.get(str(names[0])) if isinstance(names, list) and names else None
    if sees is None or not isinstance(fields.get("vision_config"), dict) or config.transformers_config is not None:
        return config
    axes = axes_of(nested_text(fields) or fields, sees.axes)
    spec = MediaSpec(kinds=("image",), config=json.dumps(fields), modules=sees.modules, axes=axes)
    layers = config.layers if axes is None else tuple(_with_axes(layer, axes) for layer in config.layers)
    return msgspec.structs.replace(config, media=spec, layers=layers, names=_with_tower(config.names, sees.modules))


def _with_axes(layer: LayerSpec, axes: Axes) -> LayerSpec:
    attention = layer.attention
    if attention.rope is None:
        return layer
    pairs = axes.of_pairs((attention.rope.rotary_dim or attention.head_dim) // 2)
    rope = msgspec.structs.replace(attention.rope, axes=tuple(pairs))
    return msgspec.structs.replace(layer, attention=msgspec.structs.replace(attention, rope=rope))


def _with_tower(names: CheckpointNames, modules: tuple[str, ...]) -> CheckpointNames:
    """The names of a checkpoint of which the encoder's tensors are read, too."""
    own = tuple(f"{prefix}{module}." for module in modules for prefix in ("model.", ""))
    prefixes = tuple((name, TOWER + name.removeprefix("model.")) for name in own)
    ignored = tuple(name for name in names.ignored if name not in own)
    return names._replace(prefixes=(*prefixes, *names.prefixes), ignored=ignored)
