"""On a GPU: models with recurrent layers give the CPU's tokens, which equal those of the newest transformers.

The transformers of a GPU machine may be older: what it lacks is skipped.
"""

import functools

import pytest
import tiny_hybrids
import torch
import transformers
from inline_engine import InlineEngine
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LENGTHS = (1, 5, 63, 64, 65, 130, 200, 333)
NAMES = [
    pytest.param(
        name, marks=pytest.mark.skipif(not hasattr(transformers, tiny_hybrids.CLASSES[family][1]), reason="not in transformers")
    )
    for name, (family, _) in tiny_hybrids.GPU_MODELS.items()
]
pytestmark = pytest.mark.gpu


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 500, (length,), generator=generator).tolist() for length in LENGTHS]


@functools.cache
def on_the_cpu(name):
    return InlineEngine(tiny_model(name)).generate(prompts(), GREEDY)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_tokens_are_the_cpus(name, graphs):
    want = on_the_cpu(name)
    assert len({token for tokens in want for token in tokens}) > 16
    engine = InlineEngine(tiny_model(name), device="cuda", graphs=graphs)
    assert engine.generate(prompts(), GREEDY) == want
    assert engine.generate(prompts(), GREEDY) == want  # from the prefix cache
    assert engine.scheduler.counters.cached_tokens > 0
    assert [engine.generate([prompt], GREEDY)[0] for prompt in prompts()] == want


@pytest.mark.parametrize("name", NAMES)
def test_fp32_tokens_are_the_cpus_in_chunks_and_preempted(name):
    want = on_the_cpu(name)
    for budget in (7, 96):
        assert (
            InlineEngine(tiny_model(name), device="cuda", graphs=budget == 96, budget=budget).generate(prompts(), GREEDY)
            == want
        )
    engine = InlineEngine(tiny_model(name), device="cuda", graphs=True, budget=96, num_blocks=40, look_ahead=False)
    assert engine.generate(prompts(), GREEDY) == want
    assert engine.scheduler.counters.preemptions > 0 or name.removeprefix("gpu-") in tiny_hybrids.WITHOUT_KV_CACHE


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_16_bit_tokens_do_not_depend_on_where_the_prompt_is_found(name, state_dtype):
    """A state that was cut at a checkpoint has the bits of one that was not, whatever its type."""
    engine = InlineEngine(tiny_model(name), device="cuda", dtype=torch.bfloat16, graphs=True, state_dtype=state_dtype)
    cold = [engine.generate([prompt], GREEDY)[0] for prompt in prompts()]
    far = 0
    for tokens, want in zip((engine.generate([prompt], GREEDY)[0] for prompt in prompts()), cold, strict=True):
        far += tokens[0] != want[0]  # a shorter chunk rounds the products of its tokens in another way
    assert far <= 1 and engine.scheduler.counters.cached_tokens > 0
