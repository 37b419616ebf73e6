"""SequenceBlocks: what one sequence holds of KV blocks, and the hashes of its full blocks. No I/O.

Only KVManager writes it (manager.py); a sequence carries it, and the scheduler passes it along. Index ranges of the blocks of
a KV group, in the order of the block table:

    [0, num_released)     given back, because the group's window has left them behind; their entries name the null block
    [0, num_registered)   full, and findable by their hashes if prefixes are cached
    [0, len(hashes))      full of tokens that the host knows, as far as they were hashed
"""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    root_hash: bytes  # the chain's start: what must be equal besides tokens
    use_cache: bool  # its blocks are made findable, and those of others are hit
    may_hit: bool = True  # False: every position is computed, e.g. for prompt logprobs; its blocks are findable all the same
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)  # per KV group, by index in the block table
    num_released: list[int] = field(default_factory=list)  # per KV group
    num_registered: int = 0
    is_pending: bool = False  # its unregistered hashes are in the manager's table of prefixes being computed

    @property
    def num_blocks(self) -> int:
        """Length of its block tables: all groups grow in step."""
        return len(self.blocks[0])

    @property
    def num_held(self) -> int:
        """Blocks that come back when it ends, over all groups; shared ones are counted as if they did."""
        return sum(len(blocks) - released for blocks, released in zip(self.blocks, self.num_released, strict=True))
