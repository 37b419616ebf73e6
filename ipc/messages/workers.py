"""Messages between the core and its workers: `WorkerMessage` to the core; `WorkerCommand` and `ControlRequest` from it.

Commands come at start-up. Control requests come while workers serve, through the plan ring, like the data of every step
(ipc/step/). Messages about the group of ranks are in group.py.
"""

from typing import Literal

from quire.ipc.adapters import AdapterPlan
from quire.ipc.messages.group import PeerSilent, ReportExpertLoad, StoreRequest, StoreValue
from quire.ipc.messages.media import MediaInfo
from quire.ipc.messages.message import Message
from quire.ipc.numerics import Numerics
from quire.ipc.pooling import PoolingInfo
from quire.ipc.sampling import SamplingParams

MAX_CONTROL_BYTES = 12 << 20  # bytes of a control record: a plan of an adapter of 37,000 tensors
MAX_CONTROL_PAYLOAD = 1 << 20  # bytes of its reply


class FullAttention(Message, tag="full", frozen=True):
    """Layers whose tokens attend to all tokens before them."""


class SlidingWindow(Message, tag="window", frozen=True):
    """Layers whose tokens attend to the last `tokens` tokens, themselves included."""

    tokens: int


KVGroupKind = FullAttention | SlidingWindow


class KVGroup(Message, frozen=True):
    """Layers that share a block table."""

    kind: KVGroupKind
    layers: list[int]


class ProcessorsInfo(Message, frozen=True):
    """The operator's own logits processors, as loaded."""

    all_requests: bool  # they see every request, not only those with extra_args
    checks_params: bool  # they may refuse a request: ask with CheckParams


class WorkerProfile(Message, tag="profile", frozen=True):
    """A worker has loaded its weights and measured its memory; num_blocks, num_states: KV blocks and recurrent
    states that it can hold, with the null block and the dummy state; num_states is 0 in models without states."""

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
    num_states: int = 0
    state_bytes: int = 0
    pooling: PoolingInfo | None = None  # how the model pools; None: it does not
    media: MediaInfo | None = None  # what it takes beside text; None: nothing


class WorkerReady(Message, tag="ready", frozen=True):
    """The KV cache is allocated and graphs are captured: plans may come."""

    rank: int


class WorkerFailed(Message, tag="failed", frozen=True):
    """A worker cannot start or continue; `message` is for the user."""

    rank: int
    message: str


ItemFault = Literal["memory", "not_finite", "error"]


class ItemFailed(Message, tag="item_failed", frozen=True):
    """A worker could not encode an item, by its number on the plan ring. Its rows are zeros, and the step goes on, so that all
    ranks agree; what is computed from these rows means nothing."""

    rank: int
    number: int
    fault: ItemFault


class ItemsEncoded(Message, tag="items_encoded", frozen=True):
    """A rank with an encoder has told of all items that it could not encode for a step: one for each step with runs, behind
    its ItemFailed. The core takes the step's results after those of all such ranks."""

    rank: int
    step: int


class PromptLogprobsOfRow(Message, tag="prompt_logprobs", frozen=True):
    """Prompt logprobs of a prefill row's chunk; fields as in PromptLogprobs."""

    row: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    @property
    def rows(self) -> list[int]:
        return [self.row]


class PooledRows(Message, tag="pooled", frozen=True):
    """Vectors and scores of all rows of a step that have some; shapes and data as in Pooled, without starts and ends."""

    of_rows: bytes  # int32 [n], rows of the step
    shapes: bytes  # int32 [n, 2]
    data: memoryview  # float32; of megabytes, so it is not copied out of the message

    @property
    def rows(self) -> list[int]:
        return list(memoryview(self.of_rows).cast("i"))


SideResult = PromptLogprobsOfRow | PooledRows  # results beside tokens, each kind with its `rows` of the step


class SideResults(Message, tag="side_results", frozen=True):
    """A step's results beside its tokens, too large for the result ring; sent by the output rank if there are any."""

    rank: int
    step: int
    results: list[SideResult]


class ControlReply(Message, tag="control_reply", frozen=True):
    """A worker's answer to a control record. `error`: why it could not be done; empty if it was."""

    rank: int
    id: int
    error: str
    payload: bytes  # at most MAX_CONTROL_PAYLOAD; its content depends on the request


WorkerMessage = (
    WorkerProfile
    | WorkerReady
    | WorkerFailed
    | ItemFailed
    | ItemsEncoded
    | SideResults
    | ControlReply
    | StoreRequest
    | PeerSilent
)


class DumpStacks(Message, tag="dump_stacks", frozen=True):
    """Return the stacks of all threads: answered by text in UTF-8."""

    id: int


class CaptureMaskedSamplingGraphs(Message, tag="capture_masked_sampling_graphs", frozen=True):
    """Steps with grammar masks will come: prepare for them, a little after each step. Answered at once, by nothing."""

    id: int


class StartProfiler(Message, tag="start_profiler", frozen=True):
    """Start the profiler."""

    id: int


class StopProfiler(Message, tag="stop_profiler", frozen=True):
    """Stop the profiler and write its trace: answered by the file's name in UTF-8."""

    id: int


class CheckParams(Message, tag="check_params", frozen=True):
    """Whether the operator's logits processors accept these params: answered by the reason if not, in UTF-8, or by nothing."""

    id: int
    params: SamplingParams


class LoadAdapter(Message, tag="load_adapter", frozen=True):
    """Read an adapter, if the host has no copy of it, and put it into an adapter slot, which nothing uses now; slot HOST_ONLY:
    only read and check it. Answered by nothing, later, when that is done; steps go on meanwhile."""

    id: int
    number: int
    slot: int
    plan: AdapterPlan


class ForgetAdapter(Message, tag="forget_adapter", frozen=True):
    """No sequence uses this adapter any more: drop copies in host memory. Answered at once, by nothing."""

    id: int
    number: int


# Requests to a serving worker between two steps, in a record of the plan ring.
ControlRequest = (
    DumpStacks
    | CaptureMaskedSamplingGraphs
    | StartProfiler
    | StopProfiler
    | CheckParams
    | ReportExpertLoad
    | LoadAdapter
    | ForgetAdapter
)


class AllocateKV(Message, tag="allocate_kv", frozen=True):
    """The core's decision: the least of all workers' num_blocks, and of their num_states."""

    num_blocks: int
    num_states: int = 0


WorkerCommand = AllocateKV | StoreValue
