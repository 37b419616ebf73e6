"""A task's adapter in PEFT's format, in a folder of the checkpoint, added to the weights while they load: jina-embeddings-v5.

    W' = W + scale · B A        B [out, r], A [r, in], scale lora_alpha / r, or lora_alpha / sqrt(r) of use_rslora

adapter_config.json is read strictly: what would change a weight in another way is refused.
"""

import json
from pathlib import Path
from typing import Any

from quire.workers.loading.files import open_file
from quire.workers.loading.merging import adding
from quire.workers.loading.names import CheckpointNames
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.language_model import Fit

WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
# fields that must have these values, if they are there; others do not change how a layer's adapter is added
_FIXED = {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "use_dora": False, "modules_to_save": None}
_EMPTY = ("rank_pattern", "alpha_pattern", "layer_replication", "megatron_config", "trainable_token_indices")


def with_task(fit: Fit, folder: Path, names: CheckpointNames) -> Fit:
    """The fit with loaders of weights that add the adapter in `folder`. Raises WeightsError."""
    scale, loaders = _scale(folder), dict(fit.loaders)
    with open_file(folder / WEIGHTS) as file:
        found = set(file.keys())
        for name in sorted(found):
            if not name.startswith(PREFIX) or not name.endswith((A, B)) or _other(name) not in found:
                raise WeightsError(f"{folder / WEIGHTS}: {name} is no part of an adapter of a layer")
        for name in (name for name in found if name.endswith(A)):
            layer = name.removeprefix(PREFIX).removesuffix(A)
            weight = names.in_model(f"{layer}.weight")
            left, right = file.get_tensor(_other(name)).float(), file.get_tensor(name).float()
            shape = left.shape[0], right.shape[-1]
            if weight not in loaders or loaders[weight].shape != shape or left.shape[1] != right.shape[0]:
                raise WeightsError(f"{folder / WEIGHTS}: the adapter of {layer} does not fit the model")
            loaders[weight] = adding(loaders[weight], left * scale, right)
    return fit._replace(loaders=loaders)


def _other(name: str) -> str:
    return name.removesuffix(A) + B if name.endswith(A) else name.removesuffix(B) + A


def _scale(folder: Path) -> float:
    try:
        fields: Any = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{folder / CONFIG} cannot be read: {error}") from None
    rank = fields.get("r") if isinstance(fields, dict) else None
    alpha = fields.get("lora_alpha") if isinstance(fields, dict) else None
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise WeightsError(f"{folder / CONFIG} lacks r or lora_alpha")
    odd = [name for name, value in _FIXED.items() if fields.get(name, value) not in (value, None)]
    if odd := odd + [name for name in _EMPTY if fields.get(name)]:
        raise WeightsError(f"{folder / CONFIG} sets {', '.join(odd)}: such adapters are not merged")
    return float(alpha / (rank**0.5 if fields.get("use_rslora") else rank))
