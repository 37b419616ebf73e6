"""Counting tokens on the device: a row's byte for each token, and the hash table for counts that a byte cannot hold.

`LogitsProcessorPool` defines the layout. The sampler looks up blocks of tokens, `step_inputs` counts the tokens of a step;
`token_counts_cpu` does both on the CPU and fills tables. Both loops below run only if some token's byte is IN_TABLE, as many
times as that token's probe is long, and at most once around: a full table ends them, too.
"""

import triton
import triton.language as tl

from quire.kernels.step import tables as words

PROMPT_BIT, IN_TABLE = tl.constexpr(words.PROMPT_BIT), tl.constexpr(words.IN_TABLE)
ENTRY_PLANES = tl.constexpr(words.ENTRY_PLANES)


@triton.jit
def _home(token, multiplier, TABLE_BITS: tl.constexpr):
    """Where probing for a token begins; the same as token_counts_cpu.homes."""
    product = token.to(tl.uint32, bitcast=True) * multiplier  # modulo 2^32; a multiplier of 1 is a constant to the compiler
    return (product >> (32 - TABLE_BITS)).to(tl.int32)


@triton.jit
def look_up(x, count, token, entries_row, multiplier, TABLE_BITS: tl.constexpr):
    """(x + bias, count + occurrences beyond IN_TABLE) for tokens with count IN_TABLE, others unchanged; blocks of any shape."""
    size: tl.constexpr = 1 << TABLE_BITS
    sought = count == IN_TABLE
    probes = 0
    left = tl.max(sought.to(tl.int32))
    while (left > 0) & (probes < size):
        at = (_home(token, multiplier, TABLE_BITS) + probes) & (size - 1)
        key = tl.load(entries_row + at, sought, other=0)
        found = sought & (key == token + 1)
        count += tl.load(entries_row + size + at, found, other=0)
        x += tl.load(entries_row + 2 * size + at, found, other=0).to(tl.float32, bitcast=True)
        sought = sought & (key != token + 1) & (key != 0)
        probes += 1
        left = tl.max(sought.to(tl.int32))
    return x, count


@triton.jit
def count_tokens(counts, counts_stride, entries, multiplier, slot, token, counted, TABLE_BITS: tl.constexpr):
    """Count one token in the pool's rows of some slots, all different: [BLOCK] each, `counted` says which."""
    size: tl.constexpr = 1 << TABLE_BITS
    row = slot.to(tl.int64)
    byte = counts + row * counts_stride + token
    word = tl.load(byte, counted, other=0)
    full = counted & ((word & IN_TABLE) == IN_TABLE)
    tl.store(byte, word + 1, counted & ((word & IN_TABLE) != IN_TABLE))
    entries_row = entries + row * (ENTRY_PLANES * size)
    at = _home(token, multiplier, TABLE_BITS)
    probes = 0
    left = tl.max(full.to(tl.int32))
    while (left > 0) & (probes < size):
        key = tl.load(entries_row + at, full, other=0)
        mine = full & ((key == 0) | (key == token + 1))
        tl.store(entries_row + at, token + 1, mine)
        extra = entries_row + size + at
        tl.store(extra, tl.load(extra, mine, other=0) + 1, mine)
        full = full & (key != 0) & (key != token + 1)
        at = (at + 1) & (size - 1)
        probes += 1
        left = tl.max(full.to(tl.int32))
