"""One row's residual addition, RMSNorm and product with a 4-bit weight in one kernel: `norm_linear` for `int4`'s weights.

Every program computes the norm of the row again, beside its few output columns; the first also writes residual + x, to a buffer
of its own, since the others still read the residual. References: `norm_reference`, `int4_weight.unpack`.
"""

import torch
import triton

from quire.kernels.linear.int4 import BITS_OF_128, choose, one_row_kernel
from quire.kernels.linear.int4_weight import Int4Weight
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options
from quire.kernels.tuning.current import linear_tuning

MAX_K = 4096  # limit of a row's norm in a program


def pays(rows: int, weight: Int4Weight) -> bool:
    """Whether `int4_norm_linear` is both possible and faster than a norm and a product, as in `norm_linear`."""
    is_small = weight.inputs <= MAX_K and weight.outputs * weight.inputs <= linear_tuning().norm_linear_weight
    return rows == 1 and is_small and weight.perm is None


def int4_norm_linear(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`int4_linear` of the norm of residual + x, residual + x), for one row [1, K]; the residual itself is not modified.

    Every program computes the norm again, beside its few output columns. Raises ValueError if shapes or types do not fit.
    """
    k, columns, added = weight.inputs, weight.outputs, residual if x is None else x
    n = columns // 2 if is_gated else columns
    if not pays(1, weight) or added.shape != (1, k) or residual.shape != (1, k) or norm_weight.shape != (k,):
        raise ValueError(f"int4_norm_linear: {added.shape}, {residual.shape}, {norm_weight.shape} do not fit [{columns}, {k}]")
    if not added.dtype == residual.dtype == norm_weight.dtype or not added.stride(1) == residual.stride(1) == 1:
        raise ValueError("int4_norm_linear: x, the residual and the norm's weight need one dtype and unit stride")
    total, out = residual if x is None else torch.empty_like(residual), residual.new_empty((1, n))
    config, zeros = choose(1, n, weight.words.shape[1]), weight.scales if weight.zeros is None else weight.zeros
    one_row_kernel[(triton.cdiv(n, config.block_n),)](
        added, weight.words, weight.scales, zeros, added if bias is None else bias, out, residual, norm_weight, total, eps, n,
        BITS_OF_128, k, weight.words.shape[1], weight.group, config.block_n, config.block_words,
        weight.zeros is not None, bias is not None, is_gated, pdl, triton.next_power_of_2(k), x is not None,
        num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out, total
