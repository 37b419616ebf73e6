"""Values for tests of the rounding of recurrent states."""

import torch


def values() -> torch.Tensor:
    """Of many sizes, with float16's subnormal ones and those that it rounds to zero."""
    sizes = 2.0 ** torch.arange(-28, 16).repeat(24)
    return (
        sizes * (1 + torch.rand(len(sizes), generator=torch.Generator().manual_seed(1))) * torch.tensor([1.0, -1.0]).repeat(528)
    )
