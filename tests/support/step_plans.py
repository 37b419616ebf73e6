"""Plans and tables of small steps, for tests of the kernels around a step."""

import numpy as np
import torch

from quire.ipc.step import plan as wire
from quire.kernels.step.tables import LogitsProcessorPool, SlotTables, StepBuffers

MAX_SEQS, GROUPS, MAX_BLOCKS, BLOCK_SIZE, NUM_BLOCKS, VOCAB = 7, 2, 6, 4, 50, 101
SIZES = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "vocab": VOCAB}


def make_plan(step, slot_updates=(), block_updates=(), decode_rows=(), prefill=(), same=False):
    """prefill: (slot, start, ids, flags); slot_updates: dicts of values by name."""
    slots = wire.default_slots(len(slot_updates))
    for i, update in enumerate(slot_updates):
        for name, value in update.items():
            slots[name][i] = value
    rows = np.zeros(len(prefill), wire.DTYPES["prefill_rows"])
    for i, (slot, start, ids, flags) in enumerate(prefill):
        for name, value in (("slot", slot), ("start", start), ("length", len(ids)), ("flags", flags)):
            rows[name][i] = value
    sections = {
        "slot_updates": slots,
        "block_updates": np.array(list(block_updates), np.int32).reshape(-1, 3).view(wire.DTYPES["block_updates"])[:, 0],
        "decode_rows": np.asarray(decode_rows, np.int32),
        "prefill_rows": rows,
        "prefill_tokens": np.asarray([i for p in prefill for i in p[2]], np.int32),
    }
    words = wire.StepPlan(step, {name: some for name, some in sections.items() if len(some)}, same_decode_rows=same).encode()
    buffer = np.full(600, 12345, np.int32)  # stale words lie behind the plan
    buffer[: len(words)] = words
    return torch.from_numpy(buffer)


def make_state(device="cpu", groups=GROUPS):
    state = SlotTables.allocate(MAX_SEQS, groups, MAX_BLOCKS, device)
    pool = LogitsProcessorPool.allocate(MAX_SEQS, VOCAB, 1000, device, multiplier=1)
    return state, pool, StepBuffers.allocate(40, MAX_SEQS, groups, device)
