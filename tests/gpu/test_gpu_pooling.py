"""Vectors on a GPU: by graphs and eagerly, in fp32 as transformers' states pooled plainly, in bf16 nearly so."""

import numpy as np
import pytest
import torch
from inline_engine import InlineEngine
from tiny_models import GPU_MODELS, tiny_model
from tiny_pools import PROMPTS, vector

from quire.ipc.sampling import SamplingParams

pytestmark = pytest.mark.gpu

NAME = next(iter(GPU_MODELS))


def embedder(pooling: str, runner: str = "pooling", **more) -> InlineEngine:
    flags = {"runner": runner, "convert": "embed", "pooler_config": {"seq_pooling_type": pooling}}
    return InlineEngine(tiny_model(NAME), device="cuda", pooling=flags, **more)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
def test_vectors_equal_transformers(pooling, graphs):
    for scheduling in ({}, {"budget": 48}):
        engine = embedder(pooling, graphs=graphs, **scheduling)
        for _ in range(2):  # the second time from the prefix cache
            found = engine.pool(PROMPTS)
            assert max(np.abs(f - vector(NAME, p, pooling)).max() for f, p in zip(found, PROMPTS, strict=True)) < 1e-3


def test_graphs_give_the_vectors_of_eager_steps_beside_rows_that_generate():
    greedy, found = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), []
    for graphs in (False, True):
        engine = embedder("LAST", "generate", graphs=graphs, budget=64, dtype=torch.bfloat16)
        names = [engine.add(prompt, greedy) for prompt in PROMPTS[:3]]
        pool = engine.add_pool(PROMPTS)
        outputs = engine.run()
        assert all(len(outputs[name << 8]) == 8 for name in names)
        found.append(np.stack([engine.pooled[pool << 8 | i][0] for i in range(len(PROMPTS))]))
    assert (found[0] * found[1]).sum(1).min() > 0.999
