"""Every message between a core and the agents of other hosts (`quire host`): one tagged union per direction, as in frontend.py.

A connection is for one generation of workers. It begins with HostHello and HostWelcome, in a form that no version changes; a
HostRefused says why a core is refused. Then BeginRanks says which ranks the agent starts. Their messages come as RankMessage;
plans and commands for them go as PlanRecord and RankCommand. Both sides send a heartbeat twice a second. Carried by
links/core_and_hosts.py; the core's side is enginecore/hosts/remote_host.py, the agent's is enginecore/hosts/agent.py.
"""

from quire.ipc.messages.message import Message
from quire.ipc.messages.workers import WorkerCommand, WorkerMessage
from quire.ipc.worker_config import WorkerConfig

HEARTBEAT_INTERVAL_S = 0.5
MAX_TO_HOST = 64 << 20  # bytes: a plan ring's longest record takes 16 MiB
MAX_FROM_HOST = 16 << 20  # bytes: a worker's profile, its answer to a control request
MAX_ENGINE_ID = 64


class ModelFiles(Message, frozen=True):
    """A model that another host must have, too. files: name -> SHA-256 of config.json and its like, size of weights."""

    name: str | None  # a folder, with the same path there, or a hub id; None: the bundled model
    revision: str | None
    download_dir: str | None
    with_weights: bool
    files: dict[str, str]


# ---------------------------------------------------------------------------------------------------- core -> agent
class HostHello(Message, tag="hello", frozen=True):
    """The first message of a connection. engine: names the core, in all of its connections, as long as it lives."""

    version: str
    engine: str


class BeginRanks(Message, tag="begin", frozen=True):
    """Start these ranks. The agent fills in the model's folder, addresses and descriptors."""

    model: ModelFiles
    configs: list[WorkerConfig]


class PlanRecord(Message, tag="record", frozen=True):
    """A record of the plan ring, for all ranks of this host: int32 words."""

    kind: int
    words: bytes


class RankCommand(Message, tag="command", frozen=True):
    """A command for a rank at its start."""

    rank: int
    command: WorkerCommand


class DumpRankStacks(Message, tag="stacks", frozen=True):
    """Make all ranks write their stacks into the agent's log."""


class EndRanks(Message, tag="end", frozen=True):
    """Kill all ranks now. The end of the connection means the same."""


class CoreHeartbeat(Message, tag="core_heartbeat", frozen=True):
    """The core's loop is alive."""


HostCommand = HostHello | BeginRanks | PlanRecord | RankCommand | DumpRankStacks | EndRanks | CoreHeartbeat


# ---------------------------------------------------------------------------------------------------- agent -> core
class HostWelcome(Message, tag="welcome", frozen=True):
    """The agent accepts the core. gpus: their names; empty on a host for CPUs."""

    version: str
    gpus: list[str]


class HostRefused(Message, tag="refused", frozen=True):
    """The agent cannot do what the core wants; the reason is for the user."""

    reason: str


class RankMessage(Message, tag="message", frozen=True):
    """A rank's message, which names the rank."""

    message: WorkerMessage


class RankEnded(Message, tag="ended", frozen=True):
    """A rank's process has ended; code as subprocess has it."""

    rank: int
    code: int


class HostHeartbeat(Message, tag="host_heartbeat", frozen=True):
    """The agent's loop is alive. stopped: ranks with processes that a signal has stopped."""

    stopped: list[int]


HostMessage = HostWelcome | HostRefused | RankMessage | RankEnded | HostHeartbeat
