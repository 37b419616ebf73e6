"""A model in two and four stages, a GPU each: fp32 tokens equal transformers', in graphs and eagerly; stages killed and stopped
in mid-stream. tests/kernels/test_peer_link.py has the link alone."""

import pytest
from gpu.test_gpu_engine import GREEDY, prompts, wrong_rows
from gpu.test_several_gpus import OPTIONS, assert_equals_transformers, assert_lost_and_replaced, on, served_on, tokens
from tiny_models import tiny_model

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("stages", "name", "eager"),
    [on(2, "gpu-llama", False), on(2, "gpu-qwen3", True), on(2, "split-gpu-llama", False), on(4, "gpu-gpt-oss", False)],
)
def test_fp32_in_stages_equals_transformers(stages, name, eager):
    assert_equals_transformers(name, pipeline_parallel_size=stages, enforce_eager=eager)


@pytest.mark.parametrize("stages", [on(2)])
def test_stages_sample_what_one_gpu_samples(stages):
    """Penalties, logprobs, prompt logprobs, filters: all at the last stage."""
    asked = SamplingParams(
        temperature=0.7, seed=6, top_k=40, frequency_penalty=0.3, repetition_penalty=1.2, max_tokens=24, ignore_eos=True,
        logprobs=3, prompt_logprobs=2,
    )  # fmt: skip
    found = []
    for count in (1, stages):
        llm = LLM(str(tiny_model("gpu-llama")), pipeline_parallel_size=count, **OPTIONS)
        try:
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], asked, use_tqdm=False)
            found.append([(list(o.outputs[0].token_ids), len(o.prompt_logprobs), len(o.outputs[0].logprobs)) for o in outputs])
        finally:
            llm.shutdown()
    assert found[0] == found[1]


@pytest.fixture(scope="module", params=[on(2)])
def served(request):
    yield from served_on("-pp", str(request.param))


@pytest.mark.parametrize("signal", ["kill", "suspend"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_lost_is_named_and_all_are_replaced(served, signal, rank):
    assert_lost_and_replaced(served, signal, rank)


@pytest.mark.parametrize("size", [on(4)])
def test_two_stages_of_two_ranks_equal_transformers(size):
    llm = LLM(str(tiny_model("gpu-llama")), pipeline_parallel_size=2, tensor_parallel_size=size // 2, **OPTIONS)
    try:
        greedy = SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True)
        assert wrong_rows("gpu-llama", tokens(llm, greedy)) == []
    finally:
        llm.shutdown()
