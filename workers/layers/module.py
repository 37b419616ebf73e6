"""The base classes of layers: a Module that is called without hooks, and the WeightOwner, which owns parameters.

A weight owner is asked three things by loading/: where the checkpoint's tensors go, what its dummy values are, and to `finish`
once all its values are there. Parameters live nowhere else.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from quire.workers.loading.weight_loader import WeightLoader


class Module(nn.Module):
    """nn.Module whose call is its `forward` and nothing else: no hooks, nor the microsecond that looking for them takes."""

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "forward" in vars(cls):
            cls.__call__ = cls.forward  # type: ignore[method-assign]


class WeightOwner(Module):
    """A module with parameters of its own."""

    is_tied = False  # to another owner's, which must be there before it is finished

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        """(checkpoint name, target) of every tensor this owner takes; `name` is its own in the model."""
        raise NotImplementedError

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        """Values for --load-format dummy: each parameter uniform on ±limit, in the order in which they were made."""
        for parameter in self.parameters(recurse=False):
            parameter.uniform_(-limit, limit, generator=generator)

    def finish(self) -> None:
        """All values are there: repack, derive, release. Called once, on the main thread, before the first product."""


def fill_cut(
    parameter: torch.Tensor,
    shape: tuple[int, ...],
    cut: Callable[[torch.Tensor], torch.Tensor],
    limit: float,
    generator: torch.Generator,
) -> None:
    """Dummy values of a parameter: this rank's part of the checkpoint's tensor of `shape`, which all ranks draw alike."""
    parameter.copy_(cut(parameter.new_empty(shape).uniform_(-limit, limit, generator=generator)))


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without values yet."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
