"""StepPlan: encode and decode are inverse, for empty, full and any plan; processors; the stated longest plan is the longest."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ipc.step import plan
from quire.ipc.step.plan import (
    BLOCK_WORDS,
    PREFILL_WORDS,
    SLOT_WORDS,
    LogitsProcessors,
    StepPlan,
    decode_logits_processors,
    decode_plan,
    encode_logits_processors,
    max_plan_words,
)

NO_ROWS = np.zeros(0, np.int32)


def ints(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def make_plan(slots=0, blocks=0, decode=0, prefill=0, tokens=0, processors=NO_ROWS, **more) -> StepPlan:
    return StepPlan(
        step=more.pop("step", 1),
        slot_updates=ints(slots, SLOT_WORDS, start=1000),
        block_updates=ints(blocks, BLOCK_WORDS, start=2000),
        decode_rows=ints(decode, start=3000),
        prefill_rows=ints(prefill, PREFILL_WORDS, start=4000),
        prefill_tokens=ints(tokens, start=5000),
        processors=processors,
        **more,
    )


def assert_same(a: StepPlan, b: StepPlan) -> None:
    for name in StepPlan.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            assert x.shape == y.shape and x.dtype == y.dtype == np.int32 and (x == y).all(), name
        else:
            assert x == y, name


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(*[st.integers(0, 9)] * 5),
    st.integers(0, 31),
    st.booleans(),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**31 - 1),
)
def test_plan_comes_back_as_it_went(counts, variant, late_mask, step, max_seq_len):
    slots, blocks, decode, prefill, tokens = counts
    before = make_plan(
        slots,
        blocks,
        decode,
        prefill,
        tokens,
        ints(7),
        variant=variant,
        late_mask=late_mask,
        step=step,
        max_seq_len=max_seq_len,
    )
    words = before.encode()
    assert words.dtype == np.int32 and len(words) == words[plan.H_WORDS]
    after = decode_plan(words, NO_ROWS)
    assert_same(before, after)
    assert after.num_rows == decode + prefill and after.num_tokens == decode + tokens


def test_unchanged_decode_rows_are_not_sent_again():
    first = make_plan(decode=500)
    again = make_plan(decode=500, step=2, same_decode_rows=True)
    assert len(again.encode()) == plan.HEADER_WORDS
    read = decode_plan(again.encode(), decode_plan(first.encode(), NO_ROWS).decode_rows)
    assert_same(read, again)


def test_step_number_wraps_with_the_rings():
    assert decode_plan(make_plan(step=2**31 + 5).encode(), NO_ROWS).step == 5


def test_header_words_do_not_overlap_and_the_world_size_is_left_to_the_sender():
    places = {name: at for name, at in vars(plan).items() if name.startswith("H_")}
    assert len(set(places.values())) == len(places) and max(places.values()) < plan.HEADER_WORDS
    words = make_plan(1, 1, 1, 1, 1, ints(7)).encode()
    before = decode_plan(words.copy(), NO_ROWS)
    assert words[plan.H_WORLD_SIZE] == 0
    words[plan.H_WORLD_SIZE] = 8
    assert_same(before, decode_plan(words, NO_ROWS))


def test_decoded_sections_are_views():
    words = make_plan(1, 1, 1, 1, 1).encode()
    read = decode_plan(words, NO_ROWS)
    for name in ("slot_updates", "block_updates", "decode_rows", "prefill_rows", "prefill_tokens"):
        assert np.shares_memory(words, getattr(read, name))


float32s = st.floats(-100, 100, width=32)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@st.composite
def processor_records(draw) -> LogitsProcessors:
    bias = draw(st.dictionaries(st.integers(0, 2**31 - 1), float32s, max_size=4))
    return LogitsProcessors(
        slot=draw(st.integers(0, 1000)),
        processor_row=draw(st.integers(0, 100)),
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
    read = decode_plan(make_plan(processors=words).encode(), NO_ROWS).processors
    again = decode_logits_processors(read)
    assert len(again) == len(records)
    for before, after in zip(records, again, strict=True):
        for name, x, y in zip(LogitsProcessors._fields, before, after, strict=True):
            assert list(x) == list(y) if isinstance(x, np.ndarray) else x == y, name


def test_longest_plan_fits_its_stated_length():
    """Every slot starts, every row prefills, and blocks as many as a step may need."""
    num_seqs, budget, block_size, groups, blocks_per_seq = 16, 256, 16, 2, 64
    new_blocks = groups * (budget // block_size + num_seqs)
    largest = make_plan(slots=num_seqs, blocks=new_blocks, decode=0, prefill=num_seqs, tokens=budget)
    assert len(largest.encode()) <= max_plan_words(num_seqs, budget, block_size, groups, blocks_per_seq)
