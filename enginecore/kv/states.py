"""States: which recurrent state each sequence holds, which are kept as checkpoints, and where to leave one. No I/O, no torch.

Every state but 0 (the dummy of padded rows) is in exactly one of these places; `check()` proves it:

    free          its content means nothing
    own           of a sequence with a slot, from its admission to the return of its last step in flight
    left          behind a place where it is to be kept, by a step; until its block's hash is registered
    promised      where a row with windows is about to leave its state (row_states.py)
    checkpoint    in the tree (checkpoints.py), under the hash of the block where it ends; evicted if states are short

A sequence begins a chunk with its own state, with a checkpoint, or with zeros. A checkpoint ends at a multiple of `period`
tokens: of the block size and of the chunk of the kernels, which gives a state cut there the bits of one that was not. Only
States writes a SequenceStates. KVManager, which owns it, and the scheduler's parts call it; NoStates is for other models.
"""

import bisect
from collections import Counter
from collections.abc import Sequence

from quire.enginecore.kv.checkpoints import Checkpoint, CheckpointTree
from quire.enginecore.kv.pool import BlockHash
from quire.enginecore.kv.sequence_blocks import NO_STATES_HELD, Left, SequenceBlocks, SequenceStates
from quire.ipc.step.sections import NO_STATE, STATE_CHUNK

MOST_WITHIN = 16  # checkpoints that are left within a long prompt, besides those at its places
LEAST_APART = 1024  # tokens between two of these


class NoStates:
    """A model without recurrent layers: chunks end anywhere, and nothing is kept."""

    num_used = num_states = num_available = 0
    period = 1
    unused: tuple[int, ...] = ()

    def need(self, held: SequenceBlocks) -> int:
        return 0

    def take(self, held: SequenceBlocks, num_known: int) -> None: ...

    def free(self, held: SequenceBlocks) -> None: ...

    def count_hits(self, hashes: list[BlockHash], length: int) -> int:
        return length

    def ask_for(self, other: SequenceBlocks, length: int) -> bool:
        return False

    def wait_for(self, hashes: list[BlockHash], first: int, most: int) -> BlockHash | None:
        return None

    def take_resolved(self) -> list[BlockHash]:
        return []

    def puts_off(self, start: int, budget: int, total: int) -> bool:
        return False

    def cut(self, held: SequenceBlocks, start: int, length: int, total: int) -> int:
        return length

    def begin_chunk(self, held: SequenceBlocks, start: int, end: int) -> tuple[int, int]:
        return NO_STATE, NO_STATE

    def step_made(self, held: SequenceBlocks) -> None: ...

    def leave_while_decoding(self, held: SequenceBlocks, num_tokens: int) -> list[tuple[int, int]]:
        return []

    def promise(self, held: SequenceBlocks, num_tokens: int) -> int:
        return NO_STATE

    def fulfil(self, held: SequenceBlocks) -> None: ...

    def keep_own(self, held: SequenceBlocks, num_computed: int) -> bool:
        return False

    def register(self, held: SequenceBlocks) -> None: ...

    def forget(self, block_hash: BlockHash) -> None: ...

    def forget_all(self) -> None: ...

    def check(self, holders: Sequence[SequenceBlocks]) -> None: ...


class States:
    def __init__(self, num_states: int, block_size: int, chunk: int = STATE_CHUNK):
        """num_states: with the dummy. chunk: tokens; a power of two, as the block size."""
        if num_states < 3:
            raise ValueError("a pool of states needs at least 3 states: the dummy, one that is computed and one to begin with")
        self.num_states = num_states
        self.period = max(chunk, block_size)  # tokens
        self._block_size, self._chunk, self._every = block_size, chunk, self.period // block_size
        self._free = list(range(num_states - 1, 0, -1))
        self._tree = CheckpointTree()
        self._coming: Counter[BlockHash] = Counter()  # blocks after which running sequences are going to leave a state
        self._waited_for: set[BlockHash] = set()  # those of them that another sequence waits for
        self._resolved: list[BlockHash] = []

    @property
    def num_available(self) -> int:
        """States that could be handed out."""
        return len(self._free) + self._tree.num_evictable

    @property
    def unused(self) -> tuple[int, ...]:
        """The states whose content means nothing."""
        return tuple(self._free)

    @property
    def num_used(self) -> int:
        """States that running sequences need."""
        return self.num_states - 1 - self.num_available

    # ---------------------------------------------------------------------------------------------------- the lease
    def need(self, held: SequenceBlocks) -> int:
        """States that become unavailable if the sequence starts with its hits: its own, and the one that it begins with."""
        found = self._hit(held)
        return 1 if found is None or found.refs else 2

    def take(self, held: SequenceBlocks, num_known: int) -> None:
        """Give a sequence of num_known tokens, whose hits were not attached yet, a state of its own."""
        found = self._hit(held)
        if found is not None:
            self._tree.refer(found)
        state = self._allocate()
        assert state, "no state is available"
        first = NO_STATE if found is None else found.state
        start = held.hits.num_blocks * self._block_size
        held.state, held.states = state, SequenceStates(first, found, self._places(held, start, num_known), start, num_known)
        self._coming.update(held.hashes[place // self._block_size - 1] for place in held.states.places)

    def free(self, held: SequenceBlocks) -> None:
        """Give back all of a sequence's states; checkpoints stay."""
        states = held.states
        self.step_made(held)
        self._drop_places(held, states.num_known)
        for left in states.left:
            if not left.is_newest:
                self._came(held.hashes[left.depth - 1])
        if states.newest is not None and self._tree.holds(states.newest):
            self._tree.mark_newest(states.newest, False)
        reserved = states.left if states.promised is None else [*states.left, states.promised]
        self._free += [state for state in (held.state, *(left.state for left in reserved)) if state != NO_STATE]
        held.state, held.states = NO_STATE, NO_STATES_HELD

    def _hit(self, held: SequenceBlocks) -> Checkpoint | None:
        blocks = held.hits.num_blocks
        return self._tree.find(held.hashes[blocks - 1]) if blocks else None

    def _places(self, held: SequenceBlocks, start: int, num_known: int) -> list[int]:
        """The tokens after which a sequence should leave its state while its known tokens are computed, the last place first.

        They are the last place before its last token and the one at its end, for who sends it again or continues it; where
        others have gone another way, as far as blocks tell; and its marks. Long prompts have more, if states are left."""
        if not held.use_cache:
            return []
        wanted = {num_known - 1, num_known, held.hits.reach * self._block_size, *held.marks}
        most = min(MOST_WITHIN, self.num_available // 8)
        apart = max(num_known // (most + 1), LEAST_APART)
        wanted.update(range(start + apart, num_known, apart) if most else ())
        places = {place // self.period * self.period for place in wanted}
        if num_known % self.period:
            places.discard(num_known)
        return sorted((place for place in places if start < place <= num_known), reverse=True)

    # ------------------------------------------------------------------------------------------------ a prompt's chunks
    def count_hits(self, hashes: list[BlockHash], length: int) -> int:
        """How many of the first `length` blocks may be hit: those up to a checkpoint."""
        found = self._tree.deepest(hashes, length, self._every)
        return 0 if found is None else found.depth

    def ask_for(self, other: SequenceBlocks, length: int) -> bool:
        """Another sequence, which is computing its prompt, should leave its state within its first `length` blocks: they are
        what somebody who waits has in common with it. Returns whether its blocks alone are of no use."""
        place = length // self._every * self.period
        if place > other.states.end and other.states.is_exact and place not in other.states.places:
            bisect.insort(other.states.places, place, key=lambda at: -at)
            self._coming[other.hashes[place // self._block_size - 1]] += 1
        return True

    def wait_for(self, hashes: list[BlockHash], first: int, most: int) -> BlockHash | None:
        """The block after which another sequence is going to leave its state, the last one of hashes[first:most]."""
        for depth in range(most // self._every * self._every, first, -self._every) if self._coming else ():
            if hashes[depth - 1] in self._coming:
                self._waited_for.add(hashes[depth - 1])
                return hashes[depth - 1]
        return None

    def take_resolved(self) -> list[BlockHash]:
        """Those of `wait_for` that have come, or will not come any more."""
        resolved, self._resolved = self._resolved, []
        return resolved

    def _came(self, block_hash: BlockHash) -> None:
        self._coming[block_hash] -= 1
        if not self._coming[block_hash]:
            del self._coming[block_hash]
            if block_hash in self._waited_for:
                self._waited_for.remove(block_hash)
                self._resolved.append(block_hash)

    def _drop_places(self, held: SequenceBlocks, until: int) -> None:
        """The sequence leaves no state at its places up to `until` tokens."""
        places = held.states.places
        while places and places[-1] <= until:
            self._came(held.hashes[places.pop() // self._block_size - 1])

    def puts_off(self, start: int, budget: int, total: int) -> bool:
        """Whether a chunk from `start` of at most `budget` tokens would end where no state can be kept from then on."""
        end = start + budget
        return end < total and end // self._chunk * self._chunk <= start

    def cut(self, held: SequenceBlocks, start: int, length: int, total: int) -> int:
        """How many of `length` tokens, for all of which there is room, a chunk from `start` has; `total` are known."""
        end, states = start + length, held.states
        if end < total:
            end = next((at for size in (self.period, self._chunk) if (at := end // size * size) > start), end)
        if states.places:
            end = min(end, states.places[-1])
        return end - start

    def begin_chunk(self, held: SequenceBlocks, start: int, end: int) -> tuple[int, int]:
        """The sequence computes [start, end): the states that it begins with, and that it leaves besides its own (PREFILL)."""
        states, last = held.states, NO_STATE
        first, states.first, states.end = states.first, held.state, end
        states.is_exact = states.is_exact and (end % self._chunk == 0 or end == states.num_known)
        if states.places and states.places[-1] == end:
            depth = end // self._block_size
            if not self._is_kept(held.hashes[depth - 1]) and (last := self._allocate()):
                states.places.pop()
                states.left.append(Left(depth, last, False))
        self._drop_places(held, end if states.is_exact else states.num_known)
        return first, last

    def step_made(self, held: SequenceBlocks) -> None:
        """The step in which the sequence began with a checkpoint is scheduled: later steps may write to that."""
        if (found := held.states.begins_with) is not None:
            held.states.begins_with = None
            self._tree.release(found)
            if not self._tree.holds(found):
                self._give_up(found)

    # --------------------------------------------------------------------------------------------------- decode rows
    def leave_while_decoding(self, held: SequenceBlocks, num_tokens: int) -> list[tuple[int, int]]:
        """A decode row goes on after num_tokens, the end of a block: the copy (source, target), if any, that keeps its state.

        It takes the place of the one that it left before, if no other sequence continued from there."""
        depth = num_tokens // self._block_size
        if not held.use_cache or depth % self._every:
            return []
        self._drop_newest(held)
        if not (state := self._allocate(spares_newest=True)):
            return []
        held.states.left.append(Left(depth, state, True))
        return [(held.state, state)]

    def promise(self, held: SequenceBlocks, num_tokens: int) -> int:
        """A decode row with windows may soon have num_tokens in its state, a place: the id where its state is left then, or
        NO_STATE. It takes the place of the one that it left before, at once if no other state is there."""
        if not (state := self._allocate(spares_newest=True)):
            self._drop_newest(held)
            state = self._allocate(spares_newest=True)
        held.states.promised = Left(num_tokens // self._block_size, state, True) if state else None
        return state

    def fulfil(self, held: SequenceBlocks) -> None:
        """The state that was promised is left."""
        promised, held.states.promised = held.states.promised, None
        assert promised is not None
        self._drop_newest(held)
        held.states.left.append(promised)
        self.register(held)

    def _drop_newest(self, held: SequenceBlocks) -> None:
        """Give up the state that the sequence left last while decoding, if no other sequence continued from there."""
        before, held.states.newest = held.states.newest, None
        if before is not None and self._tree.holds(before):
            self._tree.mark_newest(before, False)
            if not before.refs and not before.num_children:
                self._tree.remove(before)
                self._free.append(before.state)

    def keep_own(self, held: SequenceBlocks, num_computed: int) -> bool:
        """The sequence is about to give its states back: keep its own one, if it ends at a place; returns whether it is kept.
        num_computed: tokens that it holds, of a decode row. The step that would have left a copy behind the last token of a row
        is never made."""
        states = held.states
        end = num_computed if states.end == states.num_known else states.end
        depth = end // self._block_size
        if end % self.period or not 0 < depth <= held.num_registered or self._is_kept(held.hashes[depth - 1]):
            return False
        was_written = states.first == held.state and (states.is_exact or end > states.num_known)
        if was_written:
            self._keep(held.state, held, depth)
            held.state = NO_STATE
        return was_written

    # ------------------------------------------------------------------------------------------------------ the cache
    def register(self, held: SequenceBlocks) -> None:
        """Keep the states that the sequence left behind blocks that are findable now."""
        states = held.states
        while states.left and states.left[0].depth <= held.num_registered:
            depth, state, is_newest = states.left.pop(0)
            if not is_newest:
                self._came(held.hashes[depth - 1])
            if self._is_kept(held.hashes[depth - 1]):
                self._free.append(state)
                continue
            node = self._keep(state, held, depth)
            if is_newest and self._tree.holds(node):
                states.newest = node
                self._tree.mark_newest(node, True)

    def _keep(self, state: int, held: SequenceBlocks, depth: int) -> Checkpoint:
        node, given_up = self._tree.add(state, held.hashes, depth, self._every)
        for other in given_up:
            self._give_up(other)
        return node

    def forget(self, block_hash: BlockHash) -> None:
        """A block of this hash was evicted: what ends there cannot be hit."""
        if (node := self._tree.find(block_hash)) is not None:
            self._tree.remove(node)
            self._give_up(node)

    def forget_all(self) -> None:
        """Forget all checkpoints."""
        for node in list(self._tree):
            self._tree.remove(node)
            self._give_up(node)

    def _is_kept(self, block_hash: BlockHash) -> bool:
        return self._tree.find(block_hash) is not None

    def _allocate(self, *, spares_newest: bool = False) -> int:
        """A state whose content means nothing, or NO_STATE."""
        if self._free:
            return self._free.pop()
        evicted = self._tree.pop(spares_newest=spares_newest)
        return NO_STATE if evicted is None else evicted.state

    def _give_up(self, node: Checkpoint) -> None:
        if not node.refs:
            self._free.append(node.state)

    def check(self, holders: Sequence[SequenceBlocks]) -> None:
        """Assert that each state is in one place, and that the references are those of `holders`, all sequences with slots."""
        self._tree.check()
        all_held = [held.states for held in holders]
        read = Counter(states.begins_with for states in all_held if states.begins_with is not None)
        assert all(node.refs == read[node] for node in (*self._tree, *read))
        places = [*self._free, *(held.state for held in holders), *(left.state for s in all_held for left in s.left)]
        places += [s.promised.state for s in all_held if s.promised is not None]
        places += {node.state for node in (*self._tree, *read)}
        assert sorted(places) == list(range(1, self.num_states)), "a state is lost, or in two places"
        coming: Counter[BlockHash] = Counter()
        for held in holders:
            ends = [place // self._block_size for place in held.states.places]
            ends += [left.depth for left in held.states.left if not left.is_newest]
            coming.update(held.hashes[depth - 1] for depth in ends)
        assert coming == self._coming and self._waited_for <= coming.keys()
