"""Convolutions over patches that do not overlap, as products.

An encoder's first layer is a convolution with steps as wide as its kernel. As one product it takes less time on a GPU, and
in float32 it is not rounded to TF32, which is what convolutions do there by default. The result is the same sum.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def use_products(model: nn.Module) -> None:
    """Let all such convolutions of a model compute by products, in place. Their parameters stay."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and _is_of_patches(module):
            module.__dict__["forward"] = partial(_product, module)


def _is_of_patches(conv: nn.Conv2d | nn.Conv3d) -> bool:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and conv.padding in ("valid", (0,) * len(conv.kernel_size))
    return plain and tuple(conv.stride) == tuple(conv.kernel_size)


def _product(conv: nn.Conv2d | nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    """x [N, C, *sizes] -> [N, out, *(size // kernel)]"""
    kernel, n = tuple(conv.kernel_size), len(conv.kernel_size)
    counts = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
    for axis, (count, k) in enumerate(zip(counts, kernel, strict=True)):
        x = x.narrow(2 + axis, 0, count * k)
    split = [part for pair in zip(counts, kernel, strict=True) for part in pair]
    order = [0, *range(2, 2 + 2 * n, 2), 1, *range(3, 3 + 2 * n, 2)]
    patches = x.reshape(*x.shape[:2], *split).permute(order).reshape(-1, conv.weight[0].numel())
    out = F.linear(patches, conv.weight.flatten(1), conv.bias)
    return out.view(len(x), *counts, -1).movedim(-1, 1)
