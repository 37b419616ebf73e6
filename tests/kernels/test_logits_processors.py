"""Rows of the pool of logits processors: how they are filled, counted in, looked up, and what they do to logits to the bit.

The oracle is written out here: float32 operations in the documented order on plain lists.
"""

import numpy as np
import pytest
import torch
from sampler_harness import KINDS, SLOTS, SamplerHarness

from quire.ipc.step.plan import LogitsProcessors
from quire.kernels.sampling.logits_processors import apply_logits_processors, processed_row
from quire.kernels.step import tables as t
from quire.kernels.step import token_counts_cpu
from quire.kernels.step.tables import HISTORY, IN_TABLE, PROMPT_BIT, LogitsProcessorPool, SamplerWorkspace, SlotTables

MIB = 1 << 20


def record(slot, prompt=(), output=(), bias=(), allowed=(), stop=(), bad=()):
    return LogitsProcessors(slot, prompt, output, [b[0] for b in bias], [b[1] for b in bias], allowed, stop, bad)


def expected_row(logits, prompt=(), output=(), bias=(), allowed=(), banned=(), presence=0.0, frequency=0.0, repetition=1.0):
    """float32, one operation at a time."""
    presence, frequency, repetition = (np.float32(x) for x in (presence, frequency, repetition))
    x = logits.astype(np.float32).copy()
    for token, value in bias:
        x[token] = x[token] + np.float32(value)
    for token in range(len(x)):
        if (allowed and token not in allowed) or token in banned:
            x[token] = -np.inf
    for token in {*prompt, *output} & set(range(len(x))):
        count = list(output).count(token)
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] = x[token] - frequency * np.float32(count)
        x[token] = x[token] - (presence if count else np.float32(0))
    return x


def rows_as_sampled(h, logits):
    """Each token's logit as the sampler sees it, of slot 0: rows with all other tokens masked, and their block maxima."""
    vocab = len(logits)
    if not h.kernels:
        return processed_row(logits, 0, 50, h.tables, h.pool)
    mask = torch.zeros(vocab, -(-vocab // 32), dtype=torch.int32)
    for token in range(vocab):
        mask[token, token // 32] = 1 << (token % 32) if token % 32 < 31 else -(2**31)
    rows = torch.from_numpy(logits).expand(vocab, -1).contiguous()
    h.sample(rows, [0] * vocab, [50] * vocab, bitmask=mask, random=False)
    return h.workspace.block_max[:vocab, 0].cpu().numpy()


@pytest.fixture(params=KINDS)
def make(request):
    def build(vocab):
        return SamplerHarness(vocab, "cuda" if request.param == "cuda" else "cpu", request.param != "torch", max(vocab, 8))

    return build


OFTEN = [5] * 126 + [6] * 127 + [7] * 128 + [8] * 700
SEQUENCES = {
    "few": {"prompt": [1, 2, 2, 40], "output": [2, 3, 3]},
    "often": {"prompt": [6, 7, 10**6, -1], "output": [*OFTEN, 10**6, -1]},
    "biased and often": {"prompt": [8], "output": OFTEN, "bias": [(5, 0.1), (7, -3.3), (8, 100.0), (9, 1e-3), (0, -2.0)]},
    "all biased": {"bias": [(i, 0.1 * i - 2) for i in range(44)], "output": [3] * 130},
    "allowed": {"allowed": [1, 5, 31, 32, 43], "bias": [(5, 1.0), (6, 1.0)], "output": [31], "prompt": [43]},
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_logits_are_processed_as_documented_to_the_bit(make, name):
    h, values = make(44), SEQUENCES[name]
    logits = np.random.default_rng(1).normal(size=44).astype(np.float32) * 3
    settings = {"presence": 0.3, "frequency": 0.017, "repetition": 1.3}
    h.set(temperature=0.0, has_processors=True, min_len=51, **settings)
    h.processors(**values, stop=[4, 999], bad=[[11]])
    got = rows_as_sampled(h, logits)
    want = expected_row(logits, **values, banned=(4, 11), **settings) + np.float32(0)
    assert (got + np.float32(0)).view(np.int32).tolist() == want.view(np.int32).tolist()


@pytest.mark.parametrize("bias", [(), ((7, 1.5), (40, 1.0))])
def test_tokens_counted_one_by_one_are_what_a_resumed_sequence_brings(bias):
    """A preempted sequence's row is made again of its prompt and output."""
    rng = np.random.default_rng(0)
    output = [*rng.permutation([7] * 300 + [8] * 128 + [9] * 127 + [10]).tolist()]
    tables = SlotTables.allocate(2, 1, 1, "cpu")
    grown, resumed = (LogitsProcessorPool.allocate(2, 50, 1000, "cpu", multiplier=1) for _ in range(2))
    apply_logits_processors(tables, grown, [record(1, prompt=[7, 3], bias=bias)])
    for token in output:
        token_counts_cpu.count_tokens(grown, np.array([1]), np.array([token]))
    apply_logits_processors(tables, resumed, [record(1, [7, 3], output, bias)])
    assert torch.equal(grown.counts, resumed.counts)
    for ours, theirs in zip(*(token_counts_cpu.entries_of_row(pool, 1) for pool in (grown, resumed)), strict=True):
        assert ours.tolist() == theirs.tolist()
    tokens, extra, biases = token_counts_cpu.entries_of_row(resumed, 1)
    want = {7: 300 - IN_TABLE, 8: 1} | ({40: -IN_TABLE} if bias else {})
    assert dict(zip(tokens.tolist(), extra.tolist(), strict=True)) == want
    assert dict(zip(tokens.tolist(), biases.tolist(), strict=True)) == {token: dict(bias).get(token, 0.0) for token in want}


def test_sequences_of_one_step_are_filled_as_one_by_one():
    rng = np.random.default_rng(2)
    records = [
        record(
            row,
            *(rng.integers(-2, 700, n).tolist() for n in (30, 300)),
            [(i, 0.5) for i in sorted({*rng.integers(0, 700, 40 * row).tolist()})],
            rng.integers(0, 700, 50 * (row % 2)).tolist(),
            [row],
            [[1, 2], [3]] * (row % 3),
        )
        for row in rng.permutation(6).tolist()
    ]
    made = []
    for batches in ([records], [[r] for r in records]):
        tables, pool = SlotTables.allocate(7, 1, 1, "cpu"), LogitsProcessorPool.allocate(7, 600, 1000, "cpu", multiplier=77)
        for batch in batches:
            apply_logits_processors(tables, pool, batch)
        made.append([tables.history, *(v for v in vars(pool).values() if isinstance(v, torch.Tensor))])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert (made[0][1][6] == 0).all()  # nobody's row


def test_a_row_is_wholly_replaced():
    h = SamplerHarness(16)
    h.processors(prompt=[1], output=[2, 2], bias=[(3, 1.0)], allowed=[3, 4], stop=[5], bad=[[6, 7]])
    assert h.pool.counts[0, :4].tolist() == [0, PROMPT_BIT, 2, IN_TABLE]
    assert h.tables.history[0].tolist() == [-1] * (HISTORY - 2) + [2, 2]
    h.processors(prompt=[200, 15, -3], bias=[(99, 1.0)])
    fresh = SamplerHarness(16)
    assert h.pool.counts[0].tolist() == [0] * 15 + [PROMPT_BIT]
    for name in ("entries", "allowed", "stop_ids", "bad_words"):
        assert torch.equal(getattr(h.pool, name), getattr(fresh.pool, name)), name
    assert torch.equal(h.tables.history, fresh.tables.history)


@pytest.mark.parametrize(
    "name,entries,said",
    [
        ("stop", range(257), "257 stop_ids: at most 256"),
        ("bad", [[1]] * 257, "257 bad_words: at most 256"),
        ("bias", [(i, 1.0) for i in range(1025)], "1025 bias_ids: at most 1024"),
        ("bad", [[1], range(17)], "one of bad_words is longer than 16"),
    ],
)
def test_lists_beyond_their_caps_are_refused(name, entries, said):
    with pytest.raises(ValueError, match=said):
        SamplerHarness(2000).processors(**{name: entries})


# the table


@pytest.mark.parametrize("max_len", [1, 128, 129, 40_960, 131_072, 1_000_000])
def test_a_table_has_room_for_all_biases_and_all_tokens_that_can_occur_often(max_len):
    pool = LogitsProcessorPool.allocate(1, 10, max_len, "meta")
    often = (max_len - 1) // (IN_TABLE + 1)
    assert pool.table_size > t.MAX_LOGIT_BIAS + often
    assert pool.table_size == 1 << pool.table_bits and pool.multiplier % 2 == 1


def small_table(vocab, size, multiplier=1 << 29 | 1):
    """A pool whose tables are of few places, where tokens collide and go round the end."""
    pool = LogitsProcessorPool.allocate(3, vocab, 1, "cpu", multiplier=multiplier)
    pool.entries = torch.zeros(3, t.ENTRY_PLANES, size, dtype=torch.int32)
    return pool


@pytest.mark.parametrize("size", [4, 8, 64])
def test_entries_collide_and_are_found(size):
    pool, rng = small_table(100, size), np.random.default_rng(size)
    bias_at = np.concatenate([row * 100 + rng.permutation(100)[: size - 1] for row in (0, 2)])
    none = np.zeros(0, np.int64)
    entries = token_counts_cpu.new_entries(pool, none, none, bias_at, bias_at.astype(np.float32))
    pool.entries.view(-1)[torch.from_numpy(entries.entries_at)] = torch.from_numpy(entries.values)
    for row in (0, 2):
        tokens, extra, bias = token_counts_cpu.entries_of_row(pool, row)
        assert (row * 100 + tokens).tolist() == sorted(bias_at[bias_at // 100 == row].tolist())
        assert (bias == row * 100 + tokens).all() and (extra == -IN_TABLE).all()
        for token, home in zip(tokens.tolist(), token_counts_cpu.homes(tokens, pool).tolist(), strict=True):
            probes = [pool.entries[row, t.ENTRY_KEY, (home + i) % size].item() for i in range(size)]
            assert 0 not in probes[: probes.index(token + 1)]
    with pytest.raises(ValueError, match="its table holds"):
        token_counts_cpu.new_entries(pool, none, none, np.arange(size), np.ones(size, np.float32))


def look_up(make, size, biases):
    h = make(40)
    h.pool.entries = torch.zeros(SLOTS, t.ENTRY_PLANES, size, dtype=torch.int32, device=h.device)
    h.set(temperature=0.0, has_processors=True)
    h.processors(bias=biases, output=[1])
    logits = np.arange(40, dtype=np.float32) / 8
    return rows_as_sampled(h, logits), expected_row(logits, bias=biases, output=[1])


def test_a_nearly_full_table_is_looked_up_around_its_end(make):
    got, want = look_up(make, 16, [(i, 0.25 * i) for i in range(3, 33, 2)])
    assert got.tolist() == want.tolist()


def test_every_sequence_of_a_full_engine_can_have_processors_within_256_mib():
    """1,024 sequences of Qwen3's vocabulary and context: pool, and what the sampler adds for it."""
    pool = LogitsProcessorPool.allocate(1024, 151_936, 40_960, "meta")
    mask = SamplerWorkspace.allocate(1024, 151_936, "meta").token_mask
    total = sum(v.nbytes for v in vars(pool).values() if isinstance(v, torch.Tensor)) + mask.nbytes
    assert pool.num_rows == 1024 and total < 256 * MIB
    small = LogitsProcessorPool.allocate(64, 151_936, 40_960, "meta")
    assert sum(v.nbytes for v in vars(small).values() if isinstance(v, torch.Tensor)) < 16 * MIB
