"""The kinds of KV groups: what a sequence needs of each, what its next token sees, what the prefix cache can give. No I/O.

A KV group is a set of layers that share a block table. KVManager (manager.py) asks the kinds and knows no other difference
between groups. Block i of a group holds the tokens [i * size, (i + 1) * size); `hashes` are those of a sequence's full blocks.
"""

from typing import Any, Protocol

import numpy as np

from quire.enginecore.kv.pool import NULL_BLOCK, BlockHash, BlockPool
from quire.ipc.messages.workers import FullAttention, KVGroupKind, SlidingWindow


class Group(Protocol):
    """A KV group of one kind. index: its number among the groups of the pool."""

    index: int
    frees_early: bool  # blocks are given back while the sequence runs

    def blocks_needed(self, num_tokens: Any) -> Any:
        """Blocks that a sequence of num_tokens tokens holds at least. num_tokens: an int or an array, and so is the result."""

    def first_visible(self, num_computed: int) -> int:
        """Index of the first block that the token at position `num_computed` can see."""

    def count_hits(self, pool: BlockPool, hashes: list[BlockHash], length: int) -> int:
        """How many of the first `length` blocks may be hit by this group alone."""

    def hits(self, pool: BlockPool, hashes: list[BlockHash], length: int) -> list[int]:
        """The first `length` blocks, all of which may be hit: the null block where the next token does not look."""


class FullGroup:
    """Every token sees all tokens before it, so all blocks are needed."""

    frees_early = False

    def __init__(self, index: int, block_size: int):
        self.index, self._block_size = index, block_size

    def blocks_needed(self, num_tokens: Any) -> Any:
        return -(-num_tokens // self._block_size)

    def first_visible(self, num_computed: int) -> int:
        return 0

    def count_hits(self, pool: BlockPool, hashes: list[BlockHash], length: int) -> int:
        return pool.count_cached(self.index, hashes, length)

    def hits(self, pool: BlockPool, hashes: list[BlockHash], length: int) -> list[int]:
        return pool.find_all(self.index, hashes[:length])


class WindowGroup:
    """A token sees the last `window` tokens. Blocks that are left behind are given back; the table names the null block."""

    frees_early = True

    def __init__(self, index: int, block_size: int, window: int, max_whole_span: int = 0):
        self.index, self._block_size, self._window = index, block_size, window
        self._most = -(-(window + max_whole_span) // block_size) + 2

    def blocks_needed(self, num_tokens: Any) -> Any:
        return np.minimum(-(-num_tokens // self._block_size), self._most)

    def first_visible(self, num_computed: int) -> int:
        return max(num_computed - self._window + 1, 0) // self._block_size

    def count_hits(self, pool: BlockPool, hashes: list[BlockHash], length: int) -> int:
        """The most with which all blocks that the next token sees are cached."""
        i = length - 1
        while i >= self.first_visible(length * self._block_size):
            if pool.find(self.index, hashes[i]) is None:
                length = i  # only what comes before it, with another window
            i -= 1
        return length

    def hits(self, pool: BlockPool, hashes: list[BlockHash], length: int) -> list[int]:
        first = self.first_visible(length * self._block_size)
        return [NULL_BLOCK] * first + pool.find_all(self.index, hashes[first:length])


def group_of(kind: KVGroupKind, index: int, block_size: int, max_whole_span: int = 0) -> Group:
    """A KV group of a kind that the workers have reported. max_whole_span: see KVManager."""
    match kind:
        case FullAttention():
            return FullGroup(index, block_size)
        case SlidingWindow(tokens=window):
            return WindowGroup(index, block_size, window, max_whole_span)
