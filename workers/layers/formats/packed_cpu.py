"""The plain weight format on a CPU: once its values are there, the weight is brought into oneDNN's layout.

The layout (kernels/linear/linear_cpu.py) is read fastest and cannot be read as a tensor any more; it takes the plain weight's
place. Both are kept where one row of a small float32 weight goes faster through the plain one, and where an embedding shares
the weight, for it looks up rows: the one place where packing takes memory that counts, vocabulary x hidden size. It pays: at
one row the head of a 0.5B model takes 13 ms packed and 28 plain.

oneDNN makes and keeps code for every number of rows that it meets, 0.4 MB a weight's shape: rows are padded to a few numbers.
Five shapes at 1 to 512 rows took 1,203 MB unpadded, padded 165, and 147 with oneDNN's caches bounded (workers/__main__.py; to
bound them alone makes code anew at every step). A worker of the bundled model grew from 275 to 1,207 MB, now to 411.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.linear.linear_cpu import pack, packed_linear
from quire.workers.layers.formats.dense import dense_targets, fill_dense, finish_bias, shared_rows
from quire.workers.layers.formats.format import Format, Partition
from quire.workers.layers.module import new_parameter
from quire.workers.loading.target import Target

# float32 weights up to here take one row faster by the plain product: 1 MB 15 us and 18 packed, 0.1 MB 5 and 12
SMALL_BYTES = 2 << 20

EXACT_ROWS = 16  # are few enough to have code each; padding would take 1 to 4 us a product, of decode steps of 1 to 3 ms


def padded_rows(rows: int) -> int:
    """The number of rows that a product is computed with: all up to 16, then eight to each doubling, 0 to 12 % more."""
    if rows <= EXACT_ROWS:
        return rows
    step = 1 << (rows - 1).bit_length() - 4
    return -(-rows // step) * step


class PackedCpu(Format):
    """Loaded as a plain weight [out, in], packed by `finish`."""

    plain: torch.Tensor | None  # after `finish` of small weights only
    packed: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        partition: Partition,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: nn.Parameter | None = None,
    ):
        super().__init__()
        self.partition = partition
        self.is_tied = tied_to is not None
        self.plain = new_parameter(partition.shape, dtype, device) if tied_to is None else shared_rows(tied_to, partition)
        self.bias = new_parameter(partition.shape[:1], dtype, device) if has_bias else None

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        if self.plain is not None and rows == 1:
            y = F.linear(x, self.plain, self.bias)
        elif (padded := padded_rows(rows)) == rows:
            y = packed_linear(x, self.packed, self.bias)
        else:
            y = packed_linear(F.pad(x, (0, 0, 0, padded - rows)), self.packed, self.bias)[:rows]
        return y if out is None else out.copy_(y)

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        yield from dense_targets(name, self.partition, None if self.is_tied else self.plain, self.bias)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        fill_dense(None if self.is_tied else self.plain, self.bias, limit, generator)

    def finish(self) -> None:
        finish_bias(self.partition, self.bias)
        assert self.plain is not None, "a weight is packed once"
        self.packed = nn.Parameter(pack(self.plain), requires_grad=False)
        is_small = self.plain.dtype == torch.float32 and self.plain.nbytes <= SMALL_BYTES
        if not is_small:
            self.plain = None
