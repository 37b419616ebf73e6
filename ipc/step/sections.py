"""The data of a step, declared once: the sections of a plan, the values of a slot, the words of rows, masks and results.

Everything travels as int32 words; a float32 travels as its bits, a uint64 as two words, the low one first. Code that writes or
reads a record gets a field's place by name (`SLOT.at["top_k"]`), so a new value is one line here: the core's writer
(plan_builder.py), the plan (plan.py), the tables on the device (kernels/step/tables.py) and the kernels' offsets follow.

Constants only, without imports of numpy or Quire: this is the one file outside their folder that kernels may import.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

EXTREME = 1e30  # parameters beyond it, or below its inverse, would be infinite or zero in float32
INT32_MAX = 2**31 - 1
STEP_MASK = INT32_MAX  # bits of a step's number that travel
WORDS_OF = {"int32": 1, "float32": 1, "uint64": 2}


class Field(NamedTuple):
    name: str
    dtype: str = "int32"  # a key of WORDS_OF
    length: int = 1  # more than one: a list

    @property
    def words(self) -> int:
        return WORDS_OF[self.dtype] * self.length


class Record:
    """A row of `width` words with names; `at` is the first word of each field."""

    def __init__(self, *fields: Field, width: int = 0) -> None:
        self.fields = fields
        self.at: dict[str, int] = {}
        self.used = 0
        for f in fields:
            self.at[f.name] = self.used
            self.used += f.words
        self.width = max(width, self.used)


class ListField(NamedTuple):
    """A list in a ListRecord. cap: most entries; None: as many as a sequence has tokens or the vocabulary has ids.

    item_cap: most words of an entry that is a list itself, preceded by its length; None: an entry is one word.
    """

    name: str
    dtype: str = "int32"
    cap: int | None = None
    item_cap: int | None = None


class ListRecord:
    """A record with lists: its length in words, its fields, each list's length in words, and then the lists."""

    def __init__(self, fields: tuple[Field, ...], lists: tuple[ListField, ...]) -> None:
        self.fields = fields
        self.lists = lists
        self.at = {f.name: 1 + i for i, f in enumerate(fields)}  # one word each
        self.lengths = 1 + len(fields)  # the first word of the lists' lengths
        self.head = self.lengths + len(lists)  # the first word of the lists


# --------------------------------------------------------------------------------------------------- rows and windows
# A row is a span of a sequence: a slot, a first position, tokens and samples. A decode row computes its window: the last known
# token and the drafts behind it; it samples at each of these places. A prefill row computes any number of tokens and has one
# sample, behind its last token. The device decides how many drafts each row has; plan and core have bounds.
MAX_WINDOW = 16  # most tokens of a decode row
MAX_DRAFTS = MAX_WINDOW - 1
MOST_SAMPLES = 512  # of a step with windows, unless it may have more rows


def max_samples_of(max_num_seqs: int) -> int:
    """Most samples of a step where decode rows have windows."""
    return max(max_num_seqs, min(MAX_WINDOW * max_num_seqs, MOST_SAMPLES))


# ------------------------------------------------------------------------------------------------- recurrent states
# A state is all that recurrent layers keep of a sequence. Only models with such layers have states; ids count from 1.
NO_STATE = 0  # reads as zeros; written, it is the dummy state of padded rows
STATE_CHUNK = 64  # tokens: a state cut at any multiple of it has the same bits, so these are the places to keep one

# ----------------------------------------------------------------------------------------------- limits of the lists
USUAL_LOGPROBS = 20  # alternatives with log-probabilities for a token that the result ring has words for
MAX_LOGPROBS = 128  # most of them: an engine whose --max-logprobs is above the usual ones has a wider ring
MAX_MARKS = 8  # most places in a prompt where the frontend would keep its recurrent state
MAX_CANDIDATES = 128  # most next tokens for a beam search; they are a side result, without words in the result ring
MAX_MASKED_STOPS = 256  # most stop ids of a sequence that min_tokens masks
MAX_LOGIT_BIAS = 1024  # tokens
MAX_BAD_WORDS = 256  # token sequences
MAX_BAD_WORD_TOKENS = 16  # tokens of one of these sequences


# --------------------------------------------------------------------------------------------------- values of a slot
class SlotValue(NamedTuple):
    """A value of a sequence's slot, from the sequence's admission to its end.

    source: the attribute of the core's Sequence, or of its task's SamplingParams (`task.sampling.`). None is sent as `none`, a
    value beyond low or high as that bound. default: the value in an unused slot.
    """

    name: str
    source: str
    dtype: str = "int32"
    default: float = 0
    low: float | None = None
    high: float | None = None
    none: int | None = None


SLOT_VALUES = (
    SlotValue("slot", "slot"),
    SlotValue("temperature", "task.sampling.temperature", "float32", high=EXTREME),  # 0: greedy
    SlotValue("top_k", "task.sampling.top_k", low=0, high=INT32_MAX),  # 0: all
    SlotValue("top_p", "task.sampling.top_p", "float32", 1.0, low=1 / EXTREME),
    SlotValue("min_p", "task.sampling.min_p", "float32"),
    SlotValue("presence", "task.sampling.presence_penalty", "float32"),
    SlotValue("frequency", "task.sampling.frequency_penalty", "float32"),
    SlotValue("repetition", "task.sampling.repetition_penalty", "float32", 1.0, low=1 / EXTREME, high=EXTREME),
    SlotValue("seed", "seed", "uint64"),
    SlotValue("has_processors", "has_processors"),  # 1: it has state in its row of LogitsProcessorPool; 0: kernels skip that
    SlotValue("min_len", "min_len"),  # at positions below it the stop ids in that row are masked
    SlotValue("num_logprobs", "task.sampling.logprobs", default=-1, none=-1),  # -1: none
    SlotValue("state", "blocks.state", default=NO_STATE),  # the sequence's own: decode rows read and write it
    SlotValue("final_len", "final_len", default=INT32_MAX),  # most tokens that it may have: the last one is never computed
    SlotValue("max_window", "max_window", default=1),  # most tokens of its decode rows
    SlotValue("adapter", "adapter_slot", default=-1),  # its adapter's slot on the device; -1: the model itself
    SlotValue("adapter_from", "adapter_from"),  # the position from which on the adapter applies
    SlotValue("rotary_delta", "rotary_delta"),  # of a token behind the prompt: its rotary position less its position
)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


_VALUES = tuple(Field(v.name, v.dtype) for v in SLOT_VALUES)
SLOT = Record(*_VALUES, width=_power_of_two(sum(f.words for f in _VALUES)))  # a Triton block holds a row

# ------------------------------------------------------------------------------------------------------- other records
BLOCK = Record(Field("table"), Field("index"), Field("block"))  # group * num_slots + slot, index in that table, block id

PREFILL = Record(
    Field("slot"),
    Field("start"),  # position of the chunk's first token: earlier tokens are computed already
    Field("length"),
    Field("flags"),  # PREFILL_*
    Field("next_token"),  # the prompt token after the chunk, for the chunk's last prompt logprob; -1 at the prompt's end
    Field("num_prompt_logprobs"),  # or number of candidates; of a row that is pooled: ipc/pooling.PoolRow
    Field("first_state"),  # that the chunk begins with: NO_STATE, the sequence's own, or one that the prefix cache has
    Field("last_state"),  # where it leaves its last state, besides the sequence's own; NO_STATE: nowhere else
    width=8,
)
PREFILL_SAMPLE = 1  # the chunk ends with the last known token: sample the next one
PREFILL_PROMPT_LOGPROBS = 2  # the row has a side result for each position
PREFILL_CANDIDATES = 4  # the row has a side result for its last position, which is sampled
PREFILL_POOL = 8  # the row is pooled: it samples nothing
PREFILL_POOL_END = 16  # and ends with this chunk

PLACE = Record(
    Field("row"),  # of the encoder cache, which has the token's embedding; -1: it is the embedding of its id
    Field("last_visible"),  # the last position that it sees, if that is behind its own; else 0
    Field("rotary_0"),  # positions on the axes of rotation, if the model has several
    Field("rotary_1"),
    Field("rotary_2"),
)

STATE_COPY = Record(Field("source"), Field("target"))  # states, before the step's forward

# Inputs that a step with windows has kept of a decode row, for its recurrent state; before the step's forward.
KEPT_INPUTS = Record(
    Field("slot"),
    Field("keep_at"),  # once so many of its tokens are in the state, the state is kept; -1: what was said before holds
    Field("state"),  # under this id; its own: then the state ends there, and what comes later is dropped
    Field("applies"),  # 1: what is kept is applied now, since no row of this step does it
)

WORD = Record(Field("word"))  # one word of a list

# Rare sampling state of one sequence, sent when it gets its slot.
LOGITS_PROCESSORS = ListRecord(
    (Field("slot"),),
    (
        ListField("prompt_ids"),  # empty without penalties
        ListField("output_ids"),  # all output ids with penalties, else the last MAX_BAD_WORD_TOKENS
        ListField("bias_ids", cap=MAX_LOGIT_BIAS),
        ListField("bias_values", "float32", cap=MAX_LOGIT_BIAS),
        ListField("allowed_ids"),  # empty: all
        ListField("stop_ids", cap=MAX_MASKED_STOPS),  # masked while shorter than the slot's min_len
        ListField("bad_words", cap=MAX_BAD_WORDS, item_cap=MAX_BAD_WORD_TOKENS),
    ),
)


# ---------------------------------------------------------------------------------------------------------- sections
class StepLimits(NamedTuple):
    """Limits of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_groups: int
    max_blocks_per_seq: int
    max_samples: int = 0  # 0: as many as rows, since decode rows have no windows
    has_items: bool = False  # prompts may have items


class Section(NamedTuple):
    """A section of a plan. A plan has the sections that it needs, in the order of SECTIONS.

    applied: by the step's kernels ("device"); by the worker before the forward ("host"); or by the worker between forward and
    sampling ("sampling"). cap: most rows of a section for the device, which has a buffer of fixed size; None for the others.
    """

    name: str
    record: Record
    applied: Literal["device", "host", "sampling"]
    cap: Callable[[StepLimits], int] | None = None


def _max_block_updates(s: StepLimits) -> int:
    """New KV blocks of all rows, and four whole block tables of cached prefixes: Admission stops after three."""
    of_row = 2 + (2 * MAX_WINDOW // s.block_size if s.max_samples else 0)  # a window, and drafts behind it
    return s.num_groups * (of_row * s.max_num_seqs + s.max_num_batched_tokens // s.block_size + 4 * s.max_blocks_per_seq)


SECTIONS = (
    Section("slot_updates", SLOT, "device", lambda s: s.max_num_seqs),  # slots that were given to sequences
    Section("block_updates", BLOCK, "device", _max_block_updates),
    Section("decode_rows", WORD, "device", lambda s: s.max_num_seqs),  # slots; under FLAG_SAME_DECODE_ROWS only their number
    Section("prefill_rows", PREFILL, "device", lambda s: s.max_num_seqs),
    Section("prefill_tokens", WORD, "device", lambda s: s.max_num_batched_tokens),  # of all prefill rows, one after the other
    Section("row_windows", WORD, "device", lambda s: s.max_num_seqs * (s.max_samples > 0)),  # most tokens of each decode row
    Section("places", PLACE, "device", lambda s: s.max_num_batched_tokens * s.has_items),  # of prompt tokens: all or none
    Section("encoder_runs", WORD, "host"),  # of items.py: what is encoded before the step
    Section("logits_processors", WORD, "host"),  # records of LOGITS_PROCESSORS, one after the other
    Section("custom_processors", WORD, "host"),  # records of custom_processors.py, one after the other
    Section("late_queries", WORD, "sampling"),  # of late_queries.py: what the vectors of documents' tokens are compared with
    Section("mask_rows", WORD, "sampling"),  # rows with masks, which follow in the ring in records of KIND_MASK
    Section("kept_inputs", KEPT_INPUTS, "host"),  # first what is said of all slots, then what is applied, then copies
    Section("state_copies", STATE_COPY, "host"),  # of decode rows whose states are to be kept; no two have one target
)

HEADER = Record(
    Field("step"),  # counts from 1; results are tagged with it
    Field("flags"),  # FLAG_*
    Field("sampling_kind"),  # SAMPLING_*
    Field("max_seq_len"),  # upper bound over the step's rows, this step's tokens included
    Field("words"),  # length of the whole plan
    Field("device_words"),  # length of what the device reads: header and sections applied there
    Field(
        "world_size"
    ),  # ranks that the plan is for: set by the sender, as the scheduler does not know it; each rank checks it
    Field("micro_batch"),  # of the decode rows; there are as many micro-batches as pipeline stages
    Field("lag"),  # the decode rows' last tokens were sampled at least this many steps before; 0: no such row
    Field("window"),  # most tokens of a decode row; 1: no row has drafts
    Field("mask_window"),  # most tokens of a decode row with a mask; above 1, drafts come to the core before the tokens
    Field("draft_tokens"),  # most drafts of all rows together; 0 if window is 1
    Field("draft_depth"),  # most drafts of each row that a drafter with a model should make behind this step
    *(Field(name) for s in SECTIONS for name in (f"num_{s.name}", s.name)),  # number of rows of a section, and its first word
    width=32,
)

FLAG_SAME_DECODE_ROWS = 1  # the decode rows are those of the micro-batch's last plan that had them
FLAG_ADAPTERS = 2  # some row has an adapter

# Kinds of sampling: what the sampling graph of this step must be able to do. More bits cost more time.
SAMPLING_RANDOM = 1  # some row has a temperature
SAMPLING_FILTER = 2  # some row has top-k, top-p or min-p
SAMPLING_PROCESSORS = 4  # some row has logits processors
SAMPLING_LOGPROBS = 8  # some row wants logprobs
SAMPLING_MASK = 16  # some row has a mask
SAMPLING_WINDOWS = 64  # decode rows have windows
SAMPLING_CUSTOM = 32  # the operator's logits processors see some row: such sampling is never captured


def max_device_words(limits: StepLimits) -> int:
    """Most words of the part of a plan that goes to the device."""
    return HEADER.width + sum(s.record.width * s.cap(limits) for s in SECTIONS if s.cap is not None)


# ------------------------------------------------------------------------------------------------- masks and results
MASK = Record(Field("step"), Field("num_rows"), Field("kind"))  # then num_rows rows, then their masks if there are any
# In a step with windows a mask is named by its row * MAX_WINDOW + its place in the row's window: see masks.py.
MASKS_NONE = 0  # the rows get no mask, and no token
MASKS_ALLOW = 1  # the rows may be the tokens that their masks allow
MASKS_ANY_TOKEN = 2  # the rows may be any token
MASKS_IN_AREA = 3  # as MASKS_ALLOW, with masks in the ring's area: after the rows its first word and the words of a mask

NO_TOKEN = -1  # result of a row without its mask, or with a mask that allows nothing: the core ends its request
REJECTED = -2  # result of a place in a window that was not reached, because a draft before it is not the sampled token
UNUSED = -3  # result word of a step with windows that no place had, because rows have fewer drafts than the plan allows
FIRST_PLACE = -1  # draft word of a row's first sample, which is behind a token that the core knows


def logprob_record(num_top: int) -> Record:
    """The result words of one sample's log-probabilities, beside its token's word."""
    return Record(
        Field("logprob", "float32"),
        Field("rank"),  # 1 = the most likely
        Field("top_ids", length=num_top),  # most likely first
        Field("top_logprobs", "float32", num_top),
    )


LOGPROBS = logprob_record(USUAL_LOGPROBS)


def first_logprob_word(max_rows: int, max_samples: int = 0) -> int:
    """Where the log-probabilities of a step's results begin: see `result_words`."""
    return 2 * max_samples + max_rows


def draft_words(max_rows: int, max_samples: int) -> slice:
    """Where the drafts of a step are among the words of its results: see `result_words`."""
    return slice(max_samples + max_rows, 2 * max_samples + max_rows)


def result_words(max_rows: int, num_top: int = USUAL_LOGPROBS, max_samples: int = 0) -> int:
    """Number of words of one step's results: all tokens, then, if there are windows (max_samples is not 0), the index of each
    row's first sample and the draft before each sample, and then the log-probabilities of all samples."""
    return first_logprob_word(max_rows, max_samples) + (max_samples or max_rows) * logprob_record(num_top).width
