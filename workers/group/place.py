"""Where a rank stands among the others, and how an exchange with them fails."""

from typing import NamedTuple

import torch


class ExchangeFailed(Exception):
    """The other ranks cannot be reached, or keep this one waiting for too long. The text is for the user."""


class Place(NamedTuple):
    """Of a rank among the others; exchanges that take longer than timeout_s have failed."""

    rank: int
    size: int
    device: torch.device
    timeout_s: float


def first_sentence(error: RuntimeError) -> str:
    """Of torch.distributed's error, which may begin with a place in the source."""
    return str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0]
