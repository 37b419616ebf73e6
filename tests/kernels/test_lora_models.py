"""LoRA adapters in whole models with a GPU's kernels, in Triton's interpreter: tokens are those of the CPU, in padded steps."""

import pytest
from peft_folders import LINEAR, write_adapter
from tiny_models import tiny_model

from quire.ipc.adapters import AdapterLimits
from quire.ipc.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PROMPTS = [list(range(20, 20 + n)) for n in (3, 9, 1, 18)]
SLOTS = [1, -1, 0, 0]
LIMITS = AdapterLimits(
    max_loras=2, max_rank=24, has_head=True, has_embedding=True, has_routers=True, has_experts=True, captures=True
)
TARGETS = (*LINEAR, "lm_head", "embed_tokens", "gate")


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("llama", True),
        pytest.param("qwen3-moe", False, marks=pytest.mark.slow),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", True, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_cpu(name, padded, monkeypatch, tmp_path):
    from inline_engine import InlineEngine
    from interpreted_engine import InterpretedEngine, emulate_gpu

    from quire.workers.adapters import lora, slots

    model = tiny_model(name)
    folders = [write_adapter(tmp_path / str(r), model, TARGETS, rank=r, seed=r, std=0.1) for r in (5, 24)]
    some = {"adapters": LIMITS, "enable_prefix_caching": False, "max_num_seqs": 8, "budget": 24}
    plain = InlineEngine(model, **some)
    emulate_gpu(monkeypatch)
    monkeypatch.setattr(slots, "CpuStepAdapters", lambda n, captures: lora.CudaStepAdapters(n, 64, plain.device, captures))
    emulated = InterpretedEngine(model, padded=padded, **some)
    assert isinstance(emulated.adapters.steps, lora.CudaStepAdapters)
    for engine in (plain, emulated):
        for slot, folder in enumerate(folders):
            engine.load_adapter(folder, slot)
    want = plain.generate(PROMPTS, GREEDY, SLOTS)
    assert emulated.generate(PROMPTS, GREEDY, SLOTS) == want
    assert emulated.generate(PROMPTS, GREEDY) == plain.generate(PROMPTS, GREEDY) != want
