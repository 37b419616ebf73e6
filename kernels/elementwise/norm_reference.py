"""RMSNorm and LayerNorm in plain torch: the oracle of `norm`, with the same signatures; norm_cpu uses it except for float32.

Formulas and roundings: norm.py.

x, residual, out [T, H]; weight [H], or [N, H] if the N rows of each x [T, N, H] have weights of their own.
"""

from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

# How RMSNorm's weight is applied: after the normalized value was rounded to x's dtype (LlamaRMSNorm), in float32 before it is
# rounded (Olmo2RMSNorm), or as 1 + weight in float32 (Gemma2RMSNorm).
Weighs = Literal["rounded", "wide", "plus_one"]


class Term(NamedTuple):
    """All a norm's kernel needs to add LoRA adapters' scale * B h to its x [T, H] itself: those of a layer of one piece."""

    h: torch.Tensor  # float32 [T, R], or partial sums [S, T, R]
    b: torch.Tensor  # and the others, as of kernels/lora/tables.py
    ranks: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor  # int32 [T]
    rank_step: int  # B's rows are padded to a multiple of it


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, *, weighs: Weighs = "rounded"
) -> torch.Tensor:
    """The normalized rows of x, written to `out` if given (which may be x itself)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weighs == "rounded":
        y = weight * normed.to(x.dtype)
    elif weighs == "wide":
        y = (weight * normed).to(x.dtype)
    else:
        y = (normed * (1.0 + weight.float())).to(x.dtype)
    return y if out is None else out.copy_(y)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm's rows of x, computed in float32 and rounded once."""
    y = F.layer_norm(x.float(), x.shape[-1:], None, None, eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype) if out is None else out.copy_(y)


def add(x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """residual += scale * x in place, the product rounded to x's dtype."""
    residual += x if scale == 1.0 else x * scale
    return residual


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add x to the residual in place and return the norm of the sum; `out` may be x itself."""
    return rms_norm(add(x, residual), weight, eps, out)
