"""Prefills: running sequences that have known tokens to compute; a step takes a chunk of each while its budget lasts. No I/O.

Running ones come before new ones, each by `order`. The last chunk makes the sequence a decode row (decode.py); one that samples
nothing has no token to compute there, and ends with this step. Blocks that a chunk writes can be hit by others from the next
step on. The scheduler calls it in every step, admission for each new sequence.
"""

import bisect
from collections import Counter

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.media.items import Items
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.decode import MakeRoom
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.sequence import Sequence, SequenceState, Slots


class Prefills:
    def __init__(self, slots: Slots, kv: KVManager, config: SchedulerConfig):
        self._are_whole, longest = config.has_whole_prompts, config.long_prefill_token_threshold
        self._slots = slots
        self._kv = kv
        self.items = Items(config.encoder_rows, config.item_bytes)
        self._longest_chunk = 1 << 62 if self._are_whole else longest or 1 << 62
        self._running: list[Sequence] = []  # by order
        self._put_off: Sequence | None = None  # the first with a span for which the last step had too few tokens left
        self.owed = 0  # the tokens of this span: the next step has room for them
        self._written: list[tuple[Sequence, int]] = []  # sequences of this step, and their full blocks after it

    def __len__(self) -> int:
        return len(self._running)

    def add(self, seq: Sequence) -> None:
        """Add a sequence that has its slot and the blocks of its cached prefix."""
        seq.state = SequenceState.PREFILL
        bisect.insort(self._running, seq, key=lambda s: s.order)

    def remove(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.items.leaves(seq)

    @property
    def num_tokens_left(self) -> int:
        """Known tokens that were not scheduled yet."""
        return sum(int(self._slots.num_tokens[s.slot]) - s.num_computed for s in self._running)

    @property
    def num_streams(self) -> int:
        """Prompts of requests that are streamed, so that their first token is waited for."""
        return sum(s.task.is_stream for s in self._running)

    def schedule(self, build: PlanBuilder, budget: int, make_room: MakeRoom) -> int:
        """Schedule chunks of running prefills; returns the tokens that are left of the budget."""
        first, self._put_off, self.owed = self._put_off, None, 0
        for seq in sorted(self._in_turn(), key=lambda s: s is not first):
            if budget <= 0:
                break
            if seq.state is SequenceState.PREFILL:  # not preempted just now
                budget -= self.chunk(seq, build, budget, make_room)
        return budget

    def _in_turn(self) -> list[Sequence]:
        """By order; if they are several tenants', in turn, and of each turn the shortest first."""
        if len({seq.tenant for seq in self._running}) < 2:
            return list(self._running)
        turns, num_before = [], Counter[object]()
        for seq in self._running:
            turns.append((num_before[seq.tenant], int(self._slots.num_tokens[seq.slot]) - seq.num_computed, seq))
            num_before[seq.tenant] += 1
        turns.sort(key=lambda turn: turn[:2])
        return [seq for _, _, seq in turns]

    def chunk(self, seq: Sequence, build: PlanBuilder, budget: int, make_room: MakeRoom) -> int:
        """Schedule the next chunk of a sequence; returns its tokens (0 if there is no room now)."""
        total = known = int(self._slots.num_tokens[seq.slot])
        if seq.num_computed < seq.num_scored < len(seq.prompt):
            total = seq.num_scored  # a chunk of its own: the prompt's logprobs up to here were sent before
        start = seq.num_computed
        if self.puts_off(seq, start, build, budget):
            return 0
        length = min(total - start, budget, max(self._longest_chunk, self.items.together(seq, start)))
        length = self.items.cut(seq, start, self.items.whole(seq, start, length), build.step)
        length = self._room_for(seq, length, make_room)
        if length <= 0:
            return 0
        length = self._kv.states.cut(seq.blocks, start, length, known)
        grow = self._kv.blocks_to_grow(seq.blocks, start + length)
        if grow:
            build.block_updates += self._kv.grow(seq.blocks, seq.slot, grow)
            self._slots.capacity[seq.slot] += grow * self._kv.block_size
        self._put(seq, length, build)
        return length

    def puts_off(self, seq: Sequence, start: int, build: PlanBuilder, budget: int) -> bool:
        """Whether a chunk of so few tokens is rather left to a later step. A step with no other chunk takes any, but for whole
        prompts, and for spans of which all tokens are computed together: the next step has room for the first one put off."""
        if (together := self.items.together(seq, start)) > budget:
            if self._put_off is None:
                self._put_off, self.owed = seq, together
            return True
        known = len(seq.known) if seq.slot < 0 else int(self._slots.num_tokens[seq.slot])
        if self._are_whole:
            return known - start > budget
        return bool(build.prefills) and self._kv.states.puts_off(start, budget, known)

    def _room_for(self, seq: Sequence, length: int, make_room: MakeRoom) -> int:
        """How many of `length` tokens can be computed now: fewer if blocks are short, at least one block's worth or none, and
        at least a whole span."""
        groups, pool, start = self._kv.num_groups, self._kv.pool, seq.num_computed
        grow = self._kv.blocks_to_grow(seq.blocks, start + length)
        if grow * groups <= pool.num_available:
            return length
        lacking = self._kv.blocks_to_grow(seq.blocks, start + self.items.together(seq, start))
        if lacking and not make_room(seq, lacking):
            return 0
        spare = int(self._slots.capacity[seq.slot]) - start
        return self.items.whole(seq, start, min(length, spare + pool.num_available // groups * self._kv.block_size))

    def _put(self, seq: Sequence, length: int, build: PlanBuilder) -> None:
        t, start = self._slots, seq.num_computed
        end = start + length
        chunk = seq.task.chunk(seq, start, end, int(t.num_tokens[seq.slot]))
        first, last = self._kv.states.begin_chunk(seq.blocks, start, end)
        build.add_prefill(seq, t.token_ids[seq.slot, start:end], start, chunk, first_state=first, last_state=last)
        build.add_places(self.items.places(seq, start, end, build.step), self.items.take_runs(build.step), start, end)
        seq.num_computed = end
        t.last_step[seq.slot] = build.step
        if not seq.first_scheduled:
            seq.first_scheduled = build.now
        if seq.blocks.use_cache:
            self._written.append((seq, end // self._kv.block_size))

    def register_written(self) -> None:
        """The step is scheduled: the blocks that its chunks fill can be hit from the next one on."""
        written, self._written = self._written, []
        for seq, num_blocks in written:
            if seq.slot >= 0:  # not preempted in the same step
                self._kv.states.step_made(seq.blocks)
                self._kv.register(seq.blocks, num_blocks)

    def take_computed(self, build: PlanBuilder) -> list[Sequence]:
        """Remove and return the sequences that have all known tokens computed with this step."""
        t = self._slots
        ended = [seq for seq, end in build.prefills if seq.state is SequenceState.PREFILL and end == t.num_tokens[seq.slot]]
        done = [seq for seq in ended if seq.num_computed == t.num_tokens[seq.slot]]
        for seq in done:
            self._running.remove(seq)
            self._kv.remove_pending(seq.blocks)
        return done

    def check(self, held: list[Sequence]) -> None:
        """Assert that these are the sequences in this state, by order."""
        assert set(self._running) == {s for s in held if s.state is SequenceState.PREFILL}
        self.items.check()
        assert self._running == sorted(self._running, key=lambda s: s.order)
