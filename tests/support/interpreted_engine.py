"""InlineEngine on a GPU that is emulated: Triton's kernels, in its interpreter, around products and norms of the CPU.

Import it where TRITON_INTERPRET is set. With `padded`, steps have the padded sizes of captured graphs, as in workers/graphs.py.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from inline_engine import InlineEngine

from quire.ipc.step.sections import result_words
from quire.kernels.recurrent import convolution, delta, mamba
from quire.kernels.sampling import sampler, sampler_sharded
from quire.kernels.speculation import accept, draft_passes, features, ngram
from quire.kernels.step import step_inputs, step_states
from quire.workers.attention import cuda
from quire.workers.attention.cuda import CudaModelAttention
from quire.workers.devices.device import RESULT_DEPTH, Device
from quire.workers.devices.masks import CpuMasks
from quire.workers.graph_sizes import GraphSizes
from quire.workers.layers import recurrent_ops


def emulate_gpu(monkeypatch):
    """Let attention be that of a GPU of two SMs, and decode attention take rows with drafts in fp32, too; and recurrent layers
    have a GPU's kernels."""
    for name, kernels in (("convolution_cpu", convolution), ("delta_cpu", delta), ("mamba_cpu", mamba)):
        monkeypatch.setattr(recurrent_ops, name, kernels)
    gpu = SimpleNamespace(multi_processor_count=2, shared_memory_per_block_optin=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(cuda, "takes_queries", lambda *args: True)


class InterpretedDevice(Device):
    def __init__(self, ctx):
        modules = (step_inputs, step_states, sampler, sampler_sharded, accept, ngram, draft_passes, features)
        super().__init__(ctx, *modules, CpuMasks(ctx.sampled_rows, ctx.config.vocab_size), None)
        words = result_words(ctx.max_rows, max_samples=ctx.max_samples)
        self.results = torch.zeros((RESULT_DEPTH, words), dtype=torch.int64)
        self.plan = torch.zeros(ctx.max_device_words, dtype=torch.int32)

    def load_plan(self, words):
        self.plan[: len(words)] = torch.from_numpy(words.copy())[: len(self.plan)]
        return self.plan

    def new_attention(self, ctx):
        return CudaModelAttention(ctx)

    def signal(self):
        pass

    def stream(self):
        return nullcontext()

    def close(self):
        pass


class PaddedSteps:
    """What StepGraphs does with a step, but computed at once."""

    def __init__(self, runner):
        self._runner, ctx = runner, runner.ctx
        self._sizes = GraphSizes(ctx.max_rows, ctx.max_tokens, runner.weights_bytes, ctx.max_samples)
        self.seen = set()

    def run(self, plan, read_masks, pool=None):
        batch = self._sizes.padded(plan)
        if batch is None:
            return False
        tokens, rows, mixed, prompts_only, windows, self._runner.device.adapters.is_active = batch
        self.seen.add((mixed, windows))
        decode_rows = 0 if prompts_only else None if mixed else rows
        runner = self._runner
        hidden = runner.forward(runner.device.plan, tokens, rows, decode_rows, windows=windows)
        runner.tokens.sample(runner.device.plan, runner.model.compute_logits(hidden)[:rows], plan.sampling_kind)
        return True

    def replay(self, key, run, tokens):
        """A draft model's pass."""
        self.seen.add(("draft", key.mixed))
        run()


class InterpretedEngine(InlineEngine):
    def __init__(self, *args, padded=False, **options):
        super().__init__(*args, **options)
        if padded:
            self.runner.graphs = PaddedSteps(self.runner)

    def _make_device(self, ctx):
        return InterpretedDevice(ctx)
