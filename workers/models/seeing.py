"""A config of a wrapper's text model -> the same with the wrapper's encoder, for models that take items beside text.

The table of these models is media/spec.py. Called by family_table.py, unless the model is served for its text alone.
"""

import json

import msgspec

from quire.ipc.text_config import nested_text
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import LayerSpec, ModelConfig
from quire.workers.models.fields import Json
from quire.workers.models.media.spec import SEES, Axes, MediaSpec, Sees, axes_of

TOWER = "tower."  # before the names of the encoder's tensors in the model


def seeing(fields: Json, config: ModelConfig) -> ModelConfig:
    """The config with its MediaSpec; the same config if the architecture is not in the table, or has no encoder."""
    names = fields.get("architectures")
    sees = SEES.get(str(names[0])) if isinstance(names, list) and names else None
    if sees is None or not isinstance(fields.get("vision_config"), dict) or config.transformers_config is not None:
        return config
    text = nested_text(fields) or fields
    axes, pad = axes_of(text, sees.axes), text.get("pad_token_id")
    pad = pad if type(pad) is int else 0
    spec = MediaSpec(kinds=("image",), config=json.dumps(fields), modules=sees.modules, axes=axes, pad_token_id=pad)
    layers = config.layers if axes is None else tuple(_with_axes(layer, axes) for layer in config.layers)
    layers = tuple(_with_sight(layer, sees.sees_ahead(text, layer.attention.window)) for layer in layers)
    return msgspec.structs.replace(config, media=spec, layers=layers, names=_with_tower(config.names, sees))


def _with_axes(layer: LayerSpec, axes: Axes) -> LayerSpec:
    attention = layer.attention
    if attention.rope is None:
        return layer
    pairs = axes.of_pairs((attention.rope.rotary_dim or attention.head_dim) // 2)
    rope = msgspec.structs.replace(attention.rope, axes=tuple(pairs))
    return msgspec.structs.replace(layer, attention=msgspec.structs.replace(attention, rope=rope))


def _with_sight(layer: LayerSpec, sees_ahead: bool) -> LayerSpec:
    return msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, sees_ahead=sees_ahead))


def _with_tower(names: CheckpointNames, sees: Sees) -> CheckpointNames:
    """The names of a checkpoint of which the encoder's tensors are read, too."""
    renamed = (*sees.renamed, *((f"{module}.", f"{module}.") for module in sees.modules))
    prefixes = tuple((f"{prefix}{theirs}", TOWER + ours) for theirs, ours in renamed for prefix in ("model.", ""))
    own = [theirs for theirs, _ in prefixes]
    ignored = tuple(name for name in names.ignored if name not in own)
    return names._replace(prefixes=(*prefixes, *names.prefixes), ignored=ignored)
