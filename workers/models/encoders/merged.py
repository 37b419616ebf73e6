"""Adapters that a checkpoint holds beside its weights, merged into these while they load: jina-embeddings-v3's, one a server.

    W' = W + scale · B A        a product: B [tasks, out, r], A [tasks, r, in]
    W' = W + scale · A B        a table:   A [tasks, rows, r], B [tasks, r, H]

merging.py adds them as the weights are read.
"""

import torch

from quire.workers.loading.files import open_file
from quire.workers.loading.merging import adding
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.config import MergedAdapter
from quire.workers.models.language_model import Fit

A, B = ".lora_A", ".lora_B"


def merged(fit: Fit, adapter: MergedAdapter) -> Fit:
    """The fit without the adapters' tensors, whose loaders of weights add one task's. Raises WeightsError."""
    tensors, loaders = dict(fit.tensors), dict(fit.loaders)
    for name in [name for name in fit.tensors if name.endswith(A)]:
        layer = name.removesuffix(A)
        left, right = _pair(fit, layer, adapter.task)
        weight = f"{layer}.weight"
        if weight not in loaders or (len(left), right.shape[1]) != loaders[weight].shape:
            raise WeightsError(f"the adapter {name} does not fit the model")
        loaders[weight] = adding(loaders[weight], left * adapter.scale, right)
        del tensors[name], tensors[layer + B]
    return fit._replace(tensors=tensors, loaders=loaders)


def _pair(fit: Fit, layer: str, task: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors [rows, r] and [r, columns] of what is added, float32."""
    found = []
    for name in (layer + A, layer + B):
        if (tensor := fit.tensors.get(name)) is None or len(tensor.shape) != 3 or tensor.shape[0] <= task:
            raise WeightsError(f"the adapter {name} is missing or has no task {task}")
        with open_file(tensor.file) as file:
            found.append(file.get_tensor(tensor.name)[task].float())
    a, b = found
    return (b, a) if a.shape[0] == b.shape[1] else (a, b)
