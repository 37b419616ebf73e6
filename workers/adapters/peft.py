"""Reads and checks a LoRA adapter as PEFT saves it: a folder with `adapter_config.json` and `adapter_model.safetensors`.

`read_adapter` reads the config and the header of the tensors' file, never the tensors. The result says for each layer where
A and B lie in the file; a worker reads those bytes (slots.py) after it has checked that the file is still the same. Names are
the checkpoint's; whether the model has such layers, and of these shapes, the workers know. No torch. Regular expressions of the
adapter's author run here, so the engine calls this in a child with a time limit.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import msgspec

from quire.ipc.adapters import AdapterError, AdapterFile, AdapterLimits, AdapterPart, AdapterPlan, AdapterTensor
from quire.workers.adapters.peft_config import PeftConfig, parse_config

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES, MAX_HEADER_BYTES = 1 << 20, 16 << 20
MAX_TENSORS = 1 << 17
MAX_NAME_CHARS = 512
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
PREFIX = "base_model.model."
BASE_WEIGHT = ".base_layer.weight"
# suffix of a tensor's name -> (the key of its half, whether the layer is an embedding)
HALVES = {
    ".lora_A.weight": ("a", False),
    ".lora_B.weight": ("b", False),
    ".lora_embedding_A": ("a", True),
    ".lora_embedding_B": ("b", True),
}
EXPERTS = re.compile(r"(?:^|\.)experts(?:\.base_layer)?$")  # the parameters of all experts, by PEFT's target_parameters


class _Halves(NamedTuple):
    """A layer's tensors, as far as they were met."""

    is_embedding: bool
    tensors: dict[str, AdapterTensor]  # "a", "b"


def read_adapter(folder: str | Path, limits: AdapterLimits) -> AdapterPlan:
    """Read an adapter's folder. Raises AdapterError, which names the file, the field or the tensor.

    Whether the folder may be read at all (`limits.dirs`) is the caller's question. Both files may be links within the folder,
    or into the store of a Hugging Face cache that the folder belongs to; links elsewhere are refused.
    """
    folder = Path(folder).resolve()
    config_file = _opened(folder, CONFIG)
    with os.fdopen(config_file, "rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG} is larger than {MAX_CONFIG_BYTES} bytes")
    config = parse_config(data)
    descriptor = _opened(folder, WEIGHTS)
    try:
        identity = identity_of(descriptor, str(folder))
        tensors = _tensors(descriptor, identity.size)
        if identity_of(descriptor, str(folder)) != identity:
            raise AdapterError(f"{WEIGHTS} changed while it was read")
    finally:
        os.close(descriptor)
    parts = list(_parts(tensors, config, limits))
    if not parts:
        raise AdapterError(f"{WEIGHTS} has no tensors")
    return AdapterPlan(identity, parts, config.base_model, config.invocation_tokens, config.peft_version)


def open_weights(folder: str) -> int:
    """A descriptor of the adapter's tensors. Raises AdapterError."""
    return _opened(Path(folder), WEIGHTS)


def identity_of(descriptor: int, folder: str) -> AdapterFile:
    """The version of the open file: two equal ones are the same bytes."""
    found = os.fstat(descriptor)
    return AdapterFile(folder, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _opened(folder: Path, name: str) -> int:
    """A descriptor of a regular file of the folder; a FIFO or a device is never waited for."""
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        if name == WEIGHTS and (folder / PICKLED).exists():
            raise AdapterError(f"{PICKLED} is not read: save the adapter as {WEIGHTS}") from None
        raise AdapterError(f"the folder has no {name}") from None
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise AdapterError(f"{name} is a link to a file outside of the adapter's folder")
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise AdapterError(f"{name} cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterError(f"{name} is not a regular file")
    return descriptor


def _roots(folder: Path) -> list[Path]:
    """The folders in which its files may really lie. A Hugging Face cache has links from snapshots/REVISION/ to blobs/."""
    return [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]


# ------------------------------------------------------------------------------------------------------------ safetensors
def _tensors(descriptor: int, size: int) -> list[AdapterTensor]:
    """All tensors of a safetensors file of `size` bytes, checked against it."""
    length = int.from_bytes(_read(descriptor, 8, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(f"{WEIGHTS}: its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
    if 8 + length > size:
        raise AdapterError(f"{WEIGHTS} is truncated: its header has {length} bytes, the file {size}")
    try:
        header = msgspec.json.decode(_read(descriptor, length, 8), type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{WEIGHTS}: its header is not a JSON object of tensors: {error}") from None
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise AdapterError(f"{WEIGHTS} has {len(header)} tensors; at most {MAX_TENSORS} are read")
    tensors = [_tensor(name, entry, 8 + length, size) for name, entry in header.items()]
    end = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset < end:
            raise AdapterError(f"{WEIGHTS}: the bytes of {tensor.name} are another tensor's, too")
        end = tensor.offset + tensor.num_bytes
    return tensors


def _read(descriptor: int, count: int, offset: int) -> bytes:
    data = os.pread(descriptor, count, offset)
    if len(data) != count:
        raise AdapterError(f"{WEIGHTS} is truncated")
    return data


def _tensor(name: str, entry: dict[str, Any], data_begin: int, size: int) -> AdapterTensor:
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise AdapterError(f"{WEIGHTS}: a tensor's name is longer than {MAX_NAME_CHARS} characters, or not printable")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise AdapterError(f"{name} has dtype {str(dtype)[:20]!r}; supported are {', '.join(ITEM_BYTES)}")
    if not _are_sizes(shape, 0, 4):
        raise AdapterError(f"{name} has no valid shape")
    if not _are_sizes(offsets, 2, 2):
        raise AdapterError(f"{name} has no valid data_offsets")
    begin, end = offsets
    num_bytes = ITEM_BYTES[dtype]
    for n in shape:
        num_bytes *= n
    if end - begin != num_bytes:
        raise AdapterError(f"{name} has {end - begin} bytes, but {num_bytes} by its dtype and shape")
    if data_begin + end > size:
        raise AdapterError(f"{WEIGHTS} is truncated: {name} ends after the file")
    return AdapterTensor(name, dtype, tuple(shape), data_begin + begin, num_bytes)


def _are_sizes(values: object, least: int, most: int) -> TypeGuard[list[int]]:
    """Whether these are from `least` to `most` numbers."""
    is_list = isinstance(values, list) and least <= len(values) <= most
    return isinstance(values, list) and is_list and all(type(n) is int and 0 <= n < 1 << 40 for n in values)


# ------------------------------------------------------------------------------------------------------------------ layers
def _parts(tensors: list[AdapterTensor], config: PeftConfig, limits: AdapterLimits) -> Iterator[AdapterPart]:
    layers: dict[str, _Halves] = {}
    bases: list[tuple[str, AdapterTensor]] = []
    for tensor in tensors:
        if not tensor.name.startswith(PREFIX):
            raise AdapterError(f"{tensor.name}: the names of an adapter's tensors begin with {PREFIX}")
        name = tensor.name.removeprefix(PREFIX)
        if name.endswith(BASE_WEIGHT):
            bases.append((name.removesuffix(BASE_WEIGHT), tensor))
            continue
        layer, half, is_embedding = _split(name)
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            kind = "a convolution's adapter, which is not supported" if len(tensor.shape) > 2 else "not a matrix"
            raise AdapterError(f"{tensor.name} has shape {list(tensor.shape)}: it is {kind}")
        halves = layers.setdefault(layer, _Halves(is_embedding, {}))
        if halves.is_embedding != is_embedding:
            raise AdapterError(f"{tensor.name}: the layer is adapted both as an embedding and as a linear layer")
        halves.tensors[half] = tensor
    for layer, base in bases:
        _check_base(base, layers.get(layer))
    for layer in layers:
        yield _part(layer, layers, config, limits)


def _split(name: str) -> tuple[str, str, bool]:
    """(layer, "a" or "b", whether it is an embedding)"""
    for suffix, (half, is_embedding) in HALVES.items():
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix), half, is_embedding
    for part, what in (("lora_magnitude_vector", "use_dora"), (".lora_B.bias", "lora_bias")):
        if part in name:
            raise AdapterError(f"{PREFIX}{name}: {what} is not supported")
    raise AdapterError(f"{PREFIX}{name} is not a tensor of LoRA; modules_to_save and resized tables are not supported")


def _check_base(base: AdapterTensor, halves: _Halves | None) -> None:
    """A targeted embedding or head is saved with the base's own weight. It must have the base's shape, and is passed over."""
    if halves is None or len(halves.tensors) != 2:
        raise AdapterError(f"{base.name} is a weight of the base model without an adapter; modules_to_save is not supported")
    a, b = halves.tensors["a"].shape, halves.tensors["b"].shape
    if base.shape != ((a[1], b[0]) if halves.is_embedding else (b[0], a[1])):
        raise AdapterError(
            f"{base.name} has shape {list(base.shape)}, which is not its adapter's: an extended vocabulary is not supported"
        )


def _part(layer: str, layers: dict[str, _Halves], config: PeftConfig, limits: AdapterLimits) -> AdapterPart:
    tensors = layers[layer].tensors
    if len(tensors) != 2:
        [one] = tensors.values()
        raise AdapterError(f"{one.name} has no counterpart: a layer needs A and B")
    a, b = tensors["a"], tensors["b"]
    if a.shape[0] != b.shape[1]:
        raise AdapterError(f"{b.name} has shape {list(b.shape)}, which does not fit {list(a.shape)} of {a.name}")
    if EXPERTS.search(layer):
        return _experts_part(layer, layers, config, limits)
    rank = config.rank_of(layer)
    if a.shape[0] != rank:
        raise AdapterError(f"{a.name} has rank {a.shape[0]}, but r and rank_pattern of adapter_config.json say {rank}")
    _check_rank(a, rank, limits.max_rank)
    return AdapterPart(layer, rank, config.scale_of(layer, rank), a, b)


def _experts_part(layer: str, layers: dict[str, _Halves], config: PeftConfig, limits: AdapterLimits) -> AdapterPart:
    """The part of a parameter of all experts. A has each expert's rank, one after another; the workers know how many there are.

    Patterns are matched with the parameter's name, which the file lacks: gate_up_proj has twice the elements of down_proj.
    """
    a, b = layers[layer].tensors["a"], layers[layer].tensors["b"]
    outer = layer.removesuffix(".base_layer")
    other = layers.get(outer if outer != layer else f"{layer}.base_layer")
    kinds = ["gate_up_proj", "down_proj"]
    if other is not None and len(other.tensors) == 2:
        sizes = [t["a"].shape[1] * t["b"].shape[0] for t in (layers[layer].tensors, other.tensors)]
        kinds = kinds[:1] if sizes[0] == 2 * sizes[1] else kinds[1:] if sizes[1] == 2 * sizes[0] else kinds
    ranks = {kind: config.rank_of(f"{outer}.{kind}") for kind in kinds}
    found = {(ranks[kind], config.scale_of(f"{outer}.{kind}", ranks[kind])) for kind in kinds}
    fitting = {(rank, scale) for rank, scale in found if a.shape[0] % rank == 0}
    if len({scale for _, scale in fitting}) != 1:
        raise AdapterError(f"{a.name}: rank_pattern and alpha_pattern do not say which rank this parameter of experts has")
    rank, scale = max(fitting)
    _check_rank(a, rank, limits.max_rank * (2 if "gate_up_proj" in kinds else 1))
    return AdapterPart(layer, rank, scale, a, b)


def _check_rank(a: AdapterTensor, rank: int, most: int) -> None:
    if rank > most:
        raise AdapterError(f"{a.name} has rank {rank}: --max-lora-rank allows {most}")
