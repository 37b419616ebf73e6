"""A worker process without a model: takes plans from its ring as quire.workers does and runs them in a FakeWorker.

What it was sent is written to the folder `model_dir`, a file for each generation and rank, one digest a line.
"""

import hashlib
from pathlib import Path

import numpy as np
from fake_worker import FakeWorker

from quire.ipc.config import WorkerConfig
from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.messages import AllocateKV, ControlReply, KVGroup, WorkerProfile, WorkerReady
from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.step.control import decode_control
from quire.ipc.step.plan import decode_plan
from quire.ipc.step.plan_ring import KIND_CONTROL, KIND_SHUTDOWN, PlanReader
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import HEADER

VOCAB_SIZE = 50


def log_of(folder: str | Path, epoch: int, rank: int) -> Path:
    return Path(folder) / f"{epoch}-{rank}"


def main() -> None:
    c = child_main_config(WorkerConfig)
    reader = PlanReader.attach(own_fds(c.plan_ring_fds))
    ring = ResultRing.attach(own_fds(c.result_ring_fds)) if c.result_ring_fds else None
    channel = WorkerToCore(c.control_address, c.rank, c.epoch)
    num_blocks = 60 + c.rank  # the least counts
    channel.send(WorkerProfile(c.rank, num_blocks, c.block_size, [KVGroup(0, [0])], VOCAB_SIZE, "fake", 0, 0, 0, 64))
    command = channel.receive(60.0)
    assert command == AllocateKV(60)
    if ring is not None:
        ring.epoch = c.epoch
    channel.send(WorkerReady(c.rank))
    worker = FakeWorker(c.max_num_seqs + 1, c.max_model_len // c.block_size + 1, c.block_size, (0,), VOCAB_SIZE)
    decode_rows = np.zeros(0, np.int32)
    with log_of(c.model_dir, c.epoch, c.rank).open("a", buffering=1) as log:
        while (record := reader.read(60.0)) is not None and record[0] != KIND_SHUTDOWN:
            words = record[1].copy()
            if record[0] == KIND_CONTROL:
                channel.send(ControlReply(c.rank, decode_control(words).id, "", f"rank {c.rank} is well".encode()))
                continue
            assert words[HEADER.at["world_size"]] == c.world_size
            plan = decode_plan(words, decode_rows)
            decode_rows = plan.decode_rows.copy()
            tokens = worker.run(plan)
            log.write(hashlib.sha256(words.tobytes()).hexdigest() + "\n")
            if ring is not None:
                ring.write(plan.step, tokens)


if __name__ == "__main__":
    main()
