"""Convolutions over patches as products: the same results."""

import pytest
import torch
from torch import nn

from quire.workers.models.media.patch_products import use_products


@pytest.mark.parametrize(
    ("conv", "sizes"),
    [
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (2, 4, 4)),
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (4, 9, 13)),
        (nn.Conv2d(3, 5, 7, 7), (21, 30)),
        (nn.Conv2d(3, 5, 7, 7, padding="valid"), (7, 7)),
    ],
)
def test_a_product_gives_what_the_convolution_gives(conv, sizes):
    x = torch.randn(3, 3, *sizes)
    want = conv(x)
    use_products(nn.Sequential(conv))
    assert "forward" in vars(conv)
    torch.testing.assert_close(conv(x), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("conv", [nn.Conv2d(3, 5, 3, 2), nn.Conv2d(3, 3, 2, 2, groups=3), nn.Conv2d(3, 5, 2, 2, padding=1)])
def test_other_convolutions_stay(conv):
    use_products(conv)
    assert "forward" not in vars(conv)
