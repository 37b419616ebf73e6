"""RMSNorm in plain torch: the oracle of `norm`, with the same signatures, and what norm_cpu gives other dtypes than float32 to.

    rms_norm:      y = weight * cast(x / sqrt(mean(x^2) + eps))
    add_rms_norm:  residual += x (in place); y as above, of the residual

The mean and the division are in float32; the normalised value is rounded to x's dtype before the product with the weight, as in
transformers' LlamaRMSNorm. x, residual, out [T, H]; weight [H].
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """The normalised rows of x, written to `out` if given (which may be x itself)."""
    wide = x.float()
    y = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if out is None else out.copy_(y)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add x to the residual in place and return the norm of the sum; `out` may be x itself."""
    residual += x
    return rms_norm(residual, weight, eps, out)
