"""Messages between the core and its workers: `WorkerMessage` to the core; `WorkerCommand` and `ControlRequest` from it.

Commands come at start-up. Control requests come while workers serve, through the plan ring as all that travels every step
(ipc/step/). What ranks say of each other is in group.py.
"""

from quire.ipc.messages.group import PeerSilent, ReportExpertLoad, StoreRequest, StoreValue
from quire.ipc.messages.message import Message
from quire.ipc.numerics import Numerics
from quire.ipc.sampling import SamplingParams

MAX_CONTROL_BYTES = 1 << 16  # of a control record
MAX_CONTROL_PAYLOAD = 1 << 20  # of its reply


class KVGroup(Message, frozen=True):
    """Layers that share a block table: window 0 sees everything, otherwise the last `window` tokens."""

    window: int
    layers: list[int]


class ProcessorsInfo(Message, frozen=True):
    """The operator's own logits processors, as loaded."""

    all_requests: bool  # see every request, not only those with extra_args
    checks_params: bool  # may refuse a request: ask with CheckParams


class WorkerProfile(Message, tag="profile", frozen=True):
    """A worker has loaded its weights and measured its memory: how many KV blocks it can hold."""

    rank: int
    num_blocks: int
    block_size: int
    kv_groups: list[KVGroup]
    vocab_size: int
    device: str
    weights_bytes: int
    activation_bytes: int
    block_bytes: int
    processors: ProcessorsInfo | None = None
    numerics: Numerics = Numerics()


class WorkerReady(Message, tag="ready", frozen=True):
    """The KV cache is there, graphs are captured: plans may come."""

    rank: int


class WorkerFailed(Message, tag="failed", frozen=True):
    """A worker cannot start or go on; `message` is for the user."""

    rank: int
    message: str


class PromptLogprobsOfRow(Message, tag="prompt_logprobs", frozen=True):
    """Prompt logprobs of a prefill row's chunk; fields as in PromptLogprobs."""

    row: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


SideResult = PromptLogprobsOfRow  # a union: what comes back beside a row's token, each kind with its `row` of the step


class SideResults(Message, tag="side_results", frozen=True):
    """All that a step yields beside its tokens, too large for the result ring; sent by the output rank if there is any."""

    rank: int
    step: int
    results: list[SideResult]


class ControlReply(Message, tag="control_reply", frozen=True):
    """A worker's answer to a control record. `error`: why it could not be done; empty if it was."""

    rank: int
    id: int
    error: str
    payload: bytes  # at most MAX_CONTROL_PAYLOAD; what it is depends on the request


WorkerMessage = WorkerProfile | WorkerReady | WorkerFailed | SideResults | ControlReply | StoreRequest | PeerSilent


class DumpStacks(Message, tag="dump_stacks", frozen=True):
    """Say what every thread does: answered by text in UTF-8."""

    id: int


class CaptureMaskedSamplingGraphs(Message, tag="capture_masked_sampling_graphs", frozen=True):
    """Steps with grammar masks will come: make ready for them, a little after each step. Answered at once, by nothing."""

    id: int


class StartProfiler(Message, tag="start_profiler", frozen=True):
    """Record what this worker does from now on."""

    id: int


class StopProfiler(Message, tag="stop_profiler", frozen=True):
    """Write the trace: answered by the file's name in UTF-8."""

    id: int


class CheckParams(Message, tag="check_params", frozen=True):
    """Whether the operator's logits processors can deal with these: answered by why not, in UTF-8, or nothing."""

    id: int
    params: SamplingParams


# What a serving worker is told between two steps, in a record of the plan ring.
ControlRequest = DumpStacks | CaptureMaskedSamplingGraphs | StartProfiler | StopProfiler | CheckParams | ReportExpertLoad


class AllocateKV(Message, tag="allocate_kv", frozen=True):
    """The core's decision, the least of all workers' num_blocks."""

    num_blocks: int


WorkerCommand = AllocateKV | StoreValue
