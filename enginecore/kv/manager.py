"""KVManager: which blocks each sequence holds, per KV group, and what the prefix cache can give it. No I/O.

A KV group is a set of layers that share a block table; groups.py has their kinds. All groups draw from one pool and grow
together: block i of every group holds tokens [i * size, (i + 1) * size). Blocks that a window has left behind are given back,
and their entries in the table name the null block. Only KVManager writes a SequenceBlocks. It knows nothing of scheduling; the
scheduler's parts call it.
"""

import bisect
from collections import Counter
from typing import Any

import numpy as np

from quire.enginecore.kv.groups import group_of
from quire.enginecore.kv.pool import NULL_BLOCK, BlockHasher, BlockPool
from quire.enginecore.kv.sequence_blocks import NO_HITS, PrefixHits, SequenceBlocks
from quire.enginecore.kv.states import NoStates, States
from quire.ipc.messages.workers import KVGroupKind

NO_STATES = NoStates()


class KVManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        kinds: tuple[KVGroupKind, ...],
        num_slots: int,
        states: States | NoStates = NO_STATES,
        max_whole_span: int = 0,
    ):
        """num_slots: of the device's block tables, including the padding slot; a table row is group * num_slots + slot.
        max_whole_span: the most tokens that one step may have to compute together."""
        self.block_size = block_size
        self.groups = [group_of(kind, index, block_size, max_whole_span) for index, kind in enumerate(kinds)]
        self.num_groups = len(kinds)
        self._early = [group for group in self.groups if group.frees_early]
        self._num_slots = num_slots
        self.states = states
        self.pool = BlockPool(num_blocks, self.num_groups, states.forget)
        self.hasher = BlockHasher(block_size)
        self._pending: Counter[bytes] = Counter()  # hashes that prefills under way will register
        self._computes: dict[bytes, SequenceBlocks] = {}  # hash in _pending -> a sequence that computes its block, or did
        self._waited_for: set[bytes] = set()  # hashes in _pending that find_prefix has told a sequence to wait for
        self._resolved: list[bytes] = []  # those of them that are no longer pending

    @property
    def frees_early(self) -> bool:
        """Whether running sequences give blocks back, in `release_outside_window`."""
        return bool(self._early)

    def blocks_needed(self, num_tokens: Any) -> Any:
        """Blocks that a sequence of num_tokens tokens holds, over all groups; in groups with a window, the fewest that suffice.

        num_tokens is an int or an array, and so is the result."""
        return sum((group.blocks_needed(num_tokens) for group in self.groups), 0 * num_tokens)

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
        held.num_blocks += count
        return updates

    def table_of(self, held: SequenceBlocks, slot: int) -> list[tuple[int, int, int]]:
        """The updates that write the sequence's whole block tables: (table row, index, block)."""
        rows = ((group * self._num_slots + slot, blocks) for group, blocks in enumerate(held.blocks))
        return [(row, i, block) for row, blocks in rows for i, block in enumerate(blocks)]

    # ------------------------------------------------------------------------------------------------ prefix cache
    def hash_known(self, held: SequenceBlocks, known: np.ndarray) -> None:
        """Hash the full blocks of `known`, all known ids of the sequence, that have no hash yet."""
        self.hasher.extend(held.hashes, held.root_hash, known, None, held.fork, held.items)

    def hash_waiting(self, held: SequenceBlocks, known: np.ndarray, most: int) -> int:
        """As `hash_known`, for at most about `most` blocks, of ids that are never written to again; returns how many it did.

        Hashes in common with the sequences hashed last are copied from these, and count as the fraction of the work that this
        is: children of a request, and requests that come together with one long prefix, are hashed once."""
        if not held.use_cache:
            return 0
        done = 0 if held.hashes else self.hasher.begin(held.hashes, held.root_hash, known, held.fork, held.items) // 32
        return done + self.hasher.extend(held.hashes, held.root_hash, known, max(most - done, 1), held.fork, held.items)

    def is_hashed(self, held: SequenceBlocks, num_tokens: int) -> bool:
        """Whether `find_prefix` may be asked: all full blocks of its tokens are hashed, or hashes do not matter."""
        return not held.use_cache or len(held.hashes) >= num_tokens // self.block_size

    def find_prefix(self, held: SequenceBlocks, num_tokens: int) -> PrefixHits:
        """The longest cached prefix of a sequence's num_tokens tokens, in whole blocks and without the last token; or the hash
        of the block that it should wait for, because another sequence is computing it. `is_hashed` must hold. The result is
        also kept in `held.hits`, for `attach`."""
        held.hits = self._hits_of(held, num_tokens)
        return held.hits

    def _hits_of(self, held: SequenceBlocks, num_tokens: int) -> PrefixHits:
        if not held.use_cache or not held.may_hit:
            return PrefixHits([[] for _ in self.groups], 0)
        hashes, most = held.hashes, (num_tokens - 1) // self.block_size
        reach, length = self._count_hits(hashes, most)
        if (block_hash := self._waits_for(hashes, reach, length, most)) is not None:
            return PrefixHits([[] for _ in self.groups], length, waits_for=block_hash)
        blocks = [group.hits(self.pool, hashes, length) for group in self.groups]
        num_held = sum(len(some) - some.count(NULL_BLOCK) for some in blocks)
        return PrefixHits(blocks, length, None, num_held, sum(map(self.pool.count_unused, blocks)), reach)

    def _waits_for(self, hashes: list[bytes], reach: int, length: int, most: int) -> bytes | None:
        """The block that a sequence should wait for, because another one is computing it. reach: blocks that are there already;
        length: of these, what it would hit."""
        if reach < most and hashes[reach] in self._pending:
            last = self._last_in_common(hashes, reach, most)
            if not self.states.ask_for(self._computes[hashes[reach]], last + 1):
                self._waited_for.add(hashes[last])
                return hashes[last]
        return self.states.wait_for(hashes, length, most)

    def _last_in_common(self, hashes: list[bytes], first: int, end: int) -> int:
        """The index of the last of `hashes[first:end]` that is computed by the same sequence as hashes[first].

        Chains agree up to one point and nowhere after it. Waiting only for the first would mean a look after each chunk of the
        other sequence: 300 requests behind one new prefix of 60k tokens made a step's schedule take 66 ms."""
        other = self._computes[hashes[first]].hashes
        end = bisect.bisect_left(range(first, min(end, len(other))), True, key=lambda i: hashes[i] != other[i]) + first
        return end - 1 if end > first and hashes[end - 1] in self._pending else first

    def take_resolved(self) -> list[bytes]:
        """Hashes that a sequence was told to wait for, and that are no longer pending."""
        resolved, self._resolved = self._resolved, []
        return resolved + self.states.take_resolved()

    def _count_hits(self, hashes: list[bytes], most: int) -> tuple[int, int]:
        """How many of the first `most` blocks may be hit in all groups, and how many of these end where a state is kept."""
        reach = length = self._agreed_by_groups(hashes, most)
        while (count := self.states.count_hits(hashes, length)) < length:
            length = self._agreed_by_groups(hashes, count)
        return reach, length

    def _agreed_by_groups(self, hashes: list[bytes], most: int) -> int:
        length, agreed, at = most, 0, 0  # agreed: groups, the last ones asked, that have all of `length`
        while agreed < self.num_groups:
            count = self.groups[at].count_hits(self.pool, hashes, length)
            agreed = agreed + 1 if count == length else 1
            length, at = count, (at + 1) % self.num_groups
        return length

    def attach(self, held: SequenceBlocks) -> int:
        """Give the blocks that `find_prefix` has found to the sequence; returns how many each group has."""
        hits, held.hits = held.hits, NO_HITS
        for blocks in hits.blocks:
            self.pool.take(blocks)
        held.blocks = hits.blocks
        held.num_released = [group.first_visible(hits.num_blocks * self.block_size) for group in self.groups]
        held.num_blocks = held.num_registered = hits.num_blocks
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
        self.states.register(held)

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
        for group in self._early:
            blocks, released = held.blocks[group.index], held.num_released[group.index]
            first = min(group.first_visible(num_computed), len(blocks))
            for i in range(released, first):
                self.pool.release([blocks[i]])
                blocks[i] = NULL_BLOCK
            held.num_released[group.index] = max(released, first)

    def free(self, held: SequenceBlocks) -> None:
        """Give back all blocks; the end of the sequence is evicted before its beginning."""
        for blocks in held.blocks:
            self.pool.release(reversed(blocks))
        held.blocks, held.num_released, held.num_blocks, held.num_registered = [], [], 0, 0

    def forget(self, held: SequenceBlocks, num_tokens: int) -> set[int]:
        """The sequence's blocks behind its first `num_tokens` tokens are wrong: none of them can be hit, and none of its
        blocks will be registered. Returns the blocks, also those that it has given back. In a group that frees early, nothing
        says which block of a hash was its own, so any is forgotten and returned."""
        first, held.use_cache = num_tokens // self.block_size, False
        hashes = held.hashes[first:]
        own = {block for blocks in held.blocks for block in blocks[first:]} - {NULL_BLOCK}
        gone = {
            self.pool.forget(group.index, block_hash, frozenset() if group.frees_early else own)
            for group in self.groups
            for block_hash in hashes
        }
        for block_hash in hashes:
            self.states.forget(block_hash)
        return own.union(gone) - {NULL_BLOCK}

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self.pool.forget_all()
        self.states.forget_all()

    def check(self, holders: list[SequenceBlocks]) -> None:
        """Assert that `holders`, all there are, account for every reference and every pending hash."""
        self.pool.check([blocks for held in holders for blocks in held.blocks])
        pending = Counter(h for held in holders if held.is_pending for h in held.hashes[held.num_registered :])
        assert pending == self._pending, "prefixes being computed differ from what the sequences say"
        assert all(n > 0 for n in self._pending.values())
        assert self._computes.keys() == self._pending.keys() and self._waited_for <= self._pending.keys()
