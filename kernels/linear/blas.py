"""torch's matrix product on CUDA, by cuBLAS or by cuBLASLt: for wide 16-bit layers one is faster than the other by size.

Measured on H200s, torch 2.11, over all of a layer's products of Llama-3.1-8B (columns 4096 and more): cuBLASLt takes 1 to 6 %
less at 17 to 240 rows and at 272 to 624, 2 to 3 % less from 2048 rows on, up to 2 % more between; at 1024 columns there is no
difference (benchmarks/LOG.md). Both accumulate in float32. The preference is the process's: it is set anew whenever it changes.

Where a product has too few tiles to fill the GPU, equal stretches of K computed as a batch are faster, if somebody behind it
adds up the parts anyway (`batched_parts`, for `split_linear`).
"""

import torch
import torch.nn.functional as F

MIN_COLUMNS = 4096  # of input and output
LT_ROWS = (range(17, 241), range(272, 625), range(2048, 1 << 62))

_preferred = ""


def library(rows: int, n: int, k: int, itemsize: int) -> str:
    """The library for x [rows, k] @ W^T [k, n]: "cublas" or "cublaslt"."""
    wide = itemsize == 2 and min(n, k) >= MIN_COLUMNS
    return "cublaslt" if wide and any(rows in some for some in LT_ROWS) else "cublas"


def _prefer(wanted: str) -> None:
    global _preferred
    if wanted != _preferred:
        torch.backends.cuda.preferred_blas_library(wanted)
        _preferred = wanted


def blas_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight^T + bias; x [M, K], weight [N, K], bias [N] or none -> [M, N], in `out` if given."""
    n, k = weight.shape
    _prefer(library(x.shape[0], n, k, x.element_size()))
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def batched_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """x @ weight^T over `parts` equal stretches of K: float32 [parts, M, N]; x [M, K], weight [N, K], 16-bit."""
    (rows, k), n = x.shape, weight.shape[0]
    _prefer("cublas")
    stretches = weight.view(n, parts, k // parts).permute(1, 2, 0)
    return torch.bmm(x.view(rows, parts, k // parts).transpose(0, 1), stretches, out_dtype=torch.float32)
