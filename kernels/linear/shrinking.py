"""Products that compute h = A x of LoRA adapters in the same launch (`tables.Shrink`), where one of our kernels computes both.

One row: the vector kernel of linear.py. 2 to 64 rows: linear_hopper, which knows up to how many adapters it pays.
"""

import torch

from quire.kernels.linear import linear
from quire.kernels.lora.tables import Shrink
from quire.kernels.triton_support.dependent_launch import PLAIN, mode_for
from quire.kernels.tuning.current import current


def shrinking_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    shrink: Shrink,
    *,
    pdl: int = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(`skinny_linear`, h); None: no kernel computes both for these."""
    if current().fixed_order or shrink.a.dtype != x.dtype:
        return None
    if linear.streams(x, weight):
        from quire.kernels.linear import linear_hopper

        return linear_hopper.shrinking_linear(x, weight, bias, out, shrink, split_k=False, pdl=pdl)
    if len(x) > 1 or x.dtype.itemsize != 2 or not x.stride(1) == weight.stride(1) == 1:
        return None
    config = linear.choose(1, *weight.shape)
    if config.dot:
        return None
    out = x.new_empty((1, len(weight))) if out is None else out
    h = shrink.new_h(1)
    linear.launch_skinny(x, weight, bias, out, config, shrink=shrink, h=h, pdl=pdl)
    return out, h


def shrinking_split_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shrink: Shrink, *, dependents: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(`split_linear`, partial sums of h), where `split_linear.pays`; None: no kernel computes both for these."""
    if not linear.streams(x, weight, split_k=True) or shrink.a.dtype != x.dtype:
        return None
    from quire.kernels.linear import linear_hopper

    mode = mode_for(len(x)) if dependents else PLAIN
    return linear_hopper.shrinking_linear(x, weight, bias, None, shrink, split_k=True, pdl=mode)
