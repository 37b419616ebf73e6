"""Tensor parallelism of the dense families: fused tensors, norms over all heads, ALiBi, parallel blocks, heads' biases."""

import pytest
import tiny_families
import tiny_models
import torch
from step_contexts import context_of
from workers.test_models import PROMPT, DenseAttention
from workers.test_parallel import on_every_rank

from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config

ALWAYS = ("phi3", "olmo2", "falcon-40b", "bloom", "cohere-qk-norm")
NOT_DIVISIBLE = ("falcon-7b",)  # seven heads
NAMES = [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow)
    for name in tiny_families.MODELS
    if name not in NOT_DIVISIBLE
]


def on_ranks(name, size):
    """The prompt's logits as each of so many ranks has them."""
    folder = tiny_models.tiny_model(name)
    config = read_model_config(folder)

    def logits(parallel):
        model = build_model(config, torch.float32, parallel)
        load_weights(model, folder, "cpu", progress=False)
        with torch.inference_mode():
            attention = DenseAttention(config.attention_specs(parallel))
            return model.compute_all_logits(model(PROMPT, context_of(attention, torch.arange(len(PROMPT)))))

    return on_every_rank(size, logits)[0]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_together_are_the_whole_model(name):
    [alone] = on_ranks(name, 1)
    parts = on_ranks(name, 2)
    assert torch.equal(*parts)
    scale = max(1.0, float(alone.abs().max()) / 4)
    torch.testing.assert_close(parts[0], alone, atol=1.2e-4 * scale, rtol=1e-5)


def test_four_ranks_hold_kv_heads_twice():
    """A norm over all heads counts each of them as often."""
    [alone] = on_ranks("olmo2", 1)
    parts = on_ranks("olmo2", 4)
    torch.testing.assert_close(parts[0], alone, atol=1e-4, rtol=1e-5)
