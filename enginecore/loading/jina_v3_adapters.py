"""The task adapters of jina-embeddings-v3, which lie stacked in the weights' file, as PEFT folders that the engine can serve.

A checkpoint has for each layer, by task (arXiv:2409.10173):

    a product   W' = W + scale B A    A [tasks, r, in],   B [tasks, out, r]
    a table     W' = W + scale A B    A [tasks, rows, r], B [tasks, r, H]

Bytes are only moved, whatever their type is. The table of token types has one row, so its adapter adds the same to each token:
the table of words, which has an adapter slot, takes it over, as r more columns of A, all rows alike, and r more rows of B.
task_adapters.py calls it.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.enginecore.loading.hub import ModelFilesError

WORDS, TYPES = "word_embeddings", "token_type_embeddings"
MARK = ".parametrizations.weight.0.lora_"
CONFIG, WEIGHTS, VERSION = "adapter_config.json", "adapter_model.safetensors", 1  # of what is written
MAX_HEADER_BYTES = 16 << 20
ITEM = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}

Stacked = tuple[str, np.ndarray]  # safetensors' name of the type, and the bits [tasks, ., .] of A or B
Bits = dict[str, tuple[str, np.ndarray]]  # a file's tensors by name: their type and bits


def read_adapters(folder: Path, tasks: list[str]) -> dict[str, Stacked]:
    """The stacked tensors of a checkpoint's adapters, by name. Raises ModelFilesError."""
    stacked = {name: found for name, found in _stacked(folder) if ".pooler." not in f".{name}"}  # the model does not have it
    if not stacked:
        raise ModelFilesError(f"{folder} has no adapters of tasks in its weights, which --enable-lora would serve")
    if len(types := sorted({dtype for dtype, _ in stacked.values()})) > 1:
        raise ModelFilesError(f"{folder}: the adapters of its tasks have several types: {', '.join(types)}")
    for layer in _layers(stacked):
        a, b = stacked.get(f"{layer}{MARK}A"), stacked.get(f"{layer}{MARK}B")
        if a is None or b is None or {len(a[1]), len(b[1])} != {len(tasks)} or a[1].ndim + b[1].ndim != 6:
            raise ModelFilesError(f"{folder}: {layer} lacks adapters of {len(tasks)} tasks")
    return stacked


def digest_of(stacked: dict[str, Stacked], tasks: list[str], rank: int, alpha: float) -> str:
    """A digest of all that `write_adapters` writes."""
    digest = hashlib.sha256(repr((VERSION, tasks, rank, alpha)).encode())
    for name, (dtype, bits) in sorted(stacked.items()):
        digest.update(repr((name, dtype, bits.shape)).encode())
        digest.update(bits.data)
    return digest.hexdigest()


def write_adapters(stacked: dict[str, Stacked], into: Path, tasks: list[str], rank: int, alpha: float) -> None:
    """Write an adapter's folder for each task. Raises ModelFilesError, OSError."""
    layers = _layers(stacked)
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    if any(layer.endswith(TYPES) for layer in layers):
        config |= {"rank_pattern": {WORDS: 2 * rank}, "alpha_pattern": {WORDS: 2 * alpha}}
    for number, task in enumerate(tasks):
        made = into / task
        made.mkdir()
        (made / CONFIG).write_text(json.dumps(config))
        _write(made / WEIGHTS, _of_task(stacked, layers, number))


def _layers(stacked: dict[str, Stacked]) -> list[str]:
    return sorted({name.partition(MARK)[0] for name in stacked})


def _stacked(folder: Path) -> Iterator[tuple[str, Stacked]]:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > MAX_HEADER_BYTES:
                    raise ValueError(f"its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
                header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
                size = os.fstat(file.fileno()).st_size - 8 - length
                for name, entry in header.items():
                    if MARK in name:
                        item = ITEM[entry["dtype"]]
                        begin, end = entry["data_offsets"]
                        if not 0 <= begin <= end <= size:
                            raise ValueError(f"{name} lies at {begin} to {end} of {size} bytes")
                        file.seek(8 + length + begin)
                        bits = np.frombuffer(file.read(end - begin), item).reshape(entry["shape"])
                        yield name, (entry["dtype"], bits)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelFilesError(f"{path}: the adapters of its tasks cannot be read: {error}") from None


def _of_task(stacked: dict[str, Stacked], layers: list[str], number: int) -> Bits:
    """The tensors of one task's folder."""
    made: Bits = {}
    for layer in layers:
        (dtype, all_a), (_, all_b) = stacked[f"{layer}{MARK}A"], stacked[f"{layer}{MARK}B"]
        a, b, name = all_a[number], all_b[number], f"base_model.model.{layer}"
        if layer.endswith(TYPES):
            continue
        if layer.endswith(WORDS):
            types = layer.removesuffix(WORDS) + TYPES
            if f"{types}{MARK}A" in stacked:
                a, b = _with_types(a, b, stacked[f"{types}{MARK}A"][1][number], stacked[f"{types}{MARK}B"][1][number])
            made[f"{name}.lora_embedding_A"], made[f"{name}.lora_embedding_B"] = (dtype, a.T), (dtype, b.T)
        else:
            made[f"{name}.lora_A.weight"], made[f"{name}.lora_B.weight"] = (dtype, a), (dtype, b)
    return made


def _with_types(a: np.ndarray, b: np.ndarray, types_a: np.ndarray, types_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A [rows, 2 r] and B [2 r, H] of words and of the one token type."""
    if len(types_a) != 1 or types_b.shape != b.shape:
        raise ModelFilesError("adapters of tasks change a table of several token types: such models are served without them")
    return np.hstack((a, np.broadcast_to(types_a, (len(a), types_a.shape[1])))), np.vstack((b, types_b))


def _write(path: Path, tensors: Bits) -> None:
    header, at = {}, 0
    for name, (dtype, bits) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, bits in tensors.values():
            file.write(np.ascontiguousarray(bits).data)
        file.flush()
        os.fsync(file.fileno())
