"""What a step is made of, declared once: the sections of a plan, the values of a slot, the words of rows, masks and results.

Everything travels as int32 words; a float32 travels as its bits, a uint64 as two words, the low one first. Whoever writes or
reads a record asks for a field by name (`SLOT.at["top_k"]`), so a new value is one line here: the core's writer
(plan_builder.py), the plan (plan.py), the tables on the device (kernels/step/tables.py) and the kernels' offsets follow.

Constants only, and no import of ours or of numpy: this is the one file outside their folder that kernels may import.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

EXTREME = 1e30  # parameters beyond it, or below its inverse, would be infinite or zero in float32
INT32_MAX = 2**31 - 1
STEP_MASK = INT32_MAX  # of a step's number, wherever it travels
WORDS_OF = {"int32": 1, "float32": 1, "uint64": 2}


class Field(NamedTuple):
    name: str
    dtype: str = "int32"  # a key of WORDS_OF
    length: int = 1  # more than one: a list

    @property
    def words(self) -> int:
        return WORDS_OF[self.dtype] * self.length


class Record:
    """One row of words with names, `width` words in all; `at` gives each field's first."""

    def __init__(self, *fields: Field, width: int = 0) -> None:
        self.fields = fields
        self.at: dict[str, int] = {}
        self.used = 0
        for f in fields:
            self.at[f.name] = self.used
            self.used += f.words
        self.width = max(width, self.used)


class ListField(NamedTuple):
    """A list in a ListRecord. cap: its most entries, None: as many as a sequence has tokens or the vocabulary has ids.

    item_cap: an entry is a list itself, of so many words at most, and is preceded by their number; None: it is one word.
    """

    name: str
    dtype: str = "int32"
    cap: int | None = None
    item_cap: int | None = None


class ListRecord:
    """A record with lists: its length in words, its fields, the words that each list takes, and the lists themselves."""

    def __init__(self, fields: tuple[Field, ...], lists: tuple[ListField, ...]) -> None:
        self.fields = fields
        self.lists = lists
        self.at = {f.name: 1 + i for i, f in enumerate(fields)}  # one word each
        self.lengths = 1 + len(fields)  # where the lists' lengths begin
        self.head = self.lengths + len(lists)  # and the lists


# -------------------------------------------------------------------------------------------------- tokens of a row
TOKENS_PER_ROW = 1  # that a decode row computes and a row that samples yields
# Whoever counts on it takes it from here. What else there is to change for rows of 1 to 8 tokens, on the way of a step:
#
#     scheduling/decode.py      lengths are exact when a step is made; they would be bounds until its result is back. A result
#                               holds as many tokens as were accepted; a stop id may be any of them, not only the last
#     decode_rows, below        slots alone: how many tokens a row has, and which drafts, would come with them
#     kernels/step/             a decode row is one token: row r's is token r, its id the slot's last_token; finish_step stores
#                               one word a row, and seq_len grows by what was computed
#     workers/runner.py         a decode step has as many tokens as rows, and all its hidden states are sampled from;
#     workers/graph_sizes.py    and so have the padded sizes that are captured
#     kernels/sampling/         sampled int32 [rows]: a row's parameters, mask and logprobs are those of one token
#     attention                 decode kernels take up to 8 already, by max_query_len; decode_rope.py fuses for 1 only
#     result_ring.py            all words of a row are there or none; logprob_record is of one token
#     core.py, publish.py       StepOutput has one token a row, and one entry of logprobs for it


# ----------------------------------------------------------------------------------------------- limits of the lists
MAX_LOGPROBS = 20  # alternatives whose log-probabilities are reported
MAX_CANDIDATES = 128  # next tokens that a search asks for: they come as a side result, and no result word is kept for them
MAX_MASKED_STOPS = 256  # stop ids that min_tokens keeps away from one sequence
MAX_LOGIT_BIAS = 1024  # tokens
MAX_BAD_WORDS = 256  # token sequences
MAX_BAD_WORD_TOKENS = 16  # tokens of one of them


# --------------------------------------------------------------------------------------------------- values of a slot
class SlotValue(NamedTuple):
    """A value that a sequence's slot holds, from admission to its end.

    source: where the core reads it, as attributes of its Sequence; `params.` are the SamplingParams. None is sent as `none`,
    what lies beyond low or high as the bound itself. default: of a slot that has not had a sequence yet.
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
    SlotValue("temperature", "params.temperature", "float32", high=EXTREME),  # 0: greedy
    SlotValue("top_k", "params.top_k", low=0, high=INT32_MAX),  # 0: all
    SlotValue("top_p", "params.top_p", "float32", 1.0, low=1 / EXTREME),
    SlotValue("min_p", "params.min_p", "float32"),
    SlotValue("presence", "params.presence_penalty", "float32"),
    SlotValue("frequency", "params.frequency_penalty", "float32"),
    SlotValue("repetition", "params.repetition_penalty", "float32", 1.0, low=1 / EXTREME, high=EXTREME),
    SlotValue("seed", "seed", "uint64"),
    SlotValue("has_processors", "has_processors"),  # 1: the slot's row of LogitsProcessorPool counts; 0: kernels skip it
    SlotValue("min_len", "min_len"),  # a token at an index below it may not be one of the stop ids in that row
    SlotValue("num_logprobs", "params.logprobs", default=-1, none=-1),  # -1: none
)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


_VALUES = tuple(Field(v.name, v.dtype) for v in SLOT_VALUES)
SLOT = Record(*_VALUES, width=_power_of_two(sum(f.words for f in _VALUES)))  # a kernel's block takes a row

# ------------------------------------------------------------------------------------------------------- other records
BLOCK = Record(Field("table"), Field("index"), Field("block"))  # group * num_slots + slot, index in that table, block id

PREFILL = Record(
    Field("slot"),
    Field("start"),  # tokens of the sequence already computed: the position of the chunk's first token
    Field("length"),
    Field("flags"),  # PREFILL_*
    Field("next_token"),  # the prompt token after the chunk, -1 at its end: target of the chunk's last prompt logprob
    Field("num_prompt_logprobs"),  # or of candidates
    width=8,
)
PREFILL_SAMPLE = 1  # the chunk ends the known tokens: sample the next one
PREFILL_PROMPT_LOGPROBS = 2  # the row has a side result: of each position
PREFILL_CANDIDATES = 4  # the row has a side result: of its last position, which is sampled

WORD = Record(Field("word"))  # of a list

# rare sampling state of one sequence, sent when it gets its slot
LOGITS_PROCESSORS = ListRecord(
    (Field("slot"),),
    (
        ListField("prompt_ids"),  # empty without penalties
        ListField("output_ids"),  # all of them with penalties, else the last MAX_BAD_WORD_TOKENS
        ListField("bias_ids", cap=MAX_LOGIT_BIAS),
        ListField("bias_values", "float32", cap=MAX_LOGIT_BIAS),
        ListField("allowed_ids"),  # empty: all
        ListField("stop_ids", cap=MAX_MASKED_STOPS),  # masked while shorter than the slot's min_len
        ListField("bad_words", cap=MAX_BAD_WORDS, item_cap=MAX_BAD_WORD_TOKENS),
    ),
)


# ---------------------------------------------------------------------------------------------------------- sections
class StepLimits(NamedTuple):
    """What bounds a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_groups: int
    max_blocks_per_seq: int


class Section(NamedTuple):
    """One section of a plan. A plan holds those that it needs, in the order of SECTIONS.

    applied: on the "device", by the step's kernels; on the "host", by the worker before the step's forward; or by the worker
    after the forward and before "sampling". cap: the most rows, where the section lies in a buffer of fixed size, which only
    those for the device do.
    """

    name: str
    record: Record
    applied: Literal["device", "host", "sampling"]
    cap: Callable[[StepLimits], int] | None = None


def _max_block_updates(s: StepLimits) -> int:
    """New blocks of every row, and four whole tables of cached prefixes: see Admission, which stops after three."""
    return s.num_groups * (2 * s.max_num_seqs + s.max_num_batched_tokens // s.block_size + 4 * s.max_blocks_per_seq)


SECTIONS = (
    Section("slot_updates", SLOT, "device", lambda s: s.max_num_seqs),  # a slot was given to a sequence
    Section("block_updates", BLOCK, "device", _max_block_updates),
    Section("decode_rows", WORD, "device", lambda s: s.max_num_seqs),  # slots; counted but absent under FLAG_SAME_DECODE_ROWS
    Section("prefill_rows", PREFILL, "device", lambda s: s.max_num_seqs),
    Section("prefill_tokens", WORD, "device", lambda s: s.max_num_batched_tokens),  # of all prefill rows, one after the other
    Section("logits_processors", WORD, "host"),  # records of LOGITS_PROCESSORS, one after the other
    Section("custom_processors", WORD, "host"),  # records of custom_processors.py, one after the other
    Section("mask_rows", WORD, "sampling"),  # rows whose masks follow in the ring, in records of KIND_MASK
)

HEADER = Record(
    Field("step"),  # counts from 1; results are tagged with it
    Field("flags"),  # FLAG_*
    Field("sampling_kind"),  # SAMPLING_*
    Field("max_seq_len"),  # upper bound over the step's rows, this step's tokens included
    Field("words"),  # length of the whole plan
    Field("device_words"),  # length of what the device reads: header and sections applied there
    Field("world_size"),  # ranks that the plan is for: written by who sends it (the scheduler does not know), checked by each
    Field("micro_batch"),  # that the decode rows belong to; there are as many of them as the model has pipeline stages
    Field("lag"),  # the decode rows go on from tokens that were sampled so many steps before, or earlier; 0: from none
    *(Field(name) for s in SECTIONS for name in (f"num_{s.name}", s.name)),  # rows of a section, and its first word
    width=32,
)

FLAG_SAME_DECODE_ROWS = 1  # the decode rows are those of the micro-batch's last plan that had them

# Kinds of sampling: what the sampling graph of this step must be able to do. More bits cost more time.
SAMPLING_RANDOM = 1  # some row has a temperature
SAMPLING_FILTER = 2  # some row has top-k, top-p or min-p
SAMPLING_PROCESSORS = 4  # some row has logits processors
SAMPLING_LOGPROBS = 8  # some row wants logprobs
SAMPLING_MASK = 16  # some row has a mask
SAMPLING_CUSTOM = 32  # some row is seen by the operator's own logits processors: its sampling is never captured


def max_device_words(limits: StepLimits) -> int:
    """The longest part of a plan that goes to the device."""
    return HEADER.width + sum(s.record.width * s.cap(limits) for s in SECTIONS if s.cap is not None)


# ------------------------------------------------------------------------------------------------- masks and results
MASK = Record(Field("step"), Field("num_rows"), Field("kind"))  # then num_rows rows, then their masks if they have some
MASKS_NONE = 0  # they get none, and no token
MASKS_ALLOW = 1  # what their masks allow
MASKS_ANY_TOKEN = 2  # they may be any token
MASKS_IN_AREA = 3  # what their masks allow, which lie in the ring's area: after the rows its word and the words of a mask

NO_TOKEN = -1  # the result of a row whose mask did not come, or leaves nothing: the core ends its request


def logprob_record(num_top: int) -> Record:
    """Result words of one row's log-probabilities, beside its word with the token."""
    return Record(
        Field("logprob", "float32"),
        Field("rank"),  # 1 = the most likely
        Field("top_ids", length=num_top),  # most likely first
        Field("top_logprobs", "float32", num_top),
    )


LOGPROBS = logprob_record(MAX_LOGPROBS)


def result_words(max_rows: int, num_top: int = MAX_LOGPROBS) -> int:
    """Words of one step's results: the tokens of all rows, then the log-probabilities of all rows."""
    return max_rows * (TOKENS_PER_ROW + logprob_record(num_top).width)
