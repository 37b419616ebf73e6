"""CheckpointTensor: a tensor in a checkpoint file. files.py finds them; models may know them by other names."""

import math
from pathlib import Path
from typing import NamedTuple

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class CheckpointTensor(NamedTuple):
    """A tensor in a checkpoint file."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str
    within: tuple[int | slice, ...] = ()  # an index, if the file has several of our tensors in one

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES.get(self.dtype, 0)
