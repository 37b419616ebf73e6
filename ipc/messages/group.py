"""Messages about the group of ranks: their rendezvous, a rank that keeps others waiting, the load of experts.

The rendezvous of torch.distributed is a store of keys and values. The core has it (enginecore/group_store.py); its operations
travel on the worker channel, which only the core's own workers can reach. Members of WorkerMessage, WorkerCommand and
ControlRequest in workers.py.
"""

from typing import Literal

from quire.ipc.messages.message import Message


class StoreRequest(Message, tag="store", frozen=True):
    """One operation of a rank on its generation's store; all but `set` are answered by a StoreValue.

    get: waits until the key exists. add: `value` is a number in ASCII, and so is the answer, the sum. check: "1" if the key
    exists, else "0".
    """

    rank: int
    operation: Literal["set", "get", "add", "check"]
    key: str
    value: bytes = b""


class StoreValue(Message, tag="store_value", frozen=True):
    value: bytes


class PeerSilent(Message, tag="peer_silent", frozen=True):
    """An exchange with the other ranks has failed or takes too long: one of them is dead, stopped or stuck.

    The rank that sends this then waits to be ended; the core finds the rank at fault.
    """

    rank: int
    message: str


class ReportExpertLoad(Message, tag="report_expert_load", frozen=True):
    """Ask for the number of tokens that each rank's experts got: the first rank of each stage answers by stats.ExpertTokens."""

    id: int
