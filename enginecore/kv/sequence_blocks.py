"""SequenceBlocks: the KV blocks that one sequence holds, and the hashes of its full blocks. No I/O.

Only KVManager (manager.py) writes it; a sequence carries it, and the scheduler passes it along. Index ranges of the blocks of
a KV group, in the order of the block table:

    [0, num_released)     given back, because the group's window has left them behind; their entries name the null block
    [0, num_registered)   full, and findable by their hashes if prefixes are cached
    [0, len(hashes))      full of tokens that the host knows, and hashed
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.enginecore.kv.checkpoints import Checkpoint
from quire.enginecore.kv.pool import Fork
from quire.enginecore.media.prompt_items import PromptItems
from quire.ipc.step.sections import NO_STATE


class PrefixHits(NamedTuple):
    """The blocks that the prefix cache has for a sequence."""

    blocks: list[list[int]]  # per KV group, all of equal length: the null block where a window does not look
    num_blocks: int  # found for each group
    waits_for: bytes | None = None  # another sequence is computing the next blocks, up to this one: nothing is taken yet
    num_held: int = 0  # blocks over all groups, without null blocks
    num_unused: int = 0  # of these, blocks that no sequence holds now
    reach: int = 0  # blocks that would be found if every place had a recurrent state


NO_HITS = PrefixHits([], 0)


class Left(NamedTuple):
    """A state that a sequence has left for others, until the block where it ends is findable."""

    depth: int  # blocks
    state: int
    is_newest: bool  # left while decoding


@dataclass(eq=False, slots=True)
class SequenceStates:
    """The states of a running sequence of a model with recurrent layers; only States (states.py) writes them."""

    first: int = NO_STATE  # that its next chunk begins with
    begins_with: Checkpoint | None = None  # the checkpoint that it begins with, until the step is made
    places: list[int] = field(default_factory=list)  # tokens after which it should leave a state, the next place last
    end: int = 0  # tokens that are computed, with those of the step being made
    num_known: int = 0  # tokens that were known when it started
    is_exact: bool = True  # all chunks so far ended where a state has the bits of an uncut one
    left: list[Left] = field(default_factory=list)  # by depth
    newest: Checkpoint | None = None  # the last one that it left while decoding
    promised: Left | None = None  # the next one, which steps with windows leave when its tokens are applied


NO_STATES_HELD = SequenceStates()


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    root_hash: bytes  # the chain's start: a hash of all that must be equal besides tokens
    use_cache: bool  # its blocks are made findable, and it may hit those of others
    may_hit: bool = True  # False: every position is computed, e.g. for prompt logprobs; its blocks are still findable
    hashes: list[bytes] = field(default_factory=list)
    hits: PrefixHits = NO_HITS  # what the prefix cache had when it was last asked
    blocks: list[list[int]] = field(default_factory=list)  # per KV group, by index in the block table
    num_released: list[int] = field(default_factory=list)  # per KV group
    num_blocks: int = 0  # length of its block tables, which is the same in all groups
    num_registered: int = 0
    items: PromptItems | None = None  # of its tokens: equal blocks have equal items
    marks: tuple[int, ...] = ()  # tokens after which a state is worth keeping, as the frontend says
    state: int = NO_STATE  # its own recurrent state
    states: SequenceStates = NO_STATES_HELD
    fork: Fork | None = None
    is_pending: bool = False  # its unregistered hashes are in the manager's table of prefixes being computed

    @property
    def num_held(self) -> int:
        """Blocks that it gives back when it ends, over all groups; shared ones are counted, too."""
        return sum(len(blocks) - released for blocks, released in zip(self.blocks, self.num_released, strict=True))
