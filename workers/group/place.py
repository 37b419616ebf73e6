"""Where a rank stands among the others, and how an exchange with them fails."""

from typing import NamedTuple

import torch


class ExchangeFailed(Exception):
    """The other ranks cannot be reached, or keep this one waiting for too long. The text is for the user."""


class Place(NamedTuple):
    """Of a rank among the others; exchanges that take longer than timeout_s have failed.

    Ranks are numbered stage by stage: of `size` there are `stages` times as many as share a stage's layers. interface,
    interface_address: what sockets are bound to. stage_on_one_host, one_host: all ranks of the stage, or all, are on one host,
    by the engine's layout.
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
        """Among those that share the stage."""
        return self._replace(rank=self.rank % self.stage_size, size=self.stage_size, stages=1)

    def in_stage(self, stage: int) -> int:
        """The rank of another stage that this one is linked to; stages go around."""
        return stage % self.stages * self.stage_size + self.rank % self.stage_size


def first_sentence(error: RuntimeError) -> str:
    """Of torch.distributed's error, which may begin with a place in the source."""
    return str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0]
