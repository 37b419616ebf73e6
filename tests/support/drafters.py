"""Drafters for tests, hostile ones among them: whatever they draft, no sequence may get another token."""

import numpy as np
import torch

from quire.ipc.step.sections import MAX_DRAFTS
from quire.kernels.speculation import ngram_cpu
from quire.workers.speculation.drafter import Drafter


class DrafterOfTexts(Drafter):
    """Calls draft_of(text) with all known ids of each row that sampled; it returns up to 15 ids."""

    def __init__(self, cache, group, draft_of):
        self._group, self._block_size, self._draft_of = group, cache.block_size, draft_of
        self._text = torch.zeros(cache.num_blocks * cache.block_size, dtype=torch.int32)

    def extend(self, step, num_tokens):
        ngram_cpu.write_text(step, self._text, self._group, num_tokens)

    def draft(self, tables, step, num_rows):
        state = tables.host
        for row in step.host["samples"][: int(step.num_rows[0])].nonzero()[0]:
            slot = step.host["row_slots"][row]
            length = int(state["seq_len"][slot])
            blocks = state["block_table"][self._group, slot, : -(-length // self._block_size)]
            text = self._text.numpy().reshape(-1, self._block_size)[blocks].reshape(-1)[:length]
            drafts = np.asarray(self._draft_of([*text.tolist(), int(state["last_token"][slot])])[:MAX_DRAFTS], np.int32)
            state["drafts"][slot, : len(drafts)], state["num_drafts"][slot] = drafts, len(drafts)


def drafting(name, texts, eos, vocab):
    """A function for DrafterOfTexts. texts: prompts with their outputs, which the oracle knows."""
    generator = np.random.default_rng(0)

    def right(text):
        found = next((known for known in texts if len(known) > len(text) and known[: len(text)] == text), text)
        return found[len(text) : len(text) + MAX_DRAFTS]

    return {
        "right": right,
        "wrong": lambda text: [(token + 1) % vocab for token in right(text)],
        "some": lambda text: right(text)[: generator.integers(MAX_DRAFTS + 1)] + [0],
        "random": lambda text: generator.integers(vocab, size=generator.integers(MAX_DRAFTS + 1)).tolist(),
        "eos": lambda text: right(text)[: generator.integers(4)] + [eos] * MAX_DRAFTS,
        "outside": lambda text: [2**31 - 1, -1, -(2**31), vocab, *right(text)],
        "outside behind": lambda text: [*right(text)[:1], -1, -2],
    }[name]
