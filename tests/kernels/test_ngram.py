"""Drafts from a sequence's own text: the CPU path against plain Python, the kernels against the CPU path."""

import itertools

import numpy as np
import pytest
import torch

from quire.ipc.step.sections import MAX_DRAFTS
from quire.kernels.speculation import ngram_cpu
from quire.kernels.step.tables import SlotTables, StepBuffers

BLOCK_SIZE, NUM_BLOCKS, GROUP = 4, 2700, 1


def plain(text, min_n, max_n, most):
    """The tokens behind the last earlier occurrence of the longest suffix of text, a list, and again if the text ends."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return list(itertools.islice(itertools.cycle(text[end:]), most))
    return []


def case(texts, seed, device="cpu"):
    """(tables, step, text) of rows whose tokens, all but the last, are in blocks in any order; slots not in order."""
    rng, rows = np.random.default_rng(seed), len(texts)
    most = max(-(-len(t) // BLOCK_SIZE) for t in texts) + 1
    tables = SlotTables.allocate(rows + 2, 2, most, "cpu", speculates=True)
    step = StepBuffers.allocate(max(map(len, texts)), rows + 2, 2, "cpu", rows + 2)
    free = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
    text = torch.from_numpy(rng.integers(0, 3, NUM_BLOCKS * BLOCK_SIZE).astype(np.int32))  # of others, and of unused blocks
    slots = rng.permutation(rows + 1)[:rows]
    for row, (slot, ids) in enumerate(zip(slots.tolist(), texts, strict=True)):
        known = len(ids) - 1
        blocks = [free.pop() for _ in range(-(-known // BLOCK_SIZE))]
        tables.block_table[GROUP, slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        step.slot_mapping[GROUP, :known] = torch.tensor(
            [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(known)]
        )
        step.slot_mapping[GROUP, known:] = -1
        step.input_ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        ngram_cpu.write_text(step, text, GROUP, len(ids))
        step.row_slots[row], tables.seq_len[slot], tables.last_token[slot] = slot, known, ids[-1]
    step.row_slots[rows:] = rows + 2
    step.samples[:rows], step.num_rows[0] = 1, rows
    tables.drafts.fill_(-7)
    tables.num_drafts.fill_(9)
    for owner in (tables, step):
        for name, x in list(vars(owner).items()):
            if isinstance(x, torch.Tensor):
                setattr(owner, name, x.to(device))
    return tables, step, text.to(device)


def texts_of(seed, lengths):
    """Texts of few ids, of random parts, of one id alone."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(0, int(rng.choice([1, 2, 3, 50])), n).tolist() for n in lengths]
    return [t + t[: len(t) // 2] if i % 3 == 1 else t for i, t in enumerate(made)]


@pytest.mark.parametrize(("min_n", "max_n", "most"), [(1, 1, 15), (1, 3, 15), (2, 4, 3), (3, 20, 1)])
def test_drafts_follow_the_last_occurrence_of_the_longest_suffix(min_n, max_n, most):
    texts = texts_of(max_n, [2, 3, 4, 5, 8, 9, 30, 60, 61, 100])
    tables, step, text = case(texts, 0)
    step.samples[3] = 0
    sizes = {"block_size": BLOCK_SIZE, "min_n": min_n, "max_n": max_n, "num_drafts": most}
    ngram_cpu.draft_ngrams(tables, step, text, GROUP, len(texts) + 2, **sizes)
    found = 0
    for row, ids in enumerate(texts):
        slot = int(step.row_slots[row])
        count = int(tables.num_drafts[slot])
        if row == 3:
            assert count == 9 and (tables.drafts[slot] == -7).all()
            continue
        assert tables.drafts[slot, :count].tolist() == plain(ids, min_n, max_n, most), ids
        found += count > 0
    assert found > 2


def compare(device, lengths, seed):
    from quire.kernels.speculation import ngram

    texts = texts_of(seed, lengths)
    ours, theirs = case(texts, seed, device), case(texts, seed)
    for min_n, max_n, most in ((1, 3, MAX_DRAFTS), (2, 5, 4), (1, 1, 1), (4, 40, 7)):
        sizes = {"block_size": BLOCK_SIZE, "min_n": min_n, "max_n": max_n, "num_drafts": most}
        ngram.draft_ngrams(*ours, GROUP, len(texts) + 2, **sizes)
        ngram_cpu.draft_ngrams(*theirs, GROUP, len(texts) + 2, **sizes)
        assert torch.equal(ours[0].num_drafts.cpu(), theirs[0].num_drafts)
        for slot, count in enumerate(theirs[0].num_drafts.tolist()):
            count = count if count != 9 else 0
            assert torch.equal(ours[0].drafts[slot, :count].cpu(), theirs[0].drafts[slot, :count])
    mapping = torch.full_like(theirs[1].slot_mapping[GROUP], -1)
    mapping[::3] = torch.arange(len(mapping[::3])) * 3
    for _, step, text in (ours, theirs):
        step.slot_mapping[GROUP] = mapping.to(text.device)
        module = ngram_cpu if step is theirs[1] else ngram
        module.write_text(step, text, GROUP, len(mapping) - 1)
    assert torch.equal(ours[2].cpu(), theirs[2])


@pytest.mark.interpret
@pytest.mark.parametrize("lengths", [[2, 3, 4, 9, 40, 100], [9000]])
def test_kernels_agree_with_the_cpu_path_in_the_interpreter(lengths):
    compare("cpu", lengths, len(lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[2, 3, 4, 9, 40, 100], [9000], [7 * i + 2 for i in range(20)]])
def test_kernels_agree_with_the_cpu_path(lengths):
    compare("cuda", lengths, len(lengths))
