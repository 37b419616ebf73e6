"""KVManager: which blocks each sequence holds, per KV group, and what the prefix cache can give it. No I/O.

A KV group is a set of layers that share a block table: window 0 sees everything, a sliding window only its last tokens. All
groups draw from one pool and grow in step: block i of every group holds tokens [i * size, (i + 1) * size). Blocks that a
window has left behind are given back and their place in the table names the null block. It alone writes a SequenceBlocks;
it knows nothing of scheduling, whose parts call it.
"""

import bisect
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from quire.enginecore.kv.pool import BlockHasher, BlockPool
from quire.enginecore.kv.sequence_blocks import SequenceBlocks

NULL_BLOCK = 0


class PrefixHits(NamedTuple):
    """What the prefix cache has for a sequence."""

    blocks: list[list[int]]  # per KV group, all of equal length: the null block where a window does not look
    num_blocks: int  # that were found for each group
    waits_for: bytes | None = None  # another is computing what would be needed next, up to this block: nothing is taken yet


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
        self._computes: dict[bytes, SequenceBlocks] = {}  # hash in _pending -> one that is computing, or was, its block
        self._waited_for: set[bytes] = set()  # hashes in _pending that find_prefix has told somebody to wait for
        self._resolved: list[bytes] = []  # those of them that are not pending any more

    def blocks_needed(self, num_tokens: Any) -> Any:
        """Blocks that sequences of so many tokens hold, over all groups; behind a window the least that they can do with.

        `num_tokens` is an int or an array of them, and so is the result."""
        full = -(-num_tokens // self.block_size)
        return sum(np.minimum(full, -(-w // self.block_size) + 2) if w else full for w in self.windows)

    def blocks_to_grow(self, held: SequenceBlocks, num_tokens: int) -> int:
        """Blocks per group that `held` lacks for `num_tokens`."""
        return max(-(-num_tokens // self.block_size) - held.num_blocks, 0)

    def grow(self, held: SequenceBlocks, slot: int, count: int) -> list[tuple[int, int, int]]:
        """Allocate `count` more blocks in every group; returns (table row, index, block) updates."""
        updates = []
        for group, blocks in enumerate(held.blocks):
            row = group * self._num_slots + slot
            for _ in range(count):
                block = self.pool.allocate()
                updates.append((row, len(blocks), block))
                blocks.append(block)
        return updates

    def table_of(self, held: SequenceBlocks, slot: int) -> list[tuple[int, int, int]]:
        """Updates that write the whole block tables."""
        rows = ((group * self._num_slots + slot, blocks) for group, blocks in enumerate(held.blocks))
        return [(row, i, block) for row, blocks in rows for i, block in enumerate(blocks)]

    # ------------------------------------------------------------------------------------------------ prefix cache
    def hash_known(self, held: SequenceBlocks, known: np.ndarray) -> None:
        """Hash the full blocks of `known`, all ids that are known, that have no hash yet."""
        self.hasher.extend(held.hashes, held.root_hash, known)

    def hash_waiting(self, held: SequenceBlocks, known: np.ndarray, most: int) -> int:
        """As `hash_known` for ids that nobody will write to, about `most` blocks at most; returns how many were done.

        What it has in common with the sequences hashed last is taken from them, at a fraction of the cost, and counts so:
        children of a request, and requests with one long prefix that come together, are hashed once."""
        if not held.use_cache:
            return 0
        done = 0 if held.hashes else self.hasher.begin(held.hashes, held.root_hash, known) // 32
        return done + self.hasher.extend(held.hashes, held.root_hash, known, max(most - done, 1))

    def is_hashed(self, held: SequenceBlocks, num_tokens: int) -> bool:
        """Whether `find_prefix` may be asked: all full blocks of its tokens are hashed, or hashes do not matter."""
        return not held.use_cache or len(held.hashes) >= num_tokens // self.block_size

    def find_prefix(self, held: SequenceBlocks, num_tokens: int) -> PrefixHits:
        """Longest cached prefix of a sequence's `num_tokens` tokens, capped at all but one token and whole blocks; or the
        hash of the block that it should wait for, because another one is just computing it. `is_hashed` must hold."""
        if not held.use_cache or not held.may_hit:
            return PrefixHits([[] for _ in self.windows], 0)
        hashes, most = held.hashes, (num_tokens - 1) // self.block_size
        length = self._full_hits(hashes, most)
        while True:
            found = {g: self._window_hits(g, hashes, length) for g, window in enumerate(self.windows) if window}
            shorter = min((reach for reach, _ in found.values()), default=length)
            if shorter == length:
                break
            length = shorter
        if length < most and hashes[length] in self._pending:
            last = self._last_in_common(hashes, length, most)
            self._waited_for.add(last)
            return PrefixHits([[] for _ in self.windows], length, waits_for=last)
        groups = range(self.num_groups)
        return PrefixHits([found[g][1] if g in found else self.pool.find_all(g, hashes[:length]) for g in groups], length)

    def _last_in_common(self, hashes: list[bytes], first: int, end: int) -> bytes:
        """The last of `hashes[first:end]` that the sequence which computes hashes[first] is computing, too.

        Chains agree up to one point and nowhere behind it. Waiting for the first alone would mean a look after each of the
        other's chunks: 300 requests behind one new prefix of 60k tokens made a step's schedule take 66 ms."""
        other = self._computes[hashes[first]].hashes
        end = bisect.bisect_left(range(first, min(end, len(other))), True, key=lambda i: hashes[i] != other[i]) + first
        return hashes[end - 1] if end > first and hashes[end - 1] in self._pending else hashes[first]

    def take_resolved(self) -> list[bytes]:
        """Hashes that somebody was told to wait for and need not wait for any longer."""
        resolved, self._resolved = self._resolved, []
        return resolved

    def _full_hits(self, hashes: list[bytes], most: int) -> int:
        """How many of the first `most` blocks all groups without a window have."""
        for group in (g for g, w in enumerate(self.windows) if not w):
            most = self.pool.count_cached(group, hashes, most)
        return most

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

    def attach(self, held: SequenceBlocks, hits: PrefixHits) -> int:
        """Take the found blocks; returns how many each group has."""
        for blocks in hits.blocks:
            self.pool.take(blocks)
        held.blocks = hits.blocks
        held.num_released = [self._first_visible(g, len(b) * self.block_size) for g, b in enumerate(hits.blocks)]
        held.num_registered = hits.num_blocks
        return hits.num_blocks

    def register(self, held: SequenceBlocks, num_full_blocks: int) -> None:
        """Make the sequence's first `num_full_blocks` blocks findable; their hashes must be known."""
        end = min(num_full_blocks, len(held.hashes))
        for i in range(held.num_registered, end):
            for group, blocks in enumerate(held.blocks):
                if blocks[i] != NULL_BLOCK:
                    self.pool.register(group, blocks[i], held.hashes[i])
            if held.is_pending:
                self._drop_pending(held.hashes[i])
        held.num_registered = max(held.num_registered, end)

    def add_pending(self, held: SequenceBlocks) -> None:
        """Others may wait for the blocks that it is about to compute."""
        if held.use_cache:
            held.is_pending = True
            hashes = held.hashes[held.num_registered :]
            self._pending.update(hashes)
            self._computes.update(dict.fromkeys(hashes, held))

    def remove_pending(self, held: SequenceBlocks) -> None:
        """It computes nothing more that others could wait for."""
        if held.is_pending:
            held.is_pending = False
            for h in held.hashes[held.num_registered :]:
                self._drop_pending(h)

    def _drop_pending(self, block_hash: bytes) -> None:
        self._pending[block_hash] -= 1
        if self._pending[block_hash] <= 0:
            del self._pending[block_hash], self._computes[block_hash]
            if block_hash in self._waited_for:
                self._waited_for.remove(block_hash)
                self._resolved.append(block_hash)

    # ----------------------------------------------------------------------------------------------------- release
    def release_outside_window(self, held: SequenceBlocks, num_computed: int) -> None:
        """Give back blocks that no step after the one that computed `num_computed` tokens can read."""
        for group, window in enumerate(self.windows):
            if not window:
                continue
            blocks, released = held.blocks[group], held.num_released[group]
            first = min(self._first_visible(group, num_computed), len(blocks))
            for i in range(released, first):
                self.pool.release([blocks[i]])
                blocks[i] = NULL_BLOCK
            held.num_released[group] = max(released, first)

    def free(self, held: SequenceBlocks) -> None:
        """Give back everything; the sequence's end is evicted before its beginning."""
        for blocks in held.blocks:
            self.pool.release(reversed(blocks))
        held.blocks, held.num_released, held.num_registered = [], [], 0

    def check(self, holders: list[SequenceBlocks]) -> None:
        """Assert that `holders`, all there are, account for every reference and every pending hash."""
        self.pool.check([blocks for held in holders for blocks in held.blocks])
        pending = Counter(h for held in holders if held.is_pending for h in held.hashes[held.num_registered :])
        assert pending == self._pending, "prefixes being computed differ from what the sequences say"
        assert all(n > 0 for n in self._pending.values())
        assert self._computes.keys() == self._pending.keys() and self._waited_for <= self._pending.keys()
