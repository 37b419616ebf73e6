"""Products of fp8 weights (e4m3) with fp8 activations: the choice of kernels, and cuBLAS for prompts.

Operands, scales and results as in `scaled`. On a Hopper up to 64 rows (with a small W from two) use its own ring
(`scaled_hopper`), and more use `scaled_wide`, up to the tuning table's limit or while cuBLAS has few tiles; one row:
`scaled_row`; few rows on other GPUs: the portable kernel; beyond: torch._scaled_mm, which takes a scale a row of W and a token,
or, on a Hopper with CUDA 12.9, groups of 128 x 128 and 1 x 128. Activations have a scale per token or group of it, never over
the batch (`quantize`). Shapes that cuBLAS does not take go to the portable kernel.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
import triton

from quire.kernels.elementwise.activation import silu_mul
from quire.kernels.linear import scaled, scaled_row
from quire.kernels.linear.scaled import BLOCK, MAX_BUCKET, Scaled
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN, late
from quire.kernels.tuning.current import current


def multiplies_blocks(capability: tuple[int, int], cuda: str | None) -> bool:
    """Whether torch._scaled_mm takes scales of 1 x 128 by 128 x 128 on such a GPU, as built with this version of CUDA."""
    return capability == (9, 0) and cuda is not None and tuple(map(int, cuda.split(".")[:2])) >= (12, 9)


@functools.cache
def _multiplies_blocks(device: torch.device) -> bool:
    return device.type == "cuda" and multiplies_blocks(torch.cuda.get_device_capability(device), torch.version.cuda)


def cublas_supports(x: Scaled, weight: Scaled, *, with_blocks: bool) -> bool:
    """Whether torch._scaled_mm computes it: sizes that cuBLAS accepts, scales alike on both sides, groups of 128 x 128.

    with_blocks: `multiplies_blocks` of the GPU.
    """
    n, k = weight.data.shape
    blocks = weight.scales.shape[1] > 1
    if x.scales.shape[1] != weight.scales.shape[1] or weight.rows != (BLOCK if blocks else 1) or (blocks and not with_blocks):
        return False
    # Some versions of torch want the rows of W's scales padded to fours: K in units of four groups is the same to all versions.
    return n % (BLOCK if blocks else 16) == 0 and k % (4 * BLOCK if blocks else 16) == 0


def cublas(x: Scaled, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x @ W^T + bias [M, N] by torch._scaled_mm, if `cublas_supports` it."""
    rows, data = len(x.data), x.data
    if weight.scales.shape[1] > 1:
        # 1 x 128 scales are stored with tokens side by side, a multiple of four of them, and W's as its transpose
        missing = -rows % 4
        lying = F.pad(x.scales.t(), (0, missing)) if missing else x.scales.t().contiguous()
        scales = (lying.t(), weight.scales.t())
        data = F.pad(data.view(torch.uint8), (0, 0, 0, missing)).view(data.dtype) if missing else data
        y = torch._scaled_mm(data, weight.data.t(), *scales, out_dtype=dtype, use_fast_accum=False)[:rows]
        return y if bias is None else y.add_(bias)
    scales = (x.scales, weight.scales.t())
    return torch._scaled_mm(data, weight.data.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=False)


def fp8_linear(
    x: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """x @ W^T + bias in dtype [M, N]; gated: silu(g) * u of its halves, [M, N / 2]."""
    rows, columns = len(x.data), len(weight.data)
    # torch's product with a scale a row returns bfloat16 only
    is_ours = scaled.is_ours(rows, False, weight.scales.shape[1] > 1) or widens(x, weight, is_gated=is_gated)
    if not is_ours and dtype == torch.bfloat16 and cublas_supports(x, weight, with_blocks=_multiplies_blocks(x.data.device)):
        y = cublas(x, weight, bias, dtype)
        return silu_mul(y, pdl=pdl) if is_gated else y
    out = torch.empty(rows, columns // 2 if is_gated else columns, dtype=dtype, device=x.data.device)
    launch_few(x, weight, bias, out, is_gated=is_gated, pdl=pdl)
    return out


def fp8_linear_split_k(
    x: Scaled, weight: Scaled, bias: torch.Tensor | None = None, *, dtype: torch.dtype, pdl: int = PLAIN
) -> torch.Tensor:
    """As `fp8_linear`, or partial sums for a norm to add up, if one product has too few tiles for the GPU (`scaled_hopper`)."""
    parts = split_k(x, weight, bias, pdl=pdl)
    return fp8_linear(x, weight, bias, dtype=dtype, pdl=pdl) if parts is None else parts


def split_k(x: Scaled, weight: Scaled, bias: torch.Tensor | None, *, pdl: int) -> torch.Tensor | None:
    """Split-K partial sums of an fp8 or int8 product, exact ones for int8; None if K is not split."""
    (rows, k), n, exact = x.data.shape, len(weight.data), scaled.is_exact(x, weight)
    is_wide = widens(x, weight, is_gated=False)
    if not (is_wide or streams(x, weight)) or is_one_row(x, weight, n, is_gated=False):
        return None
    if exact and (bias is not None or rows > n):  # scales of rows would not fit after the sums
        return None
    from quire.kernels.linear import scaled_hopper, scaled_wide

    kernel: Any = scaled_wide if is_wide else scaled_hopper
    more = {"by_block": weight.scales.shape[1] > 1, "exact": exact} if is_wide else {}
    config = kernel.choose(rows, n, k, hopper.num_sms(x.data.device), split_k=True, **more)
    if config.parts == 1:
        return None
    dtype = torch.int32 if exact else torch.float32
    out = torch.empty(config.parts + 2 * exact, rows, n, dtype=dtype, device=x.data.device)
    kernel.launch(x, weight, bias, out, config, pdl=late() if is_wide else min(pdl, LATE))
    return out


def streams(x: Scaled, weight: Scaled) -> bool:
    """Whether Hopper's ring computes it."""
    few = 1 <= len(x.data) <= hopper.MAX_ROWS and hopper.available(x.data.device)
    return few and hopper.can_copy(x.data) and hopper.can_copy(weight.data)


def wide_rows(weight: Scaled, *, is_gated: bool = False) -> int:
    """Rows up to which `scaled_wide` computes products with such a weight, by the tuning table; 0: none on this GPU."""
    tuning = current().scaled
    if not hopper.available(weight.data.device):
        return 0
    if weight.data.dtype == torch.int8:
        return tuning.int8_wide_rows
    if weight.scales.shape[1] > 1:
        return tuning.fp8_block_wide_rows
    return tuning.fp8_gated_wide_rows if is_gated else tuning.fp8_wide_rows


def leaves_idle(rows: int, n: int, sms: int) -> bool:
    """Whether cuBLAS's tiles, 128 x 128, are so few that half of the SMs have none; smaller tiles are enough for all."""
    return rows <= MAX_BUCKET and 2 * triton.cdiv(rows, 128) * triton.cdiv(n, 128) <= sms


def widens(x: Scaled, weight: Scaled, *, is_gated: bool) -> bool:
    """Whether `scaled_wide` computes it: a tile of gate and up, 64 columns of each, must lie in one 2-D scale group."""
    rows, most, device = len(x.data), wide_rows(weight, is_gated=is_gated), weight.data.device
    if rows <= hopper.MAX_ROWS or not most or not (rows <= most or leaves_idle(rows, len(weight.data), hopper.num_sms(device))):
        return False
    blocks = weight.scales.shape[1] > 1
    in_squares = weight.rows == (BLOCK if blocks else 1) and not (blocks and is_gated and len(weight.data) % BLOCK)
    return in_squares and hopper.can_copy(x.data) and hopper.can_copy(weight.data)


def is_one_row(x: Scaled, weight: Scaled, n: int, *, is_gated: bool) -> bool:
    """Whether one row's own kernel computes it: Hopper's ring is faster for a large W.

    For the 8B's gate_up with 2-D scale groups the ring takes 31 us, the plain cores 53.
    """
    is_large = weight.data.numel() >= current().scaled.ring_weight
    return scaled_row.supports(x, weight, n, is_gated=is_gated) and not (is_large and streams(x, weight))


def launch_few(
    x: Scaled, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor, *, is_gated: bool = False, pdl: int = PLAIN
) -> None:
    """Run a kernel of ours, fp8 or int8, any number of rows: on a Hopper its own if they can, one row on the plain cores."""
    (rows, k), n = x.data.shape, out.shape[1]
    if is_one_row(x, weight, n, is_gated=is_gated):
        scaled_row.launch(x, weight, bias, out, scaled_row.choose(n, k), is_gated=is_gated, pdl=pdl)
    elif streams(x, weight):
        from quire.kernels.linear import scaled_hopper

        varies = weight.scales.shape[1] == 1
        config = scaled_hopper.choose(rows, n, k, hopper.num_sms(x.data.device), is_gated=is_gated, varies=varies)
        scaled_hopper.launch(x, weight, bias, out, config, is_gated=is_gated, pdl=min(pdl, LATE))
    elif widens(x, weight, is_gated=is_gated):
        from quire.kernels.linear import scaled_wide

        how = {"is_gated": is_gated, "by_block": weight.scales.shape[1] > 1, "exact": scaled.is_exact(x, weight)}
        wide = scaled_wide.choose(rows, n, k, hopper.num_sms(x.data.device), **how)
        scaled_wide.launch(x, weight, bias, out, wide, is_gated=is_gated, pdl=late())
    elif rows:
        portable = scaled.choose(rows, n, is_gated=is_gated, shared_bytes=hopper.shared_bytes(x.data.device))
        scaled.launch(x, weight, bias, out, portable, is_gated=is_gated, pdl=pdl)
