"""A checkpoint's tensors -> those of transformers' model, by transformers' own table of conversions.

Names change as they do in transformers. If several tensors become one, or one becomes several (stacked experts, joined layers),
they are kept until all have been read, and then transformers' operations make the model's. Called by model.py while
weights are loaded (loading/weights.py).
"""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import safetensors
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from quire.workers.layers.module import WeightOwner
from quire.workers.loading.checkpoint_tensor import CheckpointTensor
from quire.workers.loading.weight_loader import FLOATS, WeightLoader, WeightsError
from quire.workers.models.language_model import Fit
from quire.workers.models.transformers.skeleton import Model

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Several(WeightOwner):
    """Stands for several owners with tensors from one conversion: they are finished after all others."""


class Group:
    """Tensors that are converted together. It is the `then` of each of their loaders."""

    def __init__(self, convert: Convert, loaders: dict[str, WeightLoader]):
        self._convert, self._loaders = convert, loaders
        self._pieces: dict[str, list[torch.Tensor]] = {}

    def take(self, name: str, piece: torch.Tensor, row: int) -> None:
        self._pieces.setdefault(name, []).append(piece)

    def __call__(self) -> None:
        tensors = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in self._pieces.items()}
        self._pieces = {}
        for name, tensor in self._convert(tensors).items():
            loader = self._loaders[name]
            if not loader.fits(tuple(tensor.shape)):
                raise WeightsError(f"{name} is {list(tensor.shape)} after its conversion, expected {list(loader.shape)}")
            loader.write(tensor[loader.shard] if loader.shard else tensor, 0)


class Names:
    """The names of a model's tensors in checkpoints."""

    def __init__(self, model: Model, known: set[str]):
        """known: names of the model's tensors."""
        self._model, self._known = model, dict.fromkeys(known, True)
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        if any(name.endswith("position_ids") for name, _ in model.named_buffers()):
            ignored.append(r"(^|\.)position_ids$")  # present in older checkpoints
        self._ignored = [re.compile(pattern) for pattern in ignored]

    def converted(self, fit: Fit, tied: dict[str, str], transposed: set[str]) -> Fit:
        """`fit` with a loader for each of the checkpoint's tensors. transposed: tensors that our parameters hold transposed."""
        found: dict[str, CheckpointTensor] = {}
        # the model's name -> [(the checkpoint's name, pattern, tensor)]
        groups: dict[str, list[tuple[str, str, CheckpointTensor]]] = {}
        by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        for theirs in sorted(fit.tensors, key=dot_natural_key):
            name, pattern = self._renamed(theirs)
            if name not in self._known and any(pattern.search(theirs) for pattern in self._ignored):
                continue
            self._check_floats(theirs, name, pattern, fit.tensors[theirs])
            if pattern is not None and name in self._known:
                groups.setdefault(name, []).append((theirs, pattern, fit.tensors[theirs]))
            elif name in found:
                raise WeightsError(f"two tensors of the checkpoint are {name}: {found[name].name} and {theirs}")
            else:
                found[name] = fit.tensors[theirs]
        made = Fit(found, dict(fit.loaders), dict(fit.owners))
        _untie(made, tied)
        for name, members in groups.items():
            converter = copy.deepcopy(by_pattern[members[0][1]])
            self._add(made, [tensor for *_, tensor in members], *self._conversion(name, members, converter))
        for name in transposed & made.tensors.keys():
            tensor = made.tensors.pop(name)
            self._add(made, [tensor], {name}, partial(_turned, name))
        return made

    def _renamed(self, theirs: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(theirs, self._renamings, self._converters, prefix, self._known)
        if name not in self._known and theirs in self._known:
            return theirs, None
        return name, pattern

    def _check_floats(self, theirs: str, name: str, pattern: str | None, tensor: CheckpointTensor) -> None:
        """Raise WeightsError for tensors of a quantized layer that need a conversion: conversions support floats only."""
        layer = theirs.rpartition(".weight")[0] or theirs.rpartition(".")[0]
        if name in self._known:
            is_part = pattern is not None and tensor.dtype not in FLOATS
        else:
            weight, by = self._renamed(f"{layer}.weight")
            is_part = by is not None and weight in self._known
        if is_part:
            raise WeightsError(
                f"quantization_config: {layer} is quantized, one of several layers that transformers' model has in one tensor "
                "(experts mostly): supported there are floats"
            )

    def _conversion(
        self, name: str, members: list[tuple[str, str, CheckpointTensor]], converter: Any
    ) -> tuple[set[str], Convert]:
        """The names of the model's tensors that a group makes, and the function that makes them."""
        order = [(theirs, pattern) for theirs, pattern, _ in members]

        def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            made = copy.deepcopy(converter)
            for theirs, pattern in order:
                made.collected_tensors.setdefault(pattern, []).append(tensors[theirs])
            out = made.convert(name, model=self._model, config=self._model.config)
            return {key: value[0] if isinstance(value, list) else value for key, value in out.items()}

        shapes = {theirs: torch.empty(tensor.shape, device="meta") for theirs, _, tensor in members}
        try:
            names = set(convert(shapes))
        except Exception as error:  # transformers' operations may raise anything on a checkpoint's tensors
            raise WeightsError(f"{name} cannot be made of {members[0][0]}: {type(error).__name__}: {error}") from None
        return names, convert

    def _add(self, fit: Fit, members: list[CheckpointTensor], names: set[str], convert: Convert) -> None:
        """Add loaders that gather the members. The tensors made of them go to the loaders of `names`, not in the checkpoint."""
        if missing := sorted(names - fit.loaders.keys()):
            raise WeightsError(f"a conversion gives {missing[0]}, which the model does not have")
        loaders = {name: fit.loaders.pop(name) for name in names}
        owners = {fit.owners.pop(name) for name in names}
        group = Group(convert, loaders)
        owner = owners.pop() if len(owners) == 1 else Several()
        for other in owners:
            for name in [name for name, theirs in fit.owners.items() if theirs is other]:
                fit.owners[name] = Several()
        for tensor in members:
            fit.tensors[tensor.name] = tensor
            write = partial(group.take, tensor.name)
            fit.loaders[tensor.name] = WeightLoader(tensor.shape, (), FLOATS, write, then=group)
            fit.owners[tensor.name] = owner


def _turned(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    [tensor] = tensors.values()
    return {name: tensor.t()}


def _untie(fit: Fit, tied: dict[str, str]) -> None:
    """A checkpoint may contain either of two tied tensors, or both with equal values: keep one."""
    for name, other in tied.items():
        tensor = fit.tensors.pop(name, None)
        if tensor is None:
            continue
        if other not in fit.tensors:
            fit.tensors[other] = tensor
        elif not torch.equal(_read(tensor), _read(fit.tensors[other])):
            raise WeightsError(
                f"config.json ties {name} to {other}, but the checkpoint holds both, which differ: "
                "set tie_word_embeddings to false"
            )


def _read(tensor: CheckpointTensor) -> torch.Tensor:
    with safetensors.safe_open(tensor.file, framework="pt", device="cpu") as tensors:
        return tensors.get_tensor(tensor.name)  # type: ignore[no-any-return]
