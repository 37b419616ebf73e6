"""StepPlan: encode and decode are inverse, for any sections and any plan; what is declared is what is written."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ipc.step.plan import (
    DTYPES,
    LogitsProcessors,
    StepPlan,
    decode_logits_processors,
    decode_plan,
    default_slots,
    encode_logits_processors,
    struct_of,
)
from quire.ipc.step.sections import (
    BLOCK,
    HEADER,
    LOGITS_PROCESSORS,
    LOGPROBS,
    MASK,
    PREFILL,
    SECTIONS,
    SLOT,
    SLOT_VALUES,
    USUAL_LOGPROBS,
    Record,
    StepLimits,
    max_device_words,
)

NO_ROWS = np.zeros(0, np.int32)


def some_rows(name: str, count: int, start: int = 0) -> np.ndarray:
    """Rows of a section, each field another number, the words beyond the last field zero."""
    rows = np.zeros(count, DTYPES[name])
    for i, field in enumerate(rows.dtype.names or ()):
        rows[field] = np.arange(count) + start + 100 * i
    return rows if rows.dtype.names else np.arange(start, start + count, dtype=np.int32)


def make_plan(counts: dict[str, int], step: int = 1, **more) -> StepPlan:
    sections = {name: some_rows(name, count, 1000 * i) for i, (name, count) in enumerate(counts.items()) if count}
    return StepPlan(step, sections, **more)


def assert_same(a: StepPlan, b: StepPlan) -> None:
    assert a.sections.keys() == b.sections.keys()
    for name in a.sections:
        x, y = a.section(name), b.section(name)
        assert x.dtype == y.dtype == DTYPES[name] and x.shape == y.shape and (x == y).all(), name
    for name in ("step", "sampling_kind", "same_decode_rows", "max_seq_len", "num_rows", "num_tokens", "has_mask_rows"):
        assert getattr(a, name) == getattr(b, name), name


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries({s.name: st.integers(0, 9) for s in SECTIONS}),
    st.integers(0, 31),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**31 - 1),
)
def test_plan_comes_back_as_it_went(counts, sampling_kind, step, max_seq_len):
    before = make_plan(counts, step, sampling_kind=sampling_kind, max_seq_len=max_seq_len)
    words = before.encode()
    assert words.dtype == np.int32 and len(words) == words[HEADER.at["words"]]
    after = decode_plan(words, NO_ROWS)
    assert_same(before, after)
    assert after.num_rows == counts["decode_rows"] + counts["prefill_rows"]
    assert after.num_tokens == counts["decode_rows"] + counts["prefill_tokens"]
    assert after.has_mask_rows == (counts["mask_rows"] > 0) and len(after.mask_rows) == counts["mask_rows"]


@settings(max_examples=50, deadline=None)
@given(st.fixed_dictionaries({s.name: st.integers(0, 9) for s in SECTIONS}))
def test_what_the_device_reads_comes_first_and_is_counted(counts):
    """A copy of device_words words is all that the step's kernels need."""
    words = make_plan(counts).encode()
    device = [s for s in SECTIONS if s.applied == "device"]
    size = HEADER.width + sum(s.record.width * counts[s.name] for s in device)
    assert words[HEADER.at["device_words"]] == size
    for s in device:
        n, at = words[HEADER.at[f"num_{s.name}"]], words[HEADER.at[s.name]]
        assert n == counts[s.name] and at + n * s.record.width <= size
    assert list(SECTIONS[: len(device)]) == device  # in the order of declaration, too


def test_unchanged_decode_rows_are_not_sent_again():
    first = make_plan({"decode_rows": 500})
    again = make_plan({"decode_rows": 500}, 2, same_decode_rows=True)
    assert len(again.encode()) == HEADER.width
    assert again.encode()[HEADER.at["num_decode_rows"]] == 500
    read = decode_plan(again.encode(), decode_plan(first.encode(), NO_ROWS).decode_rows)
    assert_same(read, again)


def test_step_number_wraps_with_the_rings():
    assert decode_plan(make_plan({}, 2**31 + 5).encode(), NO_ROWS).step == 5


def test_bounds_of_windows_travel_and_count():
    before = make_plan({"decode_rows": 3, "prefill_rows": 2, "prefill_tokens": 9}, window=5, draft_tokens=11)
    after = decode_plan(before.encode(), NO_ROWS)
    assert (after.window, after.draft_tokens, after.num_tokens, after.num_samples) == (5, 11, 3 + 11 + 9, 3 + 11 + 2)
    after = decode_plan(make_plan({"decode_rows": 3}).encode(), NO_ROWS)
    assert (after.window, after.draft_tokens, after.num_samples) == (1, 0, 3)


def test_the_world_size_is_left_to_the_sender():
    words = make_plan({s.name: 1 for s in SECTIONS}).encode()
    before = decode_plan(words.copy(), NO_ROWS)
    assert words[HEADER.at["world_size"]] == 0
    words[HEADER.at["world_size"]] = 8
    assert_same(before, decode_plan(words, NO_ROWS))


def test_decoded_sections_are_views():
    words = make_plan({s.name: 1 for s in SECTIONS}).encode()
    read = decode_plan(words, NO_ROWS)
    for s in SECTIONS:
        assert np.shares_memory(words, read.section(s.name)), s.name


# ------------------------------------------------------------------------------------------------- declarations
def test_fields_of_a_record_do_not_overlap_and_fit_its_width():
    for record in (HEADER, SLOT, BLOCK, PREFILL, MASK, LOGPROBS):
        ends = 0
        for field in record.fields:
            assert record.at[field.name] == ends
            ends += field.words
        assert ends == record.used <= record.width
        assert len({f.name for f in record.fields}) == len(record.fields)
    assert SLOT.width & (SLOT.width - 1) == 0  # a Triton block
    assert LOGPROBS.width == 2 + 2 * USUAL_LOGPROBS


def test_numpy_struct_and_offsets_are_of_one_layout():
    """What the core packs is what numpy reads by name and a kernel by offset."""
    for name, record in (("slot_updates", SLOT), ("prefill_rows", PREFILL), ("block_updates", BLOCK)):
        values = [
            2.5 + i if f.dtype == "float32" else (2**64 - 7 if f.dtype == "uint64" else i) for i, f in enumerate(record.fields)
        ]
        packed = struct_of(record).pack(*values)
        assert len(packed) == 4 * record.width
        (row,) = np.frombuffer(packed, DTYPES[name])
        assert [row[f.name] for f in record.fields] == values
        words = np.frombuffer(packed, np.int32)
        for f, value in zip(record.fields, values, strict=True):
            at = record.at[f.name]
            read = {"int32": words, "float32": words.view(np.float32)}.get(f.dtype)
            if read is None:
                assert words[at : at + 2].view(np.uint64)[0] == value
            else:
                assert read[at] == value


def test_a_new_slot_holds_the_declared_defaults():
    row = default_slots(3)[1]
    assert {v.name: row[v.name] for v in SLOT_VALUES} == {v.name: v.default for v in SLOT_VALUES}


def test_a_list_in_a_record_takes_as_many_words():
    record = Record(*LOGPROBS.fields, width=50)
    assert record.at["top_logprobs"] - record.at["top_ids"] == USUAL_LOGPROBS and record.width == 50


# ------------------------------------------------------------------------------------------- logits processors
float32s = st.floats(-100, 100, width=32)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@st.composite
def processor_records(draw) -> LogitsProcessors:
    bias = draw(st.dictionaries(st.integers(0, 2**31 - 1), float32s, max_size=4))
    return LogitsProcessors(
        slot=draw(st.integers(0, 1000)),
        prompt_ids=np.asarray(draw(tokens), np.int32),
        output_ids=np.asarray(draw(tokens), np.int32),
        bias_ids=list(bias),
        bias_values=list(bias.values()),
        allowed_ids=draw(tokens),
        stop_ids=draw(tokens),
        bad_words=draw(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=3)),
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(processor_records(), max_size=3))
def test_processors_come_back_as_they_went(records):
    words = np.concatenate([NO_ROWS, *[encode_logits_processors(f) for f in records]])
    plan = StepPlan(1, {"logits_processors": words})
    read = decode_plan(plan.encode(), NO_ROWS).section("logits_processors")
    again = decode_logits_processors(read)
    assert len(again) == len(records)
    for before, after in zip(records, again, strict=True):
        for name, x, y in zip(LogitsProcessors._fields, before, after, strict=True):
            assert x == y if isinstance(x, int) else list(x) == list(y), name


def test_processors_have_the_declared_fields():
    declared = [f.name for f in (*LOGITS_PROCESSORS.fields, *LOGITS_PROCESSORS.lists)]
    assert list(LogitsProcessors._fields) == declared


def test_longest_plan_fits_its_stated_length():
    """Every slot starts, every row prefills, and blocks as many as a step may need."""
    num_seqs, budget, block_size, groups, blocks_per_seq = 16, 256, 16, 2, 64
    new_blocks = groups * (budget // block_size + num_seqs)
    counts = {"slot_updates": num_seqs, "block_updates": new_blocks, "prefill_rows": num_seqs, "prefill_tokens": budget}
    limits = StepLimits(num_seqs, budget, block_size, groups, blocks_per_seq)
    assert len(make_plan(counts).encode()) <= max_device_words(limits)
    caps = {s.name: s.cap(limits) for s in SECTIONS if s.cap}
    assert len(make_plan(caps).encode()) == max_device_words(limits)
    assert caps.keys() == {s.name for s in SECTIONS if s.applied == "device"}  # only what lies in a buffer has a cap
