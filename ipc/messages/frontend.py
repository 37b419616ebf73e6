"""Messages between frontends and the core: `FrontendMessage` to the core, `CoreMessage` from it.

Each message carries the core's epoch, a number drawn when the core starts, so that a message meant for an earlier core is
refused. A sequence is named by one integer, its key: `request id << 8 | child`, child < n <= 128.
"""

from typing import Annotated, Literal

import msgspec

from quire.ipc.adapters import AdapterInfo, AdapterLimits, AdapterUse
from quire.ipc.messages.media import MediaData, MediaGone, MediaInfo, MediaItem, MediaWanted
from quire.ipc.messages.message import Message
from quire.ipc.messages.stats import AdapterStats, CacheInfo, EngineStats
from quire.ipc.messages.utilities import UtilityAnswer, UtilityCall
from quire.ipc.numerics import Numerics
from quire.ipc.pooling import PoolingInfo, PoolingParams
from quire.ipc.sampling import SamplingParams

PROTOCOL_VERSION = 13

# Limits on one message, in bytes. Beyond them a receiver drops the sender (a frontend) or the message (the core's).
MAX_FRONTEND_MESSAGE = 64 << 20  # a request: a prompt of 8 M tokens as int32 would fit
MAX_TOGETHER = 256  # messages of a frontend that may travel as the frames of one ZeroMQ message,
TOGETHER_BYTES = 1 << 20  # of at most this many bytes; a larger one travels alone
MAX_REQUEST_ID = (1 << 55) - 1
MAX_ABORTED = 65536  # ids in one Abort
MAX_TENANT_NAME = 128  # characters

FinishReason = Literal["stop", "length", "abort", "error"]
# why a request ended without a result
ErrorCode = Literal[
    "invalid", "not_found", "too_long", "overloaded", "rate_limited", "deadline_exceeded", "unavailable", "engine_error",
    "media_failed",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------- frontend -> core
class Hello(Message, tag="hello", frozen=True):
    """First message of a connection: the frontend's protocol version. Answered by Welcome or Refused."""

    protocol: int


class GetFile(Message, tag="get_file", frozen=True):
    """Ask for one of the files that Welcome lists."""

    epoch: int
    name: str


# A request has inputs (a prompt), a task (what to do with it), and fields of any task. An extension is an optional field at the
# end of the struct that it belongs to, None by default, which costs a request without it one byte: media items belong to
# TokenInputs, a grammar to Generate, an adapter to AddRequest. The core's preparation.py prepares what a request needs.
class TokenInputs(Message, tag="tokens", frozen=True):
    """A prompt as token ids."""

    token_ids: bytes  # int32, at least one token
    marks: list[int] = []  # numbers of tokens after which other prompts may go on: the first 8 count
    items: list[MediaItem] | None = None  # by their places in the prompt, which do not overlap


class Candidates(Message, frozen=True):
    """For a beam search: also return the likeliest `num` next tokens (1 to MAX_CANDIDATES), beside the one that is sampled.

    They come as PromptLogprobs of the position after the prompt; its own logprob and rank mean nothing. Requests of the same
    `search`, a number that the frontend chooses, share their prefixes even if nothing else is cached.
    """

    num: int
    search: int


class Resume(Message, frozen=True):
    """The request ran on an engine that was lost. Its children go on after the outputs that have come from there.

    No token, and no logprobs of the prompt, are sent again for a child that has outputs.
    """

    outputs: list[bytes | None]  # by child: its output so far, int32; None: the child has ended
    seed: int | None = None  # as in Started; None if that has not come: then the engine draws another


class Generate(Message, tag="generate", frozen=True):
    """Sample n continuations. They are numbered 0 to n - 1; all answers name their key (id, child)."""

    params: SamplingParams  # max_tokens None: to the end of the context
    candidates: Candidates | None = None
    resume: Resume | None = None

    @property
    def num_sequences(self) -> int:
        return self.params.n

    @property
    def is_resumed(self) -> bool:
        """Whether an engine that was lost has run it."""
        return self.resume is not None

    @property
    def may_hit(self) -> bool:
        """Whether cached blocks of its prompt can be used."""
        return not self.has_early_results and not self.params.skip_reading_prefix_cache

    @property
    def has_early_results(self) -> bool:
        """Whether results come before its first token."""
        return self.params.prompt_logprobs is not None

    @property
    def is_search_step(self) -> bool:
        return self.candidates is not None


class Pool(Message, tag="pool", frozen=True):
    """Make a vector or scores of each prompt. The prompts are numbered from 0; answers name their key (id, number)."""

    params: PoolingParams
    lengths: list[int] = []  # tokens of each prompt in TokenInputs, at most 128 of them; empty: it is one
    is_resumed: bool = False  # an engine that was lost has run it
    seconds: list[int] = []  # where each prompt's second text begins, for models with token types; 0: it has none; empty: all
    # For a model of token vectors: queries' vectors, float32 [tokens, elements], and which of them each prompt, a document, is
    # compared with: its result is that score. Empty: results are vectors.
    queries: list[bytes] = []
    query_of: list[int] = []

    @property
    def num_sequences(self) -> int:
        return len(self.lengths) or 1

    @property
    def may_hit(self) -> bool:
        """Whether cached blocks may be used, as far as a frontend knows: of several prompts it does not look any up."""
        return self.num_sequences == 1 and not self.params.skip_reading_prefix_cache

    candidates = None
    has_early_results = False
    is_search_step = False


RequestInputs = TokenInputs  # a tagged union of one member, for now
RequestTask = Generate | Pool


class Tenant(Message, frozen=True):
    """For whom a request runs: an API key, or several with one name, and what they may have of one engine.

    Requests of one name share these limits; those of the latest request count. label: for metrics; empty: not shown there.
    """

    name: str = ""  # at most MAX_TENANT_NAME characters, and so the label
    label: str = ""
    weight: float = 1.0  # of its share, among the tenants that wait
    max_running: int | None = None  # sequences, at least 1; None: no limit
    max_waiting: int | None = None  # sequences, beyond those that could run
    tokens_per_minute: float = 0.0  # prompt tokens that are computed, and outputs; 0: no limit
    best_priority: int | None = None  # requests that bring a lower number are treated as if they had this one


class AddRequest(Message, tag="add", frozen=True):
    """A new request: a task over inputs."""

    epoch: int
    id: int  # chosen by the frontend, unique within its connection, 0 to MAX_REQUEST_ID
    inputs: RequestInputs
    task: RequestTask
    priority: int = 0  # lower runs first, under --scheduling-policy priority; 0 under other policies
    cache_salt: str = ""  # only requests of equal salt share cached prefixes
    arrival_time: float = 0.0  # seconds since the Unix epoch, for metrics and the order of requests
    tenant: Tenant | None = None  # None: all such requests are one tenant's
    timeout_s: float = 0.0  # seconds that are left until it must have ended; 0: no limit
    is_bounded: bool = False  # refused where it would wait longer than --max-queue-s
    adapter: AdapterUse | None = None  # None: the model itself


class Abort(Message, tag="abort", frozen=True):
    """Drop these requests (all their children) now. Unknown ids are ignored: they may just have finished."""

    epoch: int
    ids: Annotated[list[int], msgspec.Meta(max_length=MAX_ABORTED)]


class Finish(Message, tag="finish", frozen=True):
    """The frontend has ended one sequence itself (a stop string): free it and send no further output."""

    epoch: int
    key: int


class Ping(Message, tag="ping", frozen=True):
    """A frontend's heartbeat, at least every 2 s. `epoch` 0 before the Welcome. A silent frontend's requests are aborted."""

    epoch: int


class Utility(Message, tag="utility", frozen=True):
    """A call to the engine that is no request; answered once, by a UtilityResult of the same id."""

    epoch: int
    id: int  # chosen by the frontend
    call: UtilityCall


FrontendMessage = Hello | GetFile | AddRequest | Abort | Finish | Ping | Utility | MediaData | MediaGone


# ------------------------------------------------------------------------------------------------- core -> frontend
class FileInfo(Message, frozen=True):
    name: str  # "tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
    digest: str  # sha256, hex
    size: int


class EngineLimits(Message, frozen=True):
    max_model_len: int  # most tokens of a sequence, prompt and output; the KV cache has room for at least one such
    vocab_size: int
    max_num_seqs: int
    max_logprobs: int
    takes_marks: bool = False  # prompts should bring TokenInputs.marks
    pooling: PoolingInfo | None = None  # how the model pools; None: it does not
    adapters: AdapterLimits | None = None  # None: the engine takes no adapters
    media: MediaInfo | None = None  # None: it takes text alone
    is_cut_by_steps: bool = False  # an encoder's texts could be longer if its steps had room for them

    @property
    def too_long(self) -> str:
        """The end of a message about a prompt to be pooled that is too long."""
        if self.is_cut_by_steps:
            return f"at most {self.max_model_len} fit into a step, which --max-num-batched-tokens makes longer at the start"
        return f"at most {self.max_model_len} fit into the context"

    @property
    def generates(self) -> bool:
        return self.pooling is None or self.pooling.generates

    @property
    def tasks(self) -> list[str]:
        """The kinds of requests that it takes."""
        return ["generate"] * self.generates + list(self.pooling.tasks if self.pooling is not None else ())


class DraftsTold(Message, frozen=True):
    """The counts of drafts that answers have (--per-request-spec-decode-metrics)."""

    by_step: bool  # besides totals
    num_speculative_tokens: int


class Welcome(Message, tag="welcome", frozen=True):
    """Answer to Hello: everything a frontend needs to serve, but for the files, which it gets by GetFile."""

    epoch: int
    protocol: int
    served_model_names: list[str]
    limits: EngineLimits
    files: list[FileInfo]
    eos_token_ids: list[int]
    version: str
    created: int  # seconds since the Unix epoch, for /v1/models
    step_timeout_s: float
    spins: bool = False  # the core spins, as its model needs no CPU; a frontend may spin, too, if there are cores left
    cache: CacheInfo | None = None  # for /metrics
    model_digest: str = ""  # equal for engines with the same model
    numerics: Numerics = Numerics()  # equal for engines with equal answers
    replay: bool = False  # requests outlive their processes: when this core is lost, frontends send theirs again
    drafts_told: DraftsTold | None = None  # None: nothing
    adapters: list[AdapterInfo] = []  # those that are loaded


class File(Message, tag="file", frozen=True):
    epoch: int
    name: str
    digest: str
    data: bytes


class Refused(Message, tag="refused", frozen=True):
    """The core refuses this frontend: wrong protocol, or a message with a stale epoch. Reconnect with Hello."""

    epoch: int
    reason: str


class RequestError(Message, tag="request_error", frozen=True):
    """A request failed before or while it ran, by itself or because the engine failed. Ends all its children."""

    epoch: int
    id: int
    code: ErrorCode
    message: str
    retry_after_s: int = 0  # when it may be sent again; 0: not known


class Finished(Message, frozen=True):
    """The end of one sequence. `stop_token_id`: the token that ended it, if one did (also the last token sent)."""

    key: int
    reason: FinishReason
    stop_token_id: int | None = None


class TokenLogprobs(Message, frozen=True, gc=False):
    """Log-probabilities that belong to one token of `StepOutputs`: raw, before penalties, temperature and masks."""

    logprob: float  # of the sampled token
    rank: int  # 1 = the most likely
    top_ids: bytes  # int32, most likely first
    top_logprobs: bytes  # float32


class Started(Message, frozen=True):
    """Sent with a sequence's first token."""

    key: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    queue_s: float  # seconds from arrival to its first step
    seed: int = 0  # of the request's first child, whether it came with the request or was drawn


class StepOutputs(Message, tag="outputs", frozen=True):
    """All new tokens for one frontend, of one or (if it was slow) several steps. A key may repeat, its tokens in order.

    `seq` counts this connection's StepOutputs from 0; a gap means a lost message, which a frontend treats as a lost core.
    """

    epoch: int
    seq: int
    keys: bytes  # int64
    tokens: bytes  # int32, one per key
    finished: list[Finished] = []
    started: list[Started] = []
    logprobs: list[TokenLogprobs] = []  # for the tokens of requests with logprobs, in the order of keys
    # with Welcome.drafts_told: int64 [n, 3], each sequence with drafts in a step: its key, how many were verified, and accepted
    drafts: bytes = b""


class PromptLogprobs(Message, tag="prompt_logprobs", frozen=True):
    """Log-probabilities of the prompt's tokens from position `start` on (position 0 has none). Sent before the first token.

    For each position: the token's own logprob and rank, and the `num_top` most likely tokens.
    """

    epoch: int
    id: int
    start: int
    num_top: int
    logprobs: bytes  # float32 [positions]
    ranks: bytes  # int32 [positions]
    top_ids: bytes  # int32 [positions, num_top]
    top_logprobs: bytes  # float32 [positions, num_top]


class Pooled(Message, tag="pooled", frozen=True):
    """Vectors and scores of one frontend that a step has made: n results, each a row or, of a task with a result for each
    token, several. A prompt that was computed in chunks has such rows of every chunk, in order; its last ones end it.

    A result of rows that `start` at 0 replaces what came of the same key before: its workers had died.
    """

    epoch: int
    keys: bytes  # int64 [n]
    shapes: bytes  # int32 [n, 4]: rows (or VECTOR), columns, position of the first row, whether it ends the prompt
    cached: bytes  # int32 [n]: prompt tokens found in the prefix cache
    data: memoryview  # float32, all results one after the other


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """The core's loop is alive: sent to every frontend at least every 0.5 s, by the loop itself. Feeds /health and /metrics."""

    epoch: int
    oldest_step_s: float  # age of the oldest step in flight, 0.0 when there is none
    num_running: int
    num_waiting: int
    kv_usage: float  # 0 to 1
    prompt_tokens: int  # totals since start
    cached_tokens: int
    generation_tokens: int
    preemptions: int
    worker_restarts: int
    ready: bool  # False while the workers (re)start
    stats: EngineStats | None = None  # None until the loop makes steps
    replays: int = 0  # requests that ran again after their workers or their engine had died; a total, too
    replays_given_up: int = 0  # requests that ended because they ran at two deaths without a token between
    num_states: int = 0  # recurrent states that sequences can use; 0: the model has none
    states_used: int = 0  # of them, those of running sequences
    adapters: AdapterStats | None = None  # None: the engine takes no adapters


class AdaptersChanged(Message, tag="adapters_changed", frozen=True):
    """Adapters were loaded or unloaded; sent to every frontend. A name in `added` may replace one that was there before."""

    epoch: int
    added: list[AdapterInfo]
    removed: list[str]


class UtilityResult(Message, tag="utility_result", frozen=True):
    epoch: int
    id: int
    answer: UtilityAnswer


class ShuttingDown(Message, tag="shutting_down", frozen=True):
    """The core stops: frontends finish or fail their requests, and reconnect later."""

    epoch: int


CoreMessage = (
    Welcome
    | File
    | Refused
    | RequestError
    | StepOutputs
    | PromptLogprobs
    | Pooled
    | Heartbeat
    | AdaptersChanged
    | MediaWanted
    | UtilityResult
    | ShuttingDown
)


def sequence_key(request_id: int, child: int) -> int:
    """The key of child `child` of request `request_id`."""
    return request_id << 8 | child
