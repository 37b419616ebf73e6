"""Which layers each stage of a model has: consecutive ones of about equal bytes, with embedding and head counted.

Every rank computes this from the model's configuration (if quantized, also its checkpoint), with the same result. Called by a
worker before it builds its model.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from quire.ipc.layout import split_layers
from quire.workers.loading.files import checkpoint_tensors
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.parallel import Parallel, Stage


def stage_of(config: ModelConfig, dtype: torch.dtype, index: int, count: int, checkpoint: Path | None = None) -> Stage:
    """Stage `index` of `count`. checkpoint: the checkpoint's folder; the bytes of its tensors count if it is quantized.

    Raises ModelConfigError for more stages than layers and for a model that cannot be split, WeightsError for no checkpoint.
    """
    if count == 1:
        return Stage()
    num_layers = len(config.layers)
    if count > num_layers:
        layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
        raise ModelConfigError(f"--pipeline-parallel-size {count}: the model has {layers}, and each stage needs one at least")
    if config.transformers_config is not None:
        raise ModelConfigError("--model-impl transformers runs a model in one piece: --pipeline-parallel-size 1")
    if checkpoint is not None and config.quantization is not None:
        first, layers_bytes, last = stored_bytes(config, checkpoint)
    else:
        first, layers_bytes, last = module_bytes(config, dtype)
    return Stage(index, count, split_layers(first, layers_bytes, last, count)[index])


def module_bytes(config: ModelConfig, dtype: torch.dtype) -> tuple[int, list[int], int]:
    """Bytes of the parameters before the layers, of each layer, and after them; an embedding tied to the head counts twice."""
    model = build_model(config, dtype, Parallel(device="meta"))
    sizes = ((name, parameter.numel() * parameter.element_size()) for name, parameter in model.named_parameters())
    return _by_place(config, sizes)


def stored_bytes(config: ModelConfig, checkpoint: Path) -> tuple[int, list[int], int]:
    """The same of a checkpoint's tensors as they are packed."""
    tensors = checkpoint_tensors(checkpoint, config.names)
    return _by_place(config, ((name, tensor.num_bytes) for name, tensor in tensors.items()))


def _by_place(config: ModelConfig, sizes: Iterable[tuple[str, int]]) -> tuple[int, list[int], int]:
    layers, embed, head = [0] * len(config.layers), 0, 0
    for name, num_bytes in sizes:
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if layer != name and layer.isdecimal() and int(layer) < len(layers):
            layers[int(layer)] += num_bytes
        elif name.startswith("model.embed"):
            embed += num_bytes
        else:
            head += num_bytes
    return embed, layers, head + embed if config.tie_word_embeddings else head
