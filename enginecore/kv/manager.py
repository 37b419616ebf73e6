"""KVManager: which blocks each sequence holds, per KV group, and what the prefix cache can give it. No I/O.

A KV group is a set of layers that share a block table: window 0 sees everything, a sliding window only its last tokens. All
groups draw from one pool and grow together: block i of every group holds tokens [i * size, (i + 1) * size). Blocks that a
window has left behind are given back, and their entries in the table name the null block. Only KVManager writes a
SequenceBlocks. It knows nothing of scheduling; the scheduler's parts call it.
"""

import bisect
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from quire.enginecore.kv.pool import BlockHasher, BlockPool
from quire.enginecore.kv.sequence_blocks import SequenceBlocks

NULL_BLOCK = 0


class PrefixHits(NamedTuple):
    """The blocks that the prefix cache has for a sequence."""

    blocks: list[list[int]]  # per KV group, all of equal length: the null block where a window does not look
    num_blocks: int  # found for each group
    waits_for: bytes | None = None  # another sequence is computing the next blocks, up to this one: nothing is taken yet


class KVManager:
    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int, ...], num_slots: int):
        """num_slots: of the device's block tables, including the padding slot; a table row is group * num_slots + slot."""
        self.block_size = block_size
        self.windows = windows
        self.num_groups = len(windows)
        self._num_slots = num_slots
        self.pool = BlockPool(num_blocks, self.num_groups)
        self.hasher = BlockHasher(block_size)
        self._pending: Counter[bytes] = Counter()  # hashes that prefills under way will register
        self._computes: dict[bytes, SequenceBlocks] = {}  # hash in _pending -> a sequence that computes its block, or did
        self._waited_for: set[bytes] = set()  # hashes in _pending that find_prefix has told a sequence to wait for
        self._resolved: list[bytes] = []  # those of them that are no longer pending

    def blocks_needed(self, num_tokens: Any) -> Any:
        """Blocks that a sequence of num_tokens tokens holds, over all groups; in groups with a window, the fewest that suffice.

        num_tokens is an int or an array, and so is the result."""
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
        """The updates that write the sequence's whole block tables: (table row, index, block)."""
        rows = ((group * self._num_slots + slot, blocks) for group, blocks in enumerate(held.blocks))
        return [(row, i, block) for row, blocks in rows for i, block in enumerate(blocks)]

    # ------------------------------------------------------------------------------------------------ prefix cache
    def hash_known(self, held: SequenceBlocks, known: np.ndarray) -> None:
        """Hash the full blocks of `known`, all known ids of the sequence, that have no hash yet."""
        self.hasher.extend(held.hashes, held.root_hash, known)

    def hash_waiting(self, held: SequenceBlocks, known: np.ndarray, most: int) -> int:
        """As `hash_known`, for at most about `most` blocks, of ids that are never written to again; returns how many it did.

        Hashes in common with the sequences hashed last are copied from these, and count as the fraction of the work that this
        is: children of a request, and requests that come together with one long prefix, are hashed once."""
        if not held.use_cache:
            return 0
        done = 0 if held.hashes else self.hasher.begin(held.hashes, held.root_hash, known) // 32
        return done + self.hasher.extend(held.hashes, held.root_hash, known, max(most - done, 1))

    def is_hashed(self, held: SequenceBlocks, num_tokens: int) -> bool:
        """Whether `find_prefix` may be asked: all full blocks of its tokens are hashed, or hashes do not matter."""
        return not held.use_cache or len(held.hashes) >= num_tokens // self.block_size

    def find_prefix(self, held: SequenceBlocks, num_tokens: int) -> PrefixHits:
        """The longest cached prefix of a sequence's num_tokens tokens, in whole blocks and without the last token; or the hash
        of the block that it should wait for, because another sequence is computing it. `is_hashed` must hold."""
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
        """The last of `hashes[first:end]` that is computed by the same sequence as hashes[first].

        Chains agree up to one point and nowhere after it. Waiting only for the first would mean a look after each chunk of the
        other sequence: 300 requests behind one new prefix of 60k tokens made a step's schedule take 66 ms."""
        other = self._computes[hashes[first]].hashes
        end = bisect.bisect_left(range(first, min(end, len(other))), True, key=lambda i: hashes[i] != other[i]) + first
        return hashes[end - 1] if end > first and hashes[end - 1] in self._pending else hashes[first]

    def take_resolved(self) -> list[bytes]:
        """Hashes that a sequence was told to wait for, and that are no longer pending."""
        resolved, self._resolved = self._resolved, []
        return resolved

    def _full_hits(self, hashes: list[bytes], most: int) -> int:
        """How many of the first `most` blocks are cached, one after the other, in all groups without a window."""
        for group in (g for g, w in enumerate(self.windows) if not w):
            most = self.pool.count_cached(group, hashes, most)
        return most

    def _window_hits(self, group: int, hashes: list[bytes], length: int) -> tuple[int, list[int]]:
        """How many of `length` blocks may be hit by this group alone (fewer if one that the next token sees is not cached), and
        the group's blocks if all may."""
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
        """Give the blocks that were found to the sequence; returns how many each group has."""
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
        """Let other sequences wait for the blocks that this one is about to compute."""
        if held.use_cache:
            held.is_pending = True
            hashes = held.hashes[held.num_registered :]
            self._pending.update(hashes)
            self._computes.update(dict.fromkeys(hashes, held))

    def remove_pending(self, held: SequenceBlocks) -> None:
        """The sequence computes no more blocks that others could wait for."""
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
        """Give back blocks that no step can read after the one that computed token num_computed - 1."""
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
        """Give back all blocks; the end of the sequence is evicted before its beginning."""
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
