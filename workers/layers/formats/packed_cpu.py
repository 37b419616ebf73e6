"""The plain weight format on a CPU: when its values are there, the weight is packed into oneDNN's layout.

This layout (kernels/linear/linear_cpu.py) is the fastest to read, but it is no longer readable as a tensor. It replaces the
plain weight. Both are kept in two cases: a small float32 weight, with which one row is faster plain; and a weight that an
embedding shares, because it looks up rows. Only the second takes memory that counts, vocabulary x hidden size. It is worth it:
with one row, the head of a 0.5B model takes 13 ms packed and 28 plain.

oneDNN compiles and keeps code for every number of rows, 0.4 MB for each weight's shape, so rows are padded to a few numbers.
Five shapes at 1 to 512 rows took 1,203 MB unpadded, 165 padded, and 147 with oneDNN's caches bounded as well
(workers/__main__.py; with bounds alone, code would be compiled anew at every step). A worker of the bundled model grew from 275
to 1,207 MB; now it grows to 411.
"""

import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.linear.linear_cpu import pack, packed_linear
from quire.workers.layers.formats.dense import Unquantized

# up to this size of a float32 weight, one row is faster by the plain product: 1 MB 15 us and 18 packed, 0.1 MB 5 and 12
SMALL_BYTES = 2 << 20

EXACT_ROWS = 16  # up to here each number has its own code; padding would take 1 to 4 us a product, in decode steps of 1 to 3 ms


def padded_rows(rows: int) -> int:
    """The number of rows that a product is computed with: exact up to 16, then eight steps to a doubling, 0 to 12 % more."""
    if rows <= EXACT_ROWS:
        return rows
    step = 1 << (rows - 1).bit_length() - 4
    return -(-rows // step) * step


class PackedCpu(Unquantized):
    """Loaded as a plain weight [out, in], and packed by `finish`; after that only small weights have the plain one, too."""

    packed: nn.Parameter

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        if self.weight is not None and rows == 1:
            y = F.linear(x, self.weight, self.bias)
        elif (padded := padded_rows(rows)) == rows:
            y = packed_linear(x, self.packed, self.bias)
        else:
            y = packed_linear(F.pad(x, (0, 0, 0, padded - rows)), self.packed, self.bias)[:rows]
        return y if out is None else out.copy_(y)

    def finish(self) -> None:
        super().finish()
        assert self.weight is not None, "a weight is packed once"
        self.packed = nn.Parameter(pack(self.weight), requires_grad=False)
        is_small = self.weight.dtype == torch.float32 and self.weight.nbytes <= SMALL_BYTES
        if not is_small:
            self.weight = None
