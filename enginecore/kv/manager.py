"""KVManager: which blocks each sequence holds, per KV group, and what the prefix cache can give it. No I/O.

A KV group is a set of layers that share a block table: window 0 sees everything, a sliding window only its last tokens. All
groups draw from one pool and grow in step: block i of every group holds tokens [i * size, (i + 1) * size). Blocks that a
window has left behind are given back and their place in the table names the null block.
"""

from collections import Counter
from typing import Any

import numpy as np

from quire.enginecore.kv.pool import BlockHasher, BlockPool
from quire.enginecore.scheduling.sequence import Sequence

NULL_BLOCK = 0


class KVManager:
    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int, ...], num_slots: int):
        """num_slots: of the device's block tables, the padding slot included; a table row is group * num_slots + slot."""
        self.block_size = block_size
        self.windows = windows
        self.num_groups = len(windows)
        self._num_slots = num_slots
        self.pool = BlockPool(num_blocks, self.num_groups)
        self.hasher = BlockHasher(block_size)
        self._pending: Counter[bytes] = Counter()  # hashes that prefills under way will register

    def blocks_needed(self, num_tokens: Any) -> Any:
        """Blocks that sequences of so many tokens hold, over all groups; behind a window the least that they can do with.

        `num_tokens` is an int or an array of them, and so is the result."""
        full = -(-num_tokens // self.block_size)
        return sum(np.minimum(full, -(-w // self.block_size) + 2) if w else full for w in self.windows)

    def blocks_to_grow(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks per group that `seq` lacks to hold `num_tokens`."""
        return max(-(-num_tokens // self.block_size) - len(seq.blocks[0]), 0)

    def grow(self, seq: Sequence, count: int) -> list[tuple[int, int, int]]:
        """Allocate `count` more blocks in every group; returns (table row, index, block) updates."""
        updates = []
        for group, blocks in enumerate(seq.blocks):
            for _ in range(count):
                block = self.pool.allocate()
                updates.append(self._update(group, seq.slot, len(blocks), block))
                blocks.append(block)
        return updates

    def table_of(self, seq: Sequence) -> list[tuple[int, int, int]]:
        """Updates that write the whole block tables."""
        return [self._update(g, seq.slot, i, b) for g, blocks in enumerate(seq.blocks) for i, b in enumerate(blocks)]

    def _update(self, group: int, slot: int, index: int, block: int) -> tuple[int, int, int]:
        return (group * self._num_slots + slot, index, block)

    # ------------------------------------------------------------------------------------------------ prefix cache
    def find_prefix(self, seq: Sequence, known: np.ndarray) -> tuple[list[list[int]], bool]:
        """Longest cached prefix of `known`, capped at all but one token and whole blocks.

        Returns each group's blocks (all of equal length, the null block where a window does not look), and whether the
        sequence should wait because another one is just computing the block it would need next.
        """
        nothing: list[list[int]] = [[] for _ in self.windows]
        if not seq.use_cache:
            return nothing, False
        if seq.waits_for is not None and self._pending[seq.waits_for] > 0:
            return nothing, True
        seq.waits_for = None
        self.hasher.extend(seq.hashes, seq.root_hash, known)
        if seq.params.prompt_logprobs is not None and seq.child == 0:
            return nothing, False
        most = (len(known) - 1) // self.block_size
        length = self._full_hits(seq.hashes[:most])
        hits = nothing
        while length > 0:
            found = [self._window_hits(g, seq.hashes, length) for g in range(self.num_groups)]
            shorter = min(reach for reach, _ in found)
            if shorter == length:
                hits = [blocks for _, blocks in found]
                break
            length = shorter
        if length < most and self._pending[seq.hashes[length]] > 0:
            seq.waits_for = seq.hashes[length]
            return nothing, True
        return hits, False

    def _full_hits(self, hashes: list[bytes]) -> int:
        groups = [g for g, w in enumerate(self.windows) if w == 0]
        for i, h in enumerate(hashes):
            if any(self.pool.find(g, h) is None for g in groups):
                return i
        return len(hashes)

    def _window_hits(self, group: int, hashes: list[bytes], length: int) -> tuple[int, list[int]]:
        """How many of `length` blocks may be hit as far as `group` knows (fewer if one that the next token sees is not cached),
        and, if all, the group's blocks."""
        first = self._first_visible(group, length * self.block_size)
        found: list[int] = []
        for i in range(length - 1, first - 1, -1):
            block = self.pool.find(group, hashes[i])
            if block is None:
                return i, []
            found.append(block)
        return length, [NULL_BLOCK] * first + found[::-1]

    def _first_visible(self, group: int, num_computed: int) -> int:
        """Index of the first block that the token at position `num_computed` can see."""
        window = self.windows[group]
        return max(num_computed - window + 1, 0) // self.block_size if window else 0

    def attach(self, seq: Sequence, hits: list[list[int]]) -> int:
        """Take the found blocks; returns how many each group has."""
        seq.blocks = [[self.pool.take(b) if b else NULL_BLOCK for b in group] for group in hits]
        seq.num_released = [self._first_visible(g, len(hits[g]) * self.block_size) for g in range(self.num_groups)]
        seq.num_registered = len(hits[0])
        return len(hits[0])

    def hash_known(self, seq: Sequence, known: np.ndarray) -> None:
        self.hasher.extend(seq.hashes, seq.root_hash, known)

    def register(self, seq: Sequence, num_full_blocks: int) -> None:
        """Make the sequence's first `num_full_blocks` blocks findable; their hashes must be known."""
        for i in range(seq.num_registered, min(num_full_blocks, len(seq.hashes))):
            for group, blocks in enumerate(seq.blocks):
                if blocks[i] != NULL_BLOCK:
                    self.pool.register(group, blocks[i], seq.hashes[i])
            if seq.pending:
                self._drop_pending(seq.hashes[i])
        seq.num_registered = max(seq.num_registered, min(num_full_blocks, len(seq.hashes)))

    def add_pending(self, seq: Sequence) -> None:
        if seq.use_cache:
            seq.pending = True
            self._pending.update(seq.hashes[seq.num_registered :])

    def remove_pending(self, seq: Sequence) -> None:
        if seq.pending:
            seq.pending = False
            for h in seq.hashes[seq.num_registered :]:
                self._drop_pending(h)

    def _drop_pending(self, block_hash: bytes) -> None:
        self._pending[block_hash] -= 1
        if self._pending[block_hash] <= 0:
            del self._pending[block_hash]

    # ----------------------------------------------------------------------------------------------------- release
    def release_outside_window(self, seq: Sequence, num_computed: int) -> None:
        """Give back blocks that no step after the one that computed `num_computed` tokens can read."""
        for group, window in enumerate(self.windows):
            if not window:
                continue
            first, blocks = self._first_visible(group, num_computed), seq.blocks[group]
            for i in range(seq.num_released[group], min(first, len(blocks))):
                self.pool.release([blocks[i]])
                blocks[i] = NULL_BLOCK
            seq.num_released[group] = max(seq.num_released[group], min(first, len(blocks)))

    def free(self, seq: Sequence) -> None:
        """Give back everything; the sequence's end is evicted before its beginning."""
        for blocks in seq.blocks:
            self.pool.release(reversed(blocks))
        seq.blocks, seq.num_released, seq.num_registered = [], [], 0

    def check(self, holders: list[Sequence]) -> None:
        self.pool.check([blocks for seq in holders for blocks in seq.blocks])
        assert all(n > 0 for n in self._pending.values())
        waited_for = Counter(h for s in holders if s.pending for h in s.hashes[s.num_registered :])
        assert waited_for == self._pending, "prefixes being computed differ from what the sequences say"
