"""Float weights that are rounded to nearest while they are loaded: a plain [N, K] becomes a `QuantizedWeight` (--quantization).

    fp8         s = max |w| / 448,          q = e4m3(w / s)
    int8        s = max |w| / 127,          q = round(w / s), half to even
    4 bits      s = (max - min) / 15,       z = round(-min / s), q = round(w / s) + z; 0 lies between min and max

in float32, over the scheme's groups. 4-bit scales are rounded to bfloat16 first, so that a kernel may hold them in 16 bits; q
is computed with the rounded scale. Runs on the tensor's device and stream, in chunks of rows, because a wide layer in float32
takes four times the memory of the result.
"""

import torch
from torch.nn import functional as F

from quire.workers.loading.quantized.packing import (
    IntegerPacking,
    QuantizedSpec,
    QuantizedWeight,
    Tensors,
    TensorSpec,
    row_chunks,
)
from quire.workers.loading.quantized.schemes import FP8_MAX, INT8_MAX, PackQuantized, Scaled
from quire.workers.loading.weight_loader import FLOATS

FOUR_BITS = 15.0


class FloatsPacking(IntegerPacking):
    """weight [N, K]."""

    def __init__(self, scheme: Scaled | PackQuantized, n: int, k: int):
        self.activations, self.n, self.k = scheme.activations, n, k
        rows, columns = (1, scheme.group_size) if isinstance(scheme, PackQuantized) else scheme.block
        self.block = rows or n, columns or k
        self.is_fp8 = isinstance(scheme, Scaled) and scheme.dtype == "fp8"
        is_packed = isinstance(scheme, PackQuantized)
        self.dtype = torch.uint8 if is_packed else torch.float8_e4m3fn if self.is_fp8 else torch.int8
        self.spec = QuantizedSpec("uint4" if is_packed else "fp8" if self.is_fp8 else "int8", self.block, is_packed)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(((self.n, self.k),), FLOATS)}

    def unpacked(self, tensors: Tensors) -> QuantizedWeight:
        w, (rows, columns) = tensors["weight"], self.block
        low, high = limits(w, self.block)
        if self.dtype == torch.uint8:
            scales = no_zeros(((high - low) / FOUR_BITS).bfloat16().float())
            zeros = (-low / scales).round().clamp(0, FOUR_BITS)
        else:
            scales, zeros = no_zeros(torch.maximum(high, -low) / (FP8_MAX if self.is_fp8 else INT8_MAX)), None
        q = torch.empty(w.shape, dtype=self.dtype, device=w.device)
        for chunk in row_chunks(self.n, self.k, w.device):
            block = torch.arange(chunk.start, chunk.stop, device=w.device) // rows
            values = F.pad(w[chunk].float(), (0, -self.k % columns)).unflatten(1, (-1, columns))
            values /= scales[block, :, None]
            if self.is_fp8:
                values.clamp_(-FP8_MAX, FP8_MAX)
            else:
                values.round_()
            if zeros is not None:
                values.add_(zeros[block, :, None]).clamp_(0, FOUR_BITS)
            q[chunk] = values.flatten(1)[:, : self.k].to(self.dtype)
        return QuantizedWeight(q, scales, self.block, None if zeros is None else zeros.to(torch.int32))


def limits(w: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest of 0 and each group's values: float32 [groups of rows, groups of columns]."""
    n, k = w.shape
    whole = F.pad(w, (0, -k % block[1])) if k % block[1] else w
    low, high = whole.unflatten(1, (-1, block[1])).aminmax(dim=-1)
    low, high = (F.pad(x, (0, 0, 0, -n % block[0])).unflatten(0, (-1, block[0])) for x in (low, high))
    return low.amin(1).float().clamp(max=0), high.amax(1).float().clamp(min=0)


def no_zeros(scale: torch.Tensor) -> torch.Tensor:
    """Scales with 1 for 0, for groups of zeros."""
    return scale.masked_fill(scale == 0, 1.0)
