"""torch's product by either cuBLAS library."""

import pytest
import torch

from quire.kernels.linear import blas
from quire.kernels.tuning.current import using
from quire.kernels.tuning.h200 import H200


@pytest.mark.parametrize(
    ("rows", "n", "k", "itemsize", "library"),
    [
        (16, 4096, 4096, 2, "cublas"),
        (17, 4096, 4096, 2, "cublaslt"),
        (240, 6144, 4096, 2, "cublaslt"),
        (256, 6144, 4096, 2, "cublas"),
        (288, 6144, 4096, 2, "cublaslt"),
        (640, 6144, 4096, 2, "cublas"),
        (2047, 4096, 14336, 2, "cublas"),
        (2048, 4096, 14336, 2, "cublaslt"),
        (64, 4096, 1024, 2, "cublas"),
        (64, 2048, 4096, 2, "cublas"),
        (64, 4096, 4096, 4, "cublas"),
    ],
)
def test_library_goes_by_size(rows: int, n: int, k: int, itemsize: int, library: str) -> None:
    with using(H200):
        assert blas.library(rows, n, k, itemsize) == library


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 64, 192, 256, 2048, 2053])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_out", [False, True])
def test_both_libraries_give_the_product(rows: int, has_bias: bool, has_out: bool) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4128, 4096, device="cuda", dtype=torch.bfloat16) / 64
    bias = torch.randn(4128, device="cuda", dtype=torch.bfloat16) if has_bias else None
    out = torch.full((rows, 4128), torch.nan, device="cuda", dtype=torch.bfloat16) if has_out else None
    found = blas.blas_linear(x, weight, bias, out)
    assert out is None or found is out or found.data_ptr() == out.data_ptr()
    assert torch.backends.cuda.preferred_blas_library().name.lower() == blas.library(rows, 4128, 4096, 2)
    expected = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    assert (found.double() - expected).norm() / expected.norm() < 4e-3
