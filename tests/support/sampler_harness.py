"""A sampler to test: tables, pool and workspace on a device, and either implementation on top."""

import numpy as np
import pytest
import torch

from quire.ipc.step.plan import LogitsProcessors
from quire.kernels.sampling import logits_processors, sampler_cpu
from quire.kernels.step.tables import LogitsProcessorPool, SamplerWorkspace, SlotTables, WindowIds

SLOTS = 8


class SamplerHarness:
    """Tables, pool and workspace on a device, and the implementation under test: with kernels or in torch."""

    def __init__(self, vocab, device="cpu", kernels=False, rows=1):
        self.device, self.kernels, self.vocab = device, kernels, vocab
        self.tables = SlotTables.allocate(SLOTS, 1, 1, device)
        self.pool = LogitsProcessorPool.allocate(SLOTS, vocab, 2000, device, multiplier=0x1E3779B1)
        self.workspace = SamplerWorkspace.allocate(rows, vocab, device) if kernels else None

    def set(self, slot=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=(1, 2), presence=0.0, frequency=0.0,
            repetition=1.0, has_processors=False, min_len=0):  # fmt: skip
        for name, value in locals().items():
            if name not in ("self", "slot", "seed"):
                self.tables.column(name)[slot] = value
        self.tables.column("seed")[slot] = torch.tensor(seed, dtype=torch.int32)

    def processors(self, slot=0, prompt=(), output=(), bias=(), allowed=(), stop=(), bad=()):
        ids, values = [b[0] for b in bias], [b[1] for b in bias]
        record = LogitsProcessors(slot, prompt, output, ids, values, allowed, stop, bad)
        logits_processors.apply_logits_processors(self.tables, self.pool, [record])

    def sample(self, logits, slots, positions, **flags):
        if self.kernels:
            from quire.kernels.sampling import sampler as module
        else:
            module = sampler_cpu
        flags = {"random": True, "filtered": True, "processors": True, **flags}
        if "bitmask" in flags:
            flags["bitmask"] = flags["bitmask"].to(self.device)
        if "window" in flags:  # input ids and places
            flags["window"] = WindowIds(*(torch.as_tensor(x, dtype=torch.int32).to(self.device) for x in flags["window"]))
        slots, positions = (torch.as_tensor(x, dtype=torch.int32).to(self.device) for x in (slots, positions))
        got = module.sample(logits.to(self.device), slots, positions, self.tables, self.pool, self.workspace, **flags)
        return got.cpu()


# the interpreter computes with numpy, which warns of infinities
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS = ["torch", pytest.param("interpret", marks=[pytest.mark.interpret, QUIET]), pytest.param("cuda", marks=pytest.mark.gpu)]


def random_case(h, vocab, rows, seed, dtype=torch.float32):
    """Mixed rows: greedy, plain, filtered in all ways, with processors; logits of several widths."""
    rng = np.random.default_rng(seed)
    for slot in range(SLOTS):
        h.set(
            slot,
            temperature=float(rng.choice([0.0, 0.3, 1.0, 1.8])),
            top_k=int(rng.choice([0, 1, 3, 50, 2 * vocab])),
            top_p=float(rng.choice([1.0, 0.95, 0.5, 0.05])),
            min_p=float(rng.choice([0.0, 0.0, 0.01, 0.3])),
            seed=tuple(rng.integers(-(2**31), 2**31, 2).tolist()),
            presence=float(rng.normal()),
            frequency=float(rng.normal()),
            repetition=float(rng.uniform(0.5, 2)),
            has_processors=slot < 3,
            min_len=int(rng.integers(0, 100)),
        )
    for slot in (0, 1, 2):
        ids = rng.integers(0, vocab, (4, 20)).tolist()
        bias = list(zip(sorted(set(ids[2])), rng.normal(size=20).tolist(), strict=False))
        output = ids[1] + [ids[2][0]] * 130 * slot  # more than a byte counts
        allowed, bad = ids[3] if slot == 1 else (), [[output[-1], ids[0][0]], [ids[3][5]]]
        h.processors(slot, ids[0], output, bias, allowed, ids[3][:3], bad)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32) * rng.choice([0.5, 2, 4], size=(rows, 1)))
    slots = [i % SLOTS for i in range(rows)]
    words = rng.integers(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
    words[rng.random(rows) < 0.5] = -1
    return logits.float().to(dtype), slots, rng.integers(0, 1000, rows).tolist(), torch.from_numpy(words)
