"""SequenceBlocks: the KV blocks that one sequence holds, and the hashes of its full blocks. No I/O.

Only KVManager (manager.py) writes it; a sequence carries it, and the scheduler passes it along. Index ranges of the blocks of
a KV group, in the order of the block table:

    [0, num_released)     given back, because the group's window has left them behind; their entries name the null block
    [0, num_registered)   full, and findable by their hashes if prefixes are cached
    [0, len(hashes))      full of tokens that the host knows, and hashed
"""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    root_hash: bytes  # the chain's start: a hash of all that must be equal besides tokens
    use_cache: bool  # its blocks are made findable, and it may hit those of others
    may_hit: bool = True  # False: every position is computed, e.g. for prompt logprobs; its blocks are still findable
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)  # per KV group, by index in the block table
    num_released: list[int] = field(default_factory=list)  # per KV group
    num_registered: int = 0
    is_pending: bool = False  # its unregistered hashes are in the manager's table of prefixes being computed

    @property
    def num_blocks(self) -> int:
        """Length of its block tables, which is the same in all groups."""
        return len(self.blocks[0])

    @property
    def num_held(self) -> int:
        """Blocks that it gives back when it ends, over all groups; shared ones are counted, too."""
        return sum(len(blocks) - released for blocks, released in zip(self.blocks, self.num_released, strict=True))
