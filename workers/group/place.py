"""A rank's place among the others, and the error of a failed exchange with them."""

from typing import NamedTuple

import torch


class ExchangeFailed(Exception):
    """The other ranks cannot be reached, or keep this one waiting for too long. The text is for the user."""


class Place(NamedTuple):
    """A rank's place among the others. Exchanges that take longer than timeout_s have failed.

    Ranks are numbered stage by stage, and each of the `stages` has size / stages ranks. interface, interface_address: the
    address that sockets bind to. stage_on_one_host, one_host: the layout has all ranks of the stage, or all, on one host.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    stages: int = 1
    interface: str = "lo"
    interface_address: str = "127.0.0.1"
    stage_on_one_host: bool = True
    one_host: bool = True

    @property
    def stage(self) -> int:
        return self.rank // self.stage_size

    @property
    def stage_size(self) -> int:
        return self.size // self.stages

    @property
    def within_stage(self) -> "Place":
        """This rank's place among those of its stage."""
        return self._replace(rank=self.rank % self.stage_size, size=self.stage_size, stages=1)

    def in_stage(self, stage: int) -> int:
        """The rank in another stage that this one is linked to; the number of the stage wraps around."""
        return stage % self.stages * self.stage_size + self.rank % self.stage_size


def first_sentence(error: RuntimeError) -> str:
    """The first sentence of torch.distributed's error, without the place in the source that it may begin with."""
    return str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0]
