"""A fake worker: runs plans against a KV cache with entries that name the token and prefix that they stand for.

Every read is checked: a row must find, at each position its window sees, exactly its own prefix. The token it samples depends
on the whole prefix, so wrong sharing, a lost update or a wrong position changes a sequence's output. In a step with windows it
drafts by coin: a row has any number of drafts that the plan allows, and each is right or not.

As a process, `python -m fake_worker` instead of a worker, it takes plans from its ring and writes what it was sent to the
folder `model_dir`: a file for each generation and rank, one digest per line.
"""

import hashlib
from pathlib import Path

import numpy as np

from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.messages.workers import AllocateKV, ControlReply, FullAttention, KVGroup, WorkerProfile, WorkerReady
from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.step.control import decode_control
from quire.ipc.step.plan import StepPlan, decode_plan
from quire.ipc.step.plan_ring import KIND_CONTROL, KIND_SHUTDOWN, PlanReader
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import HEADER, PREFILL_SAMPLE, REJECTED, UNUSED
from quire.ipc.worker_config import WorkerConfig

VOCAB_SIZE = 50


def next_token(prefix: list[int], vocab_size: int) -> int:
    digest = hashlib.blake2b(np.asarray(prefix, np.int32).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def adapted(token: int, adapter: int) -> int:
    """The cache's entry for a token that was computed with an adapter; 0: with none."""
    return token + 1000 * adapter


def solo_output(
    prompt: list[int], final_len: int, eos: set[int], vocab_size: int, adapter: int = 0, adapter_from: int = 0
) -> list[int]:
    """The tokens that a sequence must produce, whatever runs beside it. adapter: its number; 0: none."""
    computed, output = [], list[int]()
    for position in range(final_len):
        if position >= len(prompt):
            output.append(next_token(computed, vocab_size))
            if output[-1] in eos:
                break
        token = prompt[position] if position < len(prompt) else output[-1]
        computed.append(adapted(token, adapter if position >= adapter_from else 0))
    return output


class FakeWorker:
    def __init__(
        self, num_slots: int, max_blocks: int, block_size: int, windows: tuple[int, ...], vocab_size: int, has_states=False
    ):
        self.block_size, self.windows, self.vocab_size = block_size, windows, vocab_size
        self.num_slots = num_slots
        self.tables = np.full((len(windows) * num_slots, max_blocks), -1, np.int64)
        self.cache: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in windows]  # (block, offset) -> prefix up to it
        self.has_states = has_states
        self.states: dict[int, tuple[int, ...]] = {}  # recurrent state -> the tokens that it stands for
        self.own_state: dict[int, int] = {}  # slot -> its sequence's own state
        self.kept: dict[int, tuple[int, tuple[int, ...]]] = {}  # slot -> (step, its accepted tokens, which its state lacks)
        self.keep_at: dict[int, tuple[int, int]] = {}  # slot -> (tokens, state): the state is left once it has so many
        self.prefix: dict[int, list[int]] = {}  # slot -> computed tokens
        self.last_token: dict[int, int] = {}
        self.sampled_in: dict[int, int] = {}  # slot -> the last step
        self.decode_rows: dict[int, np.ndarray] = {}  # by micro-batch
        self.final_len: dict[int, int] = {}  # by slot
        self.max_window: dict[int, int] = {}
        self.adapters: dict[int, int] = {}  # adapter slot -> the number of the adapter that is there
        self.adapter: dict[int, int] = {}  # slot -> its adapter slot
        self.adapter_from: dict[int, int] = {}
        self.coin = np.random.default_rng(0)
        self.first_sample = np.zeros(0, np.int32)  # of the last step: the index of each row's first sample

    def run(self, plan: StepPlan) -> np.ndarray:
        """One sampled id per row; with windows one per sample. The plan goes through its wire form."""
        plan = decode_plan(plan.encode(), self.decode_rows.get(plan.micro_batch, np.zeros(0, np.int32)))
        self.decode_rows[plan.micro_batch] = plan.decode_rows.copy()
        ages = [plan.step - self.sampled_in[slot] for slot in plan.decode_rows.tolist()]
        assert not plan.lag or plan.lag == min(ages), "a row's last token is younger than the plan says"
        updates, new = plan.section("block_updates"), plan.section("slot_updates")["slot"].tolist()
        rows, indices = updates["table"], updates["index"]
        assert len({*zip(rows.tolist(), indices.tolist(), strict=True)}) == len(rows), "a table entry is written twice"
        self.tables[rows, indices] = updates["block"]
        for slot in new:
            self.prefix.pop(slot, None)
        slots = [*plan.decode_rows.tolist(), *plan.prefill_rows["slot"].tolist()]
        assert len(set(slots)) == len(slots), "a slot has two rows"
        for slot in new:  # a new sequence: what the slot's last one computed is not its own
            self.prefix[slot] = []
        for name, values in (
            ("final_len", self.final_len),
            ("max_window", self.max_window),
            ("adapter", self.adapter),
            ("adapter_from", self.adapter_from),
        ):
            values.update(zip(new, plan.section("slot_updates")[name].tolist(), strict=True))
        assert plan.has_adapters == any(self.adapter[slot] >= 0 for slot in slots)
        self._take_states(plan)
        work, at, drafts_left = [], 0, plan.draft_tokens
        narrow = plan.section("row_windows").tolist() or [plan.window] * len(plan.decode_rows)
        for slot, most in zip(plan.decode_rows.tolist(), narrow, strict=True):
            drafts = self._drafts(slot, min(plan.window - 1, most - 1, drafts_left))
            drafts_left -= len(drafts)
            work.append((slot, len(self.prefix[slot]), [self.last_token[slot], *drafts], True))
        for slot, start, length, flags, _, _, *states in plan.prefill_rows.tolist():
            work.append((slot, start, plan.prefill_tokens[at : at + length].tolist(), bool(flags & PREFILL_SAMPLE)))
            if start != len(self.prefix[slot]):  # begins behind a cached prefix: read it from the cache
                self.prefix[slot] = self.found(slot, start, states[0] if states else 0)
            at += length
        for slot, start, tokens, samples in work:
            assert len(self.prefix[slot]) == start
            if not self._has_ended(slot, start):
                self._write(slot, tokens)
            if samples:
                self.sampled_in[slot] = plan.step
        self._write_states(plan)
        if plan.window == 1:
            return np.asarray([self._sample(slot, samples) for slot, _, _, samples in work], np.int32)
        rows = len(plan.decode_rows)
        words = [self._verify(slot, start, tokens) for slot, start, tokens, _ in work[:rows]]
        if self.has_states:
            self.kept |= {slot: (plan.step, tuple(self.prefix[slot][start:])) for slot, start, _, _ in work[:rows]}
        words += [[self._sample(slot, samples)] for slot, _, _, samples in work[rows:]]
        self.first_sample = np.cumsum([0, *map(len, words)])[:-1].astype(np.int32)
        used = [word for row in words for word in row]
        return np.asarray([*used, *[UNUSED] * (plan.num_samples - len(used))], np.int32)

    def _has_ended(self, slot: int, start: int) -> bool:
        """Whether the row would compute its sequence's last token, which another step has sampled."""
        return start >= self.final_len[slot] - 1

    def _drafts(self, slot: int, most: int) -> list[int]:
        known, drafts = [*self.prefix[slot]], list[int]()
        known.append(self._adapted(slot, len(known), self.last_token[slot]))
        most = min(most, self.max_window[slot] - 1, self.final_len[slot] - 1 - len(known))
        for _ in range(self.coin.integers(most + 1) if most > 0 else 0):
            drafts.append(next_token(known, self.vocab_size) if self.coin.random() < 0.8 else 0)
            known.append(self._adapted(slot, len(known), drafts[-1]))
        return drafts

    def _adapted(self, slot: int, position: int, token: int) -> int:
        applies = self.adapter[slot] >= 0 and position >= self.adapter_from[slot]
        return adapted(token, self.adapters[self.adapter[slot]] if applies else 0)

    def _verify(self, slot: int, start: int, tokens: list[int]) -> list[int]:
        """The result words of a decode row's window; the prefix keeps what was accepted."""
        if self._has_ended(slot, start):
            return [REJECTED]
        whole, words = self.prefix[slot], []
        for count in range(1, len(tokens) + 1):
            self.prefix[slot] = whole[: start + count]
            words.append(self._sample(slot, samples=True))
            if count < len(tokens) and tokens[count] != words[-1]:
                break
        return words + [REJECTED] * (len(tokens) - len(words))

    def found(self, slot: int, start: int, first_state: int) -> list[int]:
        """The prefix that the prefix cache had for a slot."""
        return list(self._read(0, slot, start - 1) if self.windows else self.states[first_state])

    def _take_states(self, plan: StepPlan) -> None:
        """Check that each row reads the state of its prefix, and that no row reads or writes what another one writes."""
        updates, copies = plan.section("slot_updates"), plan.section("state_copies").tolist()
        left = self._apply_before(plan)
        self.own_state.update(zip(updates["slot"].tolist(), updates["state"].tolist(), strict=True))
        chunks = plan.prefill_rows
        if not self.has_states:
            assert not copies and not any(self.own_state.values())
            assert not chunks["first_state"].any() and not chunks["last_state"].any()
            return
        for source, target in copies:
            self.states[target] = self.states[source]
        for slot in updates["slot"].tolist():
            self.kept.pop(slot, None)
            self.keep_at.pop(slot, None)
        decode = [self.own_state[slot] for slot in plan.decode_rows.tolist()]
        own = [self.own_state[slot] for slot in chunks["slot"].tolist()]
        for slot in plan.decode_rows.tolist() if plan.window > 1 else ():
            left += self._apply(slot, plan.step, has_tokens=True)
        written = [
            *left,
            *decode,
            *own,
            *(last for last in chunks["last_state"].tolist() if last),
            *(target for _, target in copies),
        ]
        assert 0 not in written and len(set(written)) == len(written), "a state is written twice"
        for slot, state in zip(plan.decode_rows.tolist(), decode, strict=True):
            assert self.states[state] == tuple(self.prefix[slot]), "a decode row reads another state"
        for state, (_, start, _, _, _, _, first, _) in zip(own, chunks.tolist(), strict=True):
            assert bool(first) == bool(start), "a chunk begins with zeros, and only at the start"
            assert first in (0, state) or first not in [*decode, *own, *chunks["last_state"].tolist()]

    def _apply_before(self, plan: StepPlan) -> list[int]:
        """Apply what the plan says; returns the states that were written besides the sequences' own."""
        records = plan.section("kept_inputs").tolist()
        assert self.has_states or not records
        self.keep_at |= {slot: (keep_at, state) for slot, keep_at, state, _ in records if keep_at >= 0}
        return [left for slot, _, _, applies in records if applies for left in self._apply(slot, plan.step, has_tokens=False)]

    def _apply(self, slot: int, step: int, *, has_tokens: bool) -> list[int]:
        """Apply what is kept of a sequence to its state; returns the state that was left, if one was."""
        own, left = self.own_state[slot], []
        kept_in, tokens = self.kept.pop(slot, (0, ()))
        assert not tokens or kept_in == step - 1, "what was kept is overwritten"
        prefix, (keep_at, state) = self.states[own], self.keep_at.get(slot, (0, 0))
        count = keep_at - len(prefix)
        if has_tokens <= count <= len(tokens):
            if state == own:
                tokens = tokens[:count]
            else:
                self.states[state] = prefix + tokens[:count]
                left.append(state)
        self.states[own] = prefix + tokens
        return left

    def _write_states(self, plan: StepPlan) -> None:
        if not self.has_states:
            return
        for slot in plan.decode_rows.tolist() if plan.window == 1 else ():
            self.states[self.own_state[slot]] = tuple(self.prefix[slot])
        begun = [(first, start) for _, start, _, _, _, _, first, _ in plan.prefill_rows.tolist()]
        read = [self.states[first] if first else () for first, _ in begun]
        for (slot, start, *_, last), state in zip(plan.prefill_rows.tolist(), read, strict=True):
            assert state == tuple(self.prefix[slot][:start]), "a chunk reads another state"
            for place in (self.own_state[slot], last):
                if place:
                    self.states[place] = tuple(self.prefix[slot])

    def _place(self, group: int, slot: int, position: int) -> tuple[int, int]:
        block = int(self.tables[group * self.num_slots + slot, position // self.block_size])
        assert block > 0, "the null block is written or read"
        return block, position % self.block_size

    def _read(self, group: int, slot: int, position: int) -> tuple[int, ...]:
        return self.cache[group][self._place(group, slot, position)]

    def _write(self, slot: int, tokens: list[int]) -> None:
        for token in tokens:
            self.prefix[slot].append(self._adapted(slot, len(self.prefix[slot]), token))
            for group in range(len(self.windows)):
                place = self._place(group, slot, len(self.prefix[slot]) - 1)
                for other in self.cache:  # a block belongs to one group at a time
                    other.pop(place, None)
                self.cache[group][place] = tuple(self.prefix[slot])

    def _sample(self, slot: int, samples: bool) -> int:
        prefix = self.prefix[slot]
        for group, window in enumerate(self.windows):
            first = max(len(prefix) - window, 0) if window else 0
            for position in range(first, len(prefix)):
                assert self._read(group, slot, position) == tuple(prefix[: position + 1]), "a row read another prefix"
        token = next_token(prefix, self.vocab_size)
        if samples:
            self.last_token[slot] = token
        return token


def log_of(folder: str | Path, generation: int, rank: int) -> Path:
    return Path(folder) / f"{generation}-{rank}"


def main() -> None:
    c = child_main_config(WorkerConfig)
    reader = PlanReader.attach(own_fds(c.plan_ring_fds))
    ring = ResultRing.attach(own_fds(c.result_ring_fds)) if c.result_ring_fds else None
    link = WorkerToCore(c.control_address, c.rank, c.generation)
    num_blocks = 60 + c.rank  # the least counts
    link.send(
        WorkerProfile(c.rank, num_blocks, c.engine.block_size, [KVGroup(FullAttention(), [0])], VOCAB_SIZE, "fake", 0, 0, 0)
    )
    command = link.receive(60.0)
    assert command == AllocateKV(60)
    if ring is not None:
        ring.generation = c.generation
    link.send(WorkerReady(c.rank))
    worker = FakeWorker(
        c.engine.max_num_seqs + 1, c.engine.max_model_len // c.engine.block_size + 1, c.engine.block_size, (0,), VOCAB_SIZE
    )
    decode_rows = np.zeros(0, np.int32)
    with log_of(c.model_dir, c.generation, c.rank).open("a", buffering=1) as log:
        while (record := reader.read(60.0)) is not None and record[0] != KIND_SHUTDOWN:
            words = record[1].copy()
            if record[0] == KIND_CONTROL:
                link.send(ControlReply(c.rank, decode_control(words).id, "", f"rank {c.rank} is well".encode()))
                continue
            assert words[HEADER.at["world_size"]] == c.engine.world_size
            plan = decode_plan(words, decode_rows)
            decode_rows = plan.decode_rows.copy()
            tokens = worker.run(plan)
            log.write(hashlib.sha256(words.tobytes()).hexdigest() + "\n")
            if ring is not None:
                ring.write(plan.step, tokens)


if __name__ == "__main__":
    main()
