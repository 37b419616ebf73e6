"""Which layers each stage of a model has: consecutive ones, dealt out by their bytes, embedding and head counted.

All ranks compute the same from the model's configuration alone. Called by a worker before it builds its part.
"""

import torch

from quire.ipc.layout import split_layers
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.parallel import Parallel, Stage


def stage_of(config: ModelConfig, dtype: torch.dtype, index: int, count: int) -> Stage:
    """Stage `index` of `count`. Raises ModelConfigError for more stages than layers, and for a model that cannot be cut."""
    if count == 1:
        return Stage()
    num_layers = len(config.layers)
    if count > num_layers:
        layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
        raise ModelConfigError(f"--pipeline-parallel-size {count}: the model has {layers}, and each stage needs one at least")
    if config.transformers_config is not None:
        raise ModelConfigError("--model-impl transformers runs a model in one piece: --pipeline-parallel-size 1")
    first, layers_bytes, last = module_bytes(config, dtype)
    return Stage(index, count, split_layers(first, layers_bytes, last, count)[index])


def module_bytes(config: ModelConfig, dtype: torch.dtype) -> tuple[int, list[int], int]:
    """Bytes of the parameters before the layers, of each layer, and behind them; a table tied to the head is in both ends."""
    model = build_model(config, dtype, Parallel(device="meta"))
    layers, ends = [0] * len(config.layers), {"embed": 0, "head": 0}
    for name, parameter in model.named_parameters():
        num_bytes = parameter.numel() * parameter.element_size()
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            layers[int(parts[2])] += num_bytes
        else:
            ends["embed" if parts[1].startswith("embed") else "head"] += num_bytes
    if config.tie_word_embeddings:
        ends["head"] += ends["embed"]
    return ends["embed"], layers, ends["head"]
