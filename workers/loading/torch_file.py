"""TorchFile: the tensors of a file of torch.save (pytorch_model.bin, sparse_linear.pt), mapped, by safetensors' interface.

The file is a zip archive: data.pkl describes the tensors (torch_pickle.py), and data/0, data/1, … are their elements, not
compressed. Sizes are checked against the archive before a byte is read as a number. Only pooling models are read from such
files, since some have no others; files of torch before 1.6 are no archives and are refused.
"""

import math
import mmap
import struct
import zipfile
from pathlib import Path
from typing import NamedTuple, Self

import torch

from quire.workers.loading.checkpoint_tensor import DTYPE_BYTES
from quire.workers.loading.torch_pickle import Described, PickleRefusedError, read_described
from quire.workers.loading.weight_loader import WeightsError

MAX_PICKLE_BYTES = 256 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorSlice(NamedTuple):
    """A tensor's shape and dtype, as safetensors' slices tell them."""

    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype


class TorchFile:
    """The tensors of a file. Its tensors hold the mapping, so there is nothing to close. Raises WeightsError."""

    def __init__(self, path: Path):
        self._path = path
        try:
            with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
                self._tensors, entries = self._described(archive)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch asks for writable memory
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
            if isinstance(error, WeightsError):
                raise WeightsError(f"{path} is refused: {error}") from None
            raise WeightsError(f"{path} cannot be read as a file of torch.save: {error}") from None
        self._starts = {key: self._start(entry) for key, entry in entries.items()}

    def _described(self, archive: zipfile.ZipFile) -> tuple[dict[str, Described], dict[str, zipfile.ZipInfo]]:
        names = archive.namelist()
        if len(set(names)) != len(names):
            raise PickleRefusedError("the archive has an entry twice")
        folder = next(
            (name.removesuffix("data.pkl") for name in names if name.count("/") == 1 and name.endswith("/data.pkl")), None
        )
        if folder is None:
            raise PickleRefusedError("the archive has no data.pkl")
        if f"{folder}byteorder" in names and self._small(archive, f"{folder}byteorder") != b"little":
            raise PickleRefusedError("its numbers are not little-endian")
        tensors = read_described(self._small(archive, f"{folder}data.pkl"))
        entries = {}
        for storage in {tensor.storage for tensor in tensors.values()}:
            if f"{folder}data/{storage.key}" not in names:
                raise PickleRefusedError(f"the archive lacks storage {storage.key!r:.40}")
            entry = archive.getinfo(f"{folder}data/{storage.key}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != storage.size * DTYPE_BYTES[storage.dtype]:
                raise PickleRefusedError(f"storage {storage.key!r:.40} does not have the size that data.pkl says")
            entries[storage.key] = entry
        return tensors, entries

    def _small(self, archive: zipfile.ZipFile, name: str) -> bytes:
        if archive.getinfo(name).file_size > MAX_PICKLE_BYTES:
            raise PickleRefusedError(f"{name} is too large")
        return archive.read(name)

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """Where an entry's bytes begin: behind its own header, which has a name and extra bytes."""
        header = self._map[entry.header_offset : entry.header_offset + 30]
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise WeightsError(f"{self._path} is refused: the archive is damaged")
        name, extra = struct.unpack("<HH", header[26:30])
        start = entry.header_offset + 30 + name + extra
        if start + entry.file_size > len(self._map):
            raise WeightsError(f"{self._path} is refused: the archive ends early")
        return start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> TensorSlice:
        tensor = self._tensors[name]
        return TensorSlice(tensor.shape, tensor.storage.dtype)

    def get_tensor(self, name: str) -> torch.Tensor:
        """The tensor in the mapped file."""
        tensor = self._tensors[name]
        storage, dtype = tensor.storage, DTYPES[tensor.storage.dtype]
        if math.prod(tensor.shape) == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        start = self._starts[storage.key]
        if start % dtype.itemsize:  # torch aligns storages; other writers of such archives may not
            flat = torch.frombuffer(bytearray(self._map[start : start + storage.size * dtype.itemsize]), dtype=dtype)
        else:
            flat = torch.frombuffer(self._map, dtype=dtype, count=storage.size, offset=start)
        return flat.as_strided(tensor.shape, tensor.stride, tensor.offset)
