"""The files of a checkpoint and the tensors in them, from the files' headers; no values are read here.

Pickled checkpoints (.bin, .pt) are refused, because reading one runs its author's code; those of pooling models are read by
torch_file.py, which unpickles nothing. weights.py reads values, stages.py counts bytes, and models/family_table.py asks which
layers of a quantized checkpoint are plain.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any, Literal

import safetensors

from quire.ipc.weights_file import weights_file
from quire.workers.loading.checkpoint_tensor import CheckpointTensor
from quire.workers.loading.names import CheckpointNames
from quire.workers.loading.torch_file import TorchFile
from quire.workers.loading.weight_loader import FLOATS, WeightsError

TABLES = ("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight")
SHORT_DTYPES: dict[str, Literal["bfloat16", "float16"]] = {"BF16": "bfloat16", "F16": "float16"}
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
SCALES_OF_ALL = (".experts.gate_up_proj_scale_inv", ".experts.down_proj_scale_inv")


def checkpoint_files(model_dir: Path, torch_files: bool = False) -> list[Path]:
    """The safetensors files of a folder: those that its index names, or the single one. Raises WeightsError.

    torch_files: without safetensors, those of torch.save.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    if (single := weights_file(model_dir)) is not None:
        return [single]
    if torch_files and (index := model_dir / "pytorch_model.bin.index.json").exists():
        return _indexed_files(index, ".bin")
    if torch_files and (pickled := model_dir / "pytorch_model.bin").exists():
        return [pickled]
    if any(path.suffix in PICKLED for path in model_dir.iterdir()):
        raise WeightsError(
            f"{model_dir} holds pickled weights (.bin, .pt) only. Quire reads safetensors, because unpickling runs code "
            "from the file; convert the checkpoint first (transformers' save_pretrained writes safetensors)."
        )
    raise WeightsError(f"{model_dir} holds no model.safetensors and no model.safetensors.index.json")


def _indexed_files(index: Path, suffix: str = ".safetensors") -> list[Path]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsError(f"{index} is not a {suffix.removeprefix('.')} index") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(suffix):
            raise WeightsError(f"{index} names {name!r}, which is not a {suffix.removeprefix('.')} file of the same folder")
        if not os.path.exists(index.parent / name):  # False also for a name that is not valid for a file
            raise WeightsError(f"{index} names {name}, which is not there: the download may be incomplete")
    return [index.parent / name for name in names]


def open_file(file: Path) -> Any:
    if file.suffix in PICKLED:
        return TorchFile(file)
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read as safetensors: {error}") from None


def checkpoint_tensors(model_dir: Path, names: CheckpointNames) -> dict[str, CheckpointTensor]:
    """The tensors in a folder's files, by their names in the model. Raises WeightsError."""
    tensors: dict[str, CheckpointTensor] = {}
    for file in checkpoint_files(model_dir, names.torch_files):
        with open_file(file) as opened:
            for theirs in opened.keys():  # noqa: SIM118 - not a dict
                name = names.in_model(theirs)
                if names.is_ignored(theirs) or names.is_ignored(name) or not name.startswith(names.only):
                    continue
                values = opened.get_slice(theirs)
                if name in tensors:
                    raise WeightsError(f"tensor {name} is in {tensors[name].file.name} and in {file.name}")
                tensors[name] = CheckpointTensor(file, theirs, tuple(values.get_shape()), values.get_dtype())
    return _with_scales_apart(tensors, names)


def _with_scales_apart(tensors: dict[str, CheckpointTensor], names: CheckpointNames) -> dict[str, CheckpointTensor]:
    """Split the scales of fp8 experts: transformers saves experts one by one, but their scales as gate_up's and down's."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(SCALES_OF_ALL) or name.removesuffix("_scale_inv") in tensors or len(tensor.shape) != 3:
            continue
        experts = name.rpartition(".")[0]
        kinds = ("down_proj",) if name.endswith(SCALES_OF_ALL[1]) else ("gate_proj", "up_proj")
        height, rest = divmod(tensor.shape[1], len(kinds))
        if rest:
            continue
        del found[name]
        for expert, (i, kind) in itertools.product(range(tensor.shape[0]), enumerate(kinds)):
            one = tensor._replace(shape=(height, tensor.shape[2]), within=(expert, slice(i * height, (i + 1) * height)))
            found[names.in_model(f"{experts}.{expert}.{kind}.weight_scale_inv")] = one
    return found


class CheckpointLayers:
    """The layers that a folder holds, and which of them are floats. A layer may be given by any of its names.

    Raises WeightsError for files that cannot be read.
    """

    def __init__(self, model_dir: Path, names: CheckpointNames):
        tensors, self._names = checkpoint_tensors(model_dir, names), names
        self._count = len(tensors)
        self._layers = {name.rpartition(".")[0] for name in tensors}
        self._floats = {name for name, tensor in tensors.items() if tensor.dtype in FLOATS}

        tables = {tensor.dtype for name, tensor in tensors.items() if name.endswith(TABLES)}
        self.table_dtype = SHORT_DTYPES.get(tables.pop()) if len(tables) == 1 else None

    @property
    def are_all_plain(self) -> bool:
        return len(self._floats) == self._count

    def holds(self, layer: str) -> bool:
        return self._names.in_model(f"{layer}.").removesuffix(".") in self._layers

    def is_plain(self, layer: str) -> bool:
        """Whether the layer's weight is floats, in its own tensor or in one of all experts."""
        expert, _, kind = layer.rpartition(".")
        experts, _, number = expert.rpartition(".")
        stacked = (f"{experts}.gate_up_proj", f"{experts}.{kind}") if number.isdecimal() else (layer,)
        return any(self._names.in_model(tensor) in self._floats for tensor in (f"{layer}.weight", *stacked))
