"""A sampler to test: tables, pool and workspace on a device, and either implementation on top."""

import pytest
import torch

from quire.ipc.step.plan import LogitsProcessors
from quire.kernels.sampling import logits_processors, sampler_cpu
from quire.kernels.step.tables import LogitsProcessorPool, SamplerWorkspace, SlotTables

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
        slots, positions = (torch.as_tensor(x, dtype=torch.int32).to(self.device) for x in (slots, positions))
        got = module.sample(logits.to(self.device), slots, positions, self.tables, self.pool, self.workspace, **flags)
        return got.cpu()


# the interpreter computes with numpy, which warns of infinities
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS = ["torch", pytest.param("interpret", marks=[pytest.mark.interpret, QUIET]), pytest.param("cuda", marks=pytest.mark.gpu)]
