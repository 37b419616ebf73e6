"""Every message between a core and the agents of other hosts (`quire host`): one tagged union per direction, as in frontend.py.

A connection is one generation of workers: it begins with HostHello and HostWelcome, in a form that stays from version to
version, and whoever is not welcome is told why by HostRefused. Then BeginRanks says which ranks the agent starts, what these
say comes as RankMessage, and what they are told goes as PlanRecord and RankCommand. Both sides send a heartbeat twice a second.
Carried by links/core_and_hosts.py; the core's side is enginecore/hosts/remote_host.py, the agent's enginecore/hosts/agent.py.
"""

from quire.ipc.messages.message import Message
from quire.ipc.messages.workers import WorkerCommand, WorkerMessage
from quire.ipc.worker_config import WorkerConfig

HEARTBEAT_INTERVAL_S = 0.5
MAX_TO_HOST = 64 << 20  # bytes: a plan ring's longest record takes 16 MiB
MAX_FROM_HOST = 16 << 20  # a worker's profile, its answer to a control request
MAX_ENGINE_ID = 64


class ModelFiles(Message, frozen=True):
    """A model as another host must have it. files: of config.json and its like the SHA-256, of weights the size, by name."""

    name: str | None  # a folder, which must be at the same place there, or a hub id; None: the bundled model
    revision: str | None
    download_dir: str | None
    with_weights: bool
    files: dict[str, str]


# ---------------------------------------------------------------------------------------------------- core -> agent
class HostHello(Message, tag="hello", frozen=True):
    """The first message of a connection. engine: a core's own name, the same in all of its connections, as long as it lives."""

    version: str
    engine: str


class BeginRanks(Message, tag="begin", frozen=True):
    """Start these ranks; their folder of the model, addresses and descriptors are the agent's to fill in."""

    model: ModelFiles
    configs: list[WorkerConfig]


class PlanRecord(Message, tag="record", frozen=True):
    """A record of the plan ring, for all ranks of this host: int32 words."""

    kind: int
    words: bytes


class RankCommand(Message, tag="command", frozen=True):
    """What a rank is told at its start."""

    rank: int
    command: WorkerCommand


class DumpRankStacks(Message, tag="stacks", frozen=True):
    """Make all ranks write their stacks into the agent's log."""


class EndRanks(Message, tag="end", frozen=True):
    """Kill all ranks now. A connection that ends says the same."""


class CoreHeartbeat(Message, tag="core_heartbeat", frozen=True):
    """The core's loop turns."""


HostCommand = HostHello | BeginRanks | PlanRecord | RankCommand | DumpRankStacks | EndRanks | CoreHeartbeat


# ---------------------------------------------------------------------------------------------------- agent -> core
class HostWelcome(Message, tag="welcome", frozen=True):
    """gpus: their names; none on a host for CPUs."""

    version: str
    gpus: list[str]


class HostRefused(Message, tag="refused", frozen=True):
    """What the core wants cannot be had here; for the user."""

    reason: str


class RankMessage(Message, tag="message", frozen=True):
    """What a rank has said, which names itself."""

    message: WorkerMessage


class RankEnded(Message, tag="ended", frozen=True):
    """A rank's process has ended; code as subprocess has it."""

    rank: int
    code: int


class HostHeartbeat(Message, tag="host_heartbeat", frozen=True):
    """The agent's loop turns. stopped: ranks whose processes a signal has stopped."""

    stopped: list[int]


HostMessage = HostWelcome | HostRefused | RankMessage | RankEnded | HostHeartbeat
