"""A fake worker: runs plans against a KV cache with entries that name the token and prefix that they stand for.

Every read is checked: a row must find, at each position its window sees, exactly its own prefix. The token it samples depends
on the whole prefix, so wrong sharing, a lost update or a wrong position changes a sequence's output.

As a process, `python -m fake_worker` instead of a worker, it takes plans from its ring and writes what it was sent to the
folder `model_dir`: a file for each generation and rank, one digest per line.
"""

import hashlib
from pathlib import Path

import numpy as np

from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.messages.workers import AllocateKV, ControlReply, KVGroup, WorkerProfile, WorkerReady
from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.step.control import decode_control
from quire.ipc.step.plan import StepPlan, decode_plan
from quire.ipc.step.plan_ring import KIND_CONTROL, KIND_SHUTDOWN, PlanReader
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import HEADER, PREFILL_SAMPLE
from quire.ipc.worker_config import WorkerConfig

VOCAB_SIZE = 50


def next_token(prefix: list[int], vocab_size: int) -> int:
    digest = hashlib.blake2b(np.asarray(prefix, np.int32).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def solo_output(prompt: list[int], final_len: int, eos: set[int], vocab_size: int) -> list[int]:
    """What a sequence must produce, whatever runs beside it."""
    tokens = list(prompt)
    while len(tokens) < final_len:
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class FakeWorker:
    def __init__(self, num_slots: int, max_blocks: int, block_size: int, windows: tuple[int, ...], vocab_size: int):
        self.block_size, self.windows, self.vocab_size = block_size, windows, vocab_size
        self.num_slots = num_slots
        self.tables = np.full((len(windows) * num_slots, max_blocks), -1, np.int64)
        self.cache: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in windows]  # (block, offset) -> prefix up to it
        self.prefix: dict[int, list[int]] = {}  # slot -> computed tokens
        self.last_token: dict[int, int] = {}
        self.sampled_in: dict[int, int] = {}  # slot -> the last step
        self.decode_rows: dict[int, np.ndarray] = {}  # by micro-batch

    def run(self, plan: StepPlan) -> np.ndarray:
        """One sampled id per row. The plan goes through its wire form."""
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
        work, at = [], 0
        for slot in plan.decode_rows.tolist():
            work.append((slot, len(self.prefix[slot]), [self.last_token[slot]], True))
        for slot, start, length, flags, *_ in plan.prefill_rows.tolist():
            work.append((slot, start, plan.prefill_tokens[at : at + length].tolist(), bool(flags & PREFILL_SAMPLE)))
            if start != len(self.prefix[slot]):  # begins behind a cached prefix: read it from the cache
                self.prefix[slot] = list(self._read(self._longest_group(), slot, start - 1))
            at += length
        for slot, start, tokens, samples in work:
            assert len(self.prefix[slot]) == start
            self._write(slot, tokens)
            if samples:
                self.sampled_in[slot] = plan.step
        return np.asarray([self._sample(slot, samples) for slot, _, _, samples in work], np.int32)

    def _longest_group(self) -> int:
        return 0

    def _place(self, group: int, slot: int, position: int) -> tuple[int, int]:
        block = int(self.tables[group * self.num_slots + slot, position // self.block_size])
        assert block > 0, "the null block is written or read"
        return block, position % self.block_size

    def _read(self, group: int, slot: int, position: int) -> tuple[int, ...]:
        return self.cache[group][self._place(group, slot, position)]

    def _write(self, slot: int, tokens: list[int]) -> None:
        for token in tokens:
            self.prefix[slot].append(token)
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
    link.send(WorkerProfile(c.rank, num_blocks, c.engine.block_size, [KVGroup(0, [0])], VOCAB_SIZE, "fake", 0, 0, 0))
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
