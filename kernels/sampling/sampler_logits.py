"""Code shared by the sampler's kernels: a row's parameters, its logits as they are sampled from, and the noise.

Every kernel reads a row's logits through `load_logits`: float32, penalized and masked for rows with processors, so that no copy
of them is kept. A row is a sample of the step. With WINDOW it may lie behind drafts of its sequence, and its processors count
these as tokens that were sampled: `drafts_of_row` finds them among the step's input ids. `sampler` and `sampler_filter` are the
kernels; sampler_cpu has the same noise, bit for bit.
"""

import triton
import triton.language as tl

import quire.ipc.step.sections as sections
from quire.ipc.step.sections import SLOT
from quire.kernels.step import tables as words
from quire.kernels.step.token_counts import IN_TABLE, PROMPT_BIT, look_up

SLOT_WORDS = tl.constexpr(SLOT.width)
S_TEMPERATURE, S_TOP_K = tl.constexpr(SLOT.at["temperature"]), tl.constexpr(SLOT.at["top_k"])
S_TOP_P, S_MIN_P = tl.constexpr(SLOT.at["top_p"]), tl.constexpr(SLOT.at["min_p"])
S_PRESENCE, S_FREQUENCY = tl.constexpr(SLOT.at["presence"]), tl.constexpr(SLOT.at["frequency"])
S_REPETITION, S_HAS_PROCESSORS = tl.constexpr(SLOT.at["repetition"]), tl.constexpr(SLOT.at["has_processors"])
S_SEED_LO, S_SEED_HI = tl.constexpr(SLOT.at["seed"]), tl.constexpr(SLOT.at["seed"] + 1)
S_MIN_LEN = tl.constexpr(SLOT.at["min_len"])
ENTRY_PLANES = tl.constexpr(words.ENTRY_PLANES)
HISTORY, MAX_BAD_WORDS, MAX_MASKED_STOPS = (
    tl.constexpr(words.HISTORY),
    tl.constexpr(sections.MAX_BAD_WORDS),
    tl.constexpr(sections.MAX_MASKED_STOPS),
)
BLOCK = tl.constexpr(words.SAMPLER_BLOCK)
NO_TOKEN = tl.constexpr(sections.NO_TOKEN)
PURPOSE_BLOCK, PURPOSE_TOKEN = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def _mix(x):
    x = x ^ (x >> 17)
    x = x * 0xED5AD4BB
    x = x ^ (x >> 11)
    x = x * 0xAC4C1B51
    x = x ^ (x >> 15)
    x = x * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def noise_bits(seed_lo, seed_hi, position, purpose: tl.constexpr, index):
    """uint32 hash per index; the same bits as sampler_cpu.noise_bits."""
    lo = seed_lo.to(tl.uint32, bitcast=True)
    hi = seed_hi.to(tl.uint32, bitcast=True)
    at = position.to(tl.uint32, bitcast=True)
    first = _mix(_mix(_mix(lo + (purpose + 0x9E3779B9)) ^ hi) + at)
    second = _mix(_mix(_mix(hi + (purpose + 0x7F4A7C15)) ^ at) + lo)
    return _mix(_mix(index.to(tl.uint32, bitcast=True) ^ first) + second)


@triton.jit
def log_exponential(bits):
    """log(E), E = -log1p(-U), U = (bits + 1/2) / 2^32; log1p by Kahan's identity, exact to float32 where U is small."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    w = 1.0 - u
    tail = w == 1.0
    e = tl.where(tail, u, -tl.log(w) * u / tl.where(tail, 1.0, 1.0 - w))
    return tl.log(e)


@triton.jit
def row_state(row, row_slots, positions, slot_params, num_slots):
    """(words of the row's parameters, position, slot), the slot clamped."""
    slot = tl.minimum(tl.maximum(tl.load(row_slots + row), 0), num_slots - 1)
    return slot_params + slot * SLOT_WORDS, tl.load(positions + row), slot


@triton.jit
def float_param(param_row, word: tl.constexpr):
    return tl.load(param_row + word).to(tl.float32, bitcast=True)


@triton.jit
def has_processors(slot, param_row, pool_rows):
    """Whether the slot's row of the pool counts; the dummy slot has none there."""
    return (tl.load(param_row + S_HAS_PROCESSORS) != 0) & (slot < pool_rows)


@triton.jit
def is_filtered(param_row, V):
    """Whether the row takes the filter kernel's result: as an integer, to be combined with blocks of masks."""
    random = float_param(param_row, S_TEMPERATURE) > 0.0
    k = tl.load(param_row + S_TOP_K)
    narrow = ((k > 0) & (k < V)) | (float_param(param_row, S_TOP_P) < 1.0) | (float_param(param_row, S_MIN_P) > 0.0)
    return random & narrow


@triton.jit
def drafts_of_row(row, input_ids, places, WINDOW: tl.constexpr):
    """(a pointer to the last draft before the row's sample, the number of drafts). A token and its sample have one index; with
    WINDOW below 0 each row has so many tokens of its own, one after another."""
    if WINDOW < 0:
        place = tl.minimum(tl.maximum(tl.load(places + row), 0), -WINDOW - 1)
        return input_ids + row * -WINDOW + place, place
    elif WINDOW:
        place = tl.minimum(tl.maximum(tl.load(places + row), 0), tl.minimum(row, WINDOW - 1).to(tl.int32))
        return input_ids + row, place
    else:
        return input_ids, 0


@triton.jit
def processors_of_row(
    row, slot, param_row, counts, counts_stride, entries, multiplier, pool_rows, token_mask, token_mask_stride, input_ids,
    places, PROCESSORS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The arguments of load_logits that describe a row's processors. PROCESSORS: bits of the table's size, or 0. WINDOW: most
    tokens of a window, or 0: no row lies behind drafts.
    """
    at = slot.to(tl.int64)
    last_draft, num_drafts = drafts_of_row(row, input_ids, places, WINDOW)
    return (
        has_processors(slot, param_row, pool_rows),
        counts + at * counts_stride,
        entries + at * (ENTRY_PLANES << PROCESSORS),
        multiplier,
        token_mask + row * token_mask_stride,
        float_param(param_row, S_REPETITION),
        float_param(param_row, S_FREQUENCY),
        float_param(param_row, S_PRESENCE),
        last_draft,
        num_drafts,
    )


@triton.jit
def leaves_nothing(maxima, processors):
    """Whether a row with processors has no token left, by the maxima of its blocks."""
    return processors[0] & (tl.max(maxima, 0) == -float("inf"))


@triton.jit
def end_window(token, maxima, row, places, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """The token, or NO_TOKEN behind a draft that leaves none: a mask of zeros ends a row's window. See `accept`."""
    if MASK:  # noqa: SIM102 (both are compiled away)
        if WINDOW:
            nothing = (tl.max(maxima, 0) == -float("inf")) & (tl.load(places + row) > 0)
            token = tl.where(nothing, NO_TOKEN, token)
    return token


@triton.jit
def _processed(x, cols, inside, processors, PROCESSORS: tl.constexpr, WINDOW: tl.constexpr):
    """Logits x of a row after its processors."""
    _, counts_row, entries_row, multiplier, mask_row, repetition, frequency, presence, last_draft, num_drafts = processors
    word = tl.load(counts_row + cols, inside, other=0).to(tl.int32)
    count = word & IN_TABLE
    x, count = look_up(x, count, cols, entries_row, multiplier, PROCESSORS)
    if WINDOW:
        for i in range(num_drafts):
            count += (cols == tl.load(last_draft - i)).to(tl.int32)
    penalised = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x = tl.where((count > 0) | (word >= PROMPT_BIT), penalised, x)
    x = x - frequency * count.to(tl.float32)
    x = x - tl.where(count > 0, presence, 0.0)
    bits = tl.load(mask_row + (cols >> 5), inside, other=0)
    return tl.where(((bits >> (cols & 31)) & 1) != 0, x, -float("inf"))


@triton.jit
def load_logits(logits_row, processors, mask_row, cols, V, PROCESSORS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """Logits at cols in float32, processed if the row has processors; -inf beyond V, where masked, for NaN. No +inf, -0."""
    inside = cols < V
    x = tl.load(logits_row + cols, inside, other=-float("inf")).to(tl.float32)
    if PROCESSORS:  # noqa: SIM102 (compiled away; the inner test runs on the device)
        if processors[0]:
            x = _processed(x, cols, inside, processors, PROCESSORS, WINDOW)
    if MASK:
        bits = tl.load(mask_row + (cols >> 5), inside, other=0)
        x = tl.where(((bits >> (cols & 31)) & 1) != 0, x, -float("inf"))
    x = tl.where(x == x, x, -float("inf"))
    return tl.minimum(x, 3e38) + 0.0
