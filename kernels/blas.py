"""torch's matrix product on CUDA, by cuBLAS or by cuBLASLt: for wide 16-bit layers one is faster than the other by size.

Measured on an H200, torch 2.11, over all of a layer's products of Llama-3.1-8B (columns 4096 and more): cuBLASLt takes 1 to 6 %
less at 17 to 192 rows, 2 to 3 % less from 2048 rows on, up to 2 % more between; at 1024 columns there is no difference
(benchmarks/LOG.md). Both accumulate in float32. The preference is the process's: it is set anew whenever it changes.
"""

import torch
import torch.nn.functional as F

MIN_COLUMNS = 4096  # of input and output
FEW_ROWS = range(17, 193)
MANY_ROWS = 2048

_preferred = ""


def library(rows: int, n: int, k: int, itemsize: int) -> str:
    """The library for x [rows, k] @ W^T [k, n]: "cublas" or "cublaslt"."""
    wide = itemsize == 2 and min(n, k) >= MIN_COLUMNS
    return "cublaslt" if wide and (rows in FEW_ROWS or rows >= MANY_ROWS) else "cublas"


def blas_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight^T + bias; x [M, K], weight [N, K], bias [N] or none -> [M, N], in `out` if given."""
    global _preferred
    n, k = weight.shape
    wanted = library(x.shape[0], n, k, x.element_size())
    if wanted != _preferred:
        torch.backends.cuda.preferred_blas_library(wanted)
        _preferred = wanted
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
