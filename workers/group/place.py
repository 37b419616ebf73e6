"""Where a rank stands among the others, and how an exchange with them fails."""

from typing import NamedTuple

import torch


class ExchangeFailed(Exception):
    """The other ranks cannot be reached, or keep this one waiting for too long. The text is for the user."""


class Place(NamedTuple):
    """Of a rank among the others; exchanges that take longer than timeout_s have failed.

    interface, interface_address: what sockets are bound to. one_host: all ranks are on one host, by the engine's layout.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    interface: str = "lo"
    interface_address: str = "127.0.0.1"
    one_host: bool = True


def first_sentence(error: RuntimeError) -> str:
    """Of torch.distributed's error, which may begin with a place in the source."""
    return str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0]
