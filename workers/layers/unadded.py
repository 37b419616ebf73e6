"""A product to which an adapter's second half is still to be added: by the kernel of the norm behind it, or by `settled`."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.kernels.elementwise.norm_reference import Term


class Unadded(NamedTuple):
    """What `split_k` of a layer with an adapter may return: only a norm's `add` looks at it."""

    x: torch.Tensor  # [T, H], or partial sums [S, T, H]
    term: Term
    expand: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # `Adapter.expand`

    def settled(self) -> torch.Tensor:
        """x, with the adapter added."""
        self.expand(self.term.h, self.x if self.x.dim() == 2 else self.x[0])
        return self.x


def settled(x: torch.Tensor | Unadded) -> torch.Tensor:
    return x.settled() if isinstance(x, Unadded) else x
