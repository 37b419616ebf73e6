"""BlockPool: the one owner of KV blocks, their reference counts and the prefix cache. No I/O, no torch.

Every block but block 0 (the null block, which block tables name where nothing is to be read) is in exactly one state:

    free      reference count 0, no content that can be hit
    cached    reference count 0, but its content can be hit by its hash: the least recently used is evicted first
    used      reference count > 0; may have a hash, too

`check()` proves free + cached + used == total. Blocks are hashed per KV group: a hash stands for the tokens up to the block's
end, the group for the layers in the block.
"""

import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

import numpy as np

from quire.enginecore.media.prompt_items import PromptItems

BlockHash = bytes
NULL_BLOCK = 0
NUM_RECENT = 4  # long chains that are kept, for the next ones to copy hashes from
LONG_CHAIN = 8  # blocks; shorter chains take less time to hash than to compare


class Fork(NamedTuple):
    """From this block on, a sequence's hashes stand for more than its tokens: its adapter applies from within this block on."""

    block: int
    part: bytes


class BlockHasher:
    """Chains of keyed hashes, H(parent, tokens): equal only for equal prefixes with the same salt, in this process."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._secret = secrets.token_bytes(32)
        self._recent: deque[tuple[np.ndarray, list[BlockHash], Fork | None]] = deque(maxlen=NUM_RECENT)

    def root(self, *parts: bytes) -> BlockHash:
        """The chain's start: a hash of all that must match besides tokens (salt, adapter, media). Parts are length-prefixed."""
        h = hashlib.blake2b(key=self._secret, digest_size=16)
        for part in parts:
            h.update(len(part).to_bytes(8, "little") + part)
        return h.digest()

    def extend(
        self,
        chain: list[BlockHash],
        root: BlockHash,
        token_ids: np.ndarray,
        most: int | None = None,
        fork: Fork | None = None,
        items: PromptItems | None = None,
    ) -> int:
        """Append to `chain` the hashes that it lacks for full blocks of token_ids (int32), at most `most`; returns how many.
        A block's hash also holds the items that have tokens in it."""
        size = self.block_size
        before, end = len(chain), len(token_ids) // size
        end = end if most is None else min(end, before + most)
        parent = chain[-1] if chain else root
        for start in range(before * size, end * size, size):
            if fork is not None and start == fork.block * size:
                parent = self.root(parent, fork.part)
            h = hashlib.blake2b(parent, key=self._secret, digest_size=16)
            h.update(token_ids[start : start + size].tobytes())
            if items is not None:
                h.update(items.hashed(start, start + size))
            parent = h.digest()
            chain.append(parent)
        return len(chain) - before

    def begin(
        self,
        chain: list[BlockHash],
        root: BlockHash,
        token_ids: np.ndarray,
        fork: Fork | None = None,
        items: PromptItems | None = None,
    ) -> int:
        """Give an empty chain its first hash, and those that it has in common with long chains begun lately; these are kept
        here and may have grown since. Returns how many hashes it has now. token_ids must never be written to again."""
        self.extend(chain, root, token_ids, 1, fork, items)
        if items is not None:
            token_ids = token_ids[: items.first]  # ids alone do not say what comes behind
        if len(token_ids) >= LONG_CHAIN * self.block_size:
            for others, known, other_fork in self._recent:
                forks = [each.block for each in (fork, other_fork) if each is not None and fork != other_fork]
                chain += self._in_common(chain, token_ids, known, others, min(forks, default=len(known)))
            self._recent.appendleft((token_ids, chain, fork))
        return len(chain)

    def _in_common(
        self, chain: list[BlockHash], token_ids: np.ndarray, known: list[BlockHash], others: np.ndarray, most: int
    ) -> list[BlockHash]:
        """The hashes that `chain`, the first ones of `token_ids`, can take over from `known`, those of the tokens `others`, of
        which only the first `most` stand for the same besides tokens."""
        begin = len(chain)
        if len(known) <= begin or known[begin - 1] != chain[-1]:  # equal hashes mean equal prefixes
            return []
        end = max(min(len(token_ids) // self.block_size, len(others) // self.block_size, len(known), most), begin)
        if others is not token_ids:
            span = slice(begin * self.block_size, end * self.block_size)
            differs = token_ids[span] != others[span]
            end = begin + int(differs.argmax()) // self.block_size if differs.any() else end
        return known[begin:end]


class BlockPool:
    """Blocks 1 to num_blocks - 1, shared by all KV groups."""

    def __init__(self, num_blocks: int, num_groups: int, on_evicted: Callable[[BlockHash], None] = lambda block_hash: None):
        """on_evicted: called with the hash of a cached block that is evicted.

        Without groups, which only a model without attention has, the null block is enough."""
        if num_blocks < (2 if num_groups else 1):
            raise ValueError("a block pool needs at least 2 blocks: the null block and one more")
        self.num_blocks = num_blocks
        self._on_evicted = on_evicted
        self._free = list(range(num_blocks - 1, 0, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, tuple[int, BlockHash]] = {}
        self._by_hash: list[dict[BlockHash, int]] = [{} for _ in range(num_groups)]

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._lru)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_available

    @property
    def usage(self) -> float:
        return self.num_used / max(self.num_blocks - 1, 1)

    def allocate(self) -> int:
        """A block of reference count 1 with no meaningful content. Raises IndexError if none is available."""
        if self._free:
            block = self._free.pop()
        elif self._lru:
            block, _ = self._lru.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no KV block is available")
        self._refs[block] = 1
        return block

    def find(self, group: int, block_hash: BlockHash) -> int | None:
        return self._by_hash[group].get(block_hash)

    def count_cached(self, group: int, hashes: list[BlockHash], most: int) -> int:
        """How many hashes are found one after the other, from the first, at most `most`."""
        table = self._by_hash[group]
        for i in range(most):
            if hashes[i] not in table:
                return i
        return most

    def find_all(self, group: int, hashes: list[BlockHash]) -> list[int]:
        """The blocks of these hashes, all of which must be found."""
        table = self._by_hash[group]
        return [table[h] for h in hashes]

    def count_unused(self, blocks: list[int]) -> int:
        """How many available blocks are used up by taking these, which were found by their hashes."""
        refs = self._refs
        return sum([not refs[block] for block in blocks if block])

    def take(self, blocks: list[int]) -> None:
        """Share blocks that were found by their hashes; null blocks among them are not counted."""
        refs, lru = self._refs, self._lru
        for block in blocks:
            if block:
                if not refs[block]:
                    del lru[block]
                refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; the first one released is the first to be evicted."""
        for block in blocks:
            if block == 0:
                continue
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._hash_of:
                    self._lru[block] = None
                else:
                    self._free.append(block)
            elif self._refs[block] < 0:
                raise AssertionError(f"block {block} was released more often than taken")

    def register(self, group: int, block: int, block_hash: BlockHash) -> None:
        """Make a used block findable by its content's hash. A second block of the same content stays private."""
        if block_hash not in self._by_hash[group] and block not in self._hash_of:
            self._by_hash[group][block_hash] = block
            self._hash_of[block] = (group, block_hash)

    def forget_all(self) -> None:
        """Empty the prefix cache, for example after the workers lost their memory. Used blocks stay used, without a hash."""
        for block in self._lru:
            self._free.append(block)
        self._lru.clear()
        self._hash_of.clear()
        for table in self._by_hash:
            table.clear()

    def forget(self, group: int, block_hash: BlockHash, among: Set[int] = frozenset()) -> int:
        """The group's block of this hash, if it is `among` some (none: any), can be hit no longer; returns it, or the null
        block. A used one stays used."""
        block = self._by_hash[group].get(block_hash, 0)
        if not block or (among and block not in among):
            return 0
        self._forget(block)
        if block in self._lru:
            del self._lru[block]
            self._free.append(block)
        return block

    def _forget(self, block: int) -> None:
        group, block_hash = self._hash_of.pop(block)
        del self._by_hash[group][block_hash]
        self._on_evicted(block_hash)

    def check(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Assert conservation; with `holders` (every sequence's blocks) also that the reference counts are theirs."""
        free, cached = set(self._free), set(self._lru)
        used = {b for b in range(1, self.num_blocks) if self._refs[b] > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not (free & cached or free & used or cached & used), "a block is in two states"
        assert len(free) + len(cached) + len(used) == self.num_blocks - 1, "a block was lost"
        assert all(b in self._hash_of for b in cached) and not any(b in self._hash_of for b in free)
        assert sum(len(t) for t in self._by_hash) == len(self._hash_of)
        if holders is not None:
            counts = [0] * self.num_blocks
            for blocks in holders:
                for block in blocks:
                    counts[block] += 1
            counts[0] = 0
            assert counts == self._refs, "reference counts differ from what the sequences hold"
