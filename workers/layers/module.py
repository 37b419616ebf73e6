"""The base classes of layers: a Module that is called without hooks, and the WeightOwner, which owns parameters.

loading/ asks a weight owner for three things: loaders of the checkpoint's tensors, dummy values, and to `finish` once all its
values are there. Nothing else has parameters.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from quire.workers.loading.weight_loader import WeightLoader


class Module(nn.Module):
    """An nn.Module that is called as its `forward` directly: without hooks, and without the microsecond of looking for them."""

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "forward" in vars(cls):
            cls.__call__ = cls.forward  # type: ignore[method-assign]


class WeightOwner(Module):
    """A module with parameters of its own."""

    opaque_bytes = 0  # of what it holds besides parameters
    is_tied = False  # its weight is another owner's, which must be loaded before this one is finished

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        """(checkpoint name, weight loader) of every tensor that this owner takes; `name` is its own in the model."""
        raise NotImplementedError

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        """Values for --load-format dummy: each parameter is uniform on ±limit, drawn in the order in which they were made."""
        for parameter in self.parameters(recurse=False):
            parameter.uniform_(-limit, limit, generator=generator)

    def finish(self) -> None:
        """Repack, derive and release, once all values are there. Called once, on the main thread, before the first product."""


def fill_cut(
    parameter: torch.Tensor,
    shape: tuple[int, ...],
    cut: Callable[[torch.Tensor], torch.Tensor],
    limit: float,
    generator: torch.Generator,
) -> None:
    """Dummy values of a parameter: `cut` takes this rank's shard out of a tensor of `shape`, which all ranks draw alike."""
    parameter.copy_(cut(parameter.new_empty(shape).uniform_(-limit, limit, generator=generator)))


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without values yet."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
