"""A head reads features of a step: the kernels write what torch writes, at odd sizes, whatever the rows have been through."""

import numpy as np
import pytest
import torch

from quire.kernels.speculation import features_cpu
from quire.kernels.step.tables import SlotTables, StepBuffers

SLOTS, BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS = 7, 4, 12, 60


def world(seed):
    """Tables, a step that is done, and a pass behind it: rows that lag, without tokens, with rejected drafts, and new."""
    draw = np.random.default_rng(seed)
    tables = SlotTables.allocate(SLOTS, 2, MAX_BLOCKS, "cpu", speculates=True)
    step, out = StepBuffers.allocate(90, SLOTS, 2, "cpu", 64), StepBuffers.allocate(90, SLOTS, 1, "cpu")
    now, then, rows = step.host, out.host, 5
    blocks = draw.permutation(np.arange(1, NUM_BLOCKS)).astype(np.int32)[: SLOTS * 8].reshape(SLOTS, 8)
    tables.host["block_table"][1, :SLOTS, :8] = blocks
    now["num_rows"][0] = rows
    slots = now["row_slots"][:rows] = then["row_slots"][:rows] = draw.permutation(SLOTS)[:rows]
    now["row_slots"][rows:] = then["row_slots"][rows:] = SLOTS
    at = to = 0
    for row, slot in enumerate(slots):
        first, tokens = 0 if row == 4 else int(draw.integers(14)), int(draw.integers(1, 16))
        kept = int(draw.integers(1, tokens + 1)) if row < 3 else tokens  # the others were rejected
        position = first + np.arange(tokens)
        written = blocks[slot, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        now["slot_mapping"][1, at : at + tokens] = np.where(draw.random(tokens) < 0.9, written, -1)
        at += tokens
        now["query_start"][row + 1], now["seq_lens"][row] = at, first + tokens
        tables.host["seq_len"][slot] = first + kept
        begin = max(first - int(draw.integers(2)), 0)
        read = 0 if row == 2 else first + kept + int(row != 1) - begin
        then["positions"][to : to + read] = begin + np.arange(read)
        to += read
        then["query_start"][row + 1] = to
    now["query_start"][rows + 1 :], then["query_start"][rows + 1 :] = at, to
    return tables, step, out, to


def found_by(kernels, seed, size, padding, rows):
    tables, step, out, tokens = world(seed)
    generator = torch.Generator().manual_seed(seed)
    of_step = torch.randn(int(step.query_start[5]) + padding, size, generator=generator)
    kept = torch.randn(NUM_BLOCKS, size, generator=generator)
    before = kept.clone()
    found = kernels.read_features(tables, step, out, of_step, kept, 1, tokens + padding, rows, BLOCK_SIZE)
    assert (kept != before).any()
    return found, kept[1:], tokens


@pytest.mark.interpret
@pytest.mark.parametrize(("size", "padding", "rows"), [(1, 0, 5), (37, 3, 7), (1100, 1, 5)])
def test_kernels_write_what_torch_writes(size, padding, rows):
    from quire.kernels.speculation import features

    for seed in range(3 if size < 1000 else 1):
        want, want_kept, tokens = found_by(features_cpu, seed, size, padding, rows)
        found, kept, _ = found_by(features, seed, size, padding, rows)
        torch.testing.assert_close(found[:tokens], want[:tokens], rtol=0, atol=0)
        torch.testing.assert_close(kept, want_kept, rtol=0, atol=0)
