"""What the ranks of a model say to the core of each other: how they find one another, and that one keeps them waiting.

The rendezvous of torch.distributed is a store of keys and values. It is the core's (enginecore/group_store.py), and travels on
the worker channel, which only the core's own workers can reach. Part of WorkerMessage, WorkerCommand and ControlRequest, see
workers.py.
"""

from typing import Literal

from quire.ipc.messages.message import Message


class StoreRequest(Message, tag="store", frozen=True):
    """One operation of a rank on its generation's store; all but `set` are answered by a StoreValue.

    get: waits for the key to be there. add: `value` is a number in ASCII, so is the answer, the sum. check: "1" if the key is
    there, else "0".
    """

    rank: int
    operation: Literal["set", "get", "add", "check"]
    key: str
    value: bytes = b""


class StoreValue(Message, tag="store_value", frozen=True):
    value: bytes


class PeerSilent(Message, tag="peer_silent", frozen=True):
    """An exchange with the other ranks has failed or takes too long: one of them is dead, stopped or stuck.

    Who says so waits for its end; whose fault it is, the core finds out.
    """

    rank: int
    message: str


class ReportExpertLoad(Message, tag="report_expert_load", frozen=True):
    """How many tokens the experts of each rank got: answered by stats.ExpertTokens, by the first of each stage."""

    id: int
