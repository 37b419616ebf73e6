"""torch's matrix product on CUDA, by cuBLAS or by cuBLASLt: for wide 16-bit layers one is faster than the other by size.

The tuning table, measured over all of a layer's products, says which. Both accumulate in float32. torch's preference is global
to the process: it is set again whenever it changes.

If a product has too few tiles to fill the GPU, equal ranges of K computed as a batch are faster, provided that the next kernel
adds up the partial sums anyway (`batched_split_k`, for `split_linear`).
"""

import torch
import torch.nn.functional as F

from quire.kernels.tuning.current import cached, linear_tuning

_preferred = ""


@cached
def library(rows: int, n: int, k: int, itemsize: int) -> str:
    """The library for x [rows, k] @ W^T [k, n]: "cublas" or "cublaslt"."""
    tuning = linear_tuning()
    wide = itemsize == 2 and min(n, k) >= tuning.cublaslt_columns
    return "cublaslt" if wide and any(first <= rows <= last for first, last in tuning.cublaslt_rows) else "cublas"


def prefer(name: str) -> None:
    """Make torch use this library from now on."""
    global _preferred
    if name != _preferred:
        torch.backends.cuda.preferred_blas_library(name)
        _preferred = name


def blas_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight^T + bias; x [M, K], weight [N, K], bias [N] or none -> [M, N], in `out` if given."""
    n, k = weight.shape
    prefer(library(x.shape[0], n, k, x.element_size()))
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def batched_split_k(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """x @ weight^T over `parts` equal ranges of K: float32 [parts, M, N]; x [M, K], weight [N, K], 16-bit."""
    (rows, k), n = x.shape, weight.shape[0]
    prefer("cublas")
    ranges = weight.view(n, parts, k // parts).permute(1, 2, 0)
    return torch.bmm(x.view(rows, parts, k // parts).transpose(0, 1), ranges, out_dtype=torch.float32)
