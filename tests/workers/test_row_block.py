"""Blocks that hand one row to a kernel of all that follows attention, and on to the next block's q, k and v: who gets what.

The kernel itself is tested in tests/kernels/test_scaled_block.py; here products one after the other stand for it.
"""

import pytest
import tiny_models
from inline_engine import InlineEngine

from quire.ipc.sampling import SamplingParams
from quire.workers.layers.formats.format import Products, Projected
from quire.workers.layers.linear import Summed
from quire.workers.models.stage_boundary import MissingLayer

PROMPTS = [list(range(5, 5 + n)) for n in (1, 9, 23)]


@pytest.fixture
def made(monkeypatch):
    """Which blocks were made, each with whether it goes on to the next."""
    found = []

    def row_block(self, norm, gate_up, down, after):
        found.append(after is not None)

        def run(x, residual):
            assert x.shape[0] == residual.shape[0] == 1
            h, residual = gate_up.normed(self.split_k(x), residual, norm, True)
            y = down.split_k(h)
            if after is None:
                return y, residual
            qkv, residual = after[1].normed(y, residual, after[0])
            return Projected(qkv), residual

        return run

    monkeypatch.setattr(Products, "row_block", row_block)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_tokens_are_the_same(name, made, monkeypatch):
    folder, params = tiny_models.tiny_model(name), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for prompt in PROMPTS:
        engine = InlineEngine(folder)
        found.append(engine.generate([prompt], params))
        layers = len(engine.runner.model.model.layers)
        assert sorted(made[-layers:]) == [False] + [True] * (layers - 1)  # a prompt has one row left in the last
    monkeypatch.setattr(Products, "row_block", lambda *others: None)
    assert found == [InlineEngine(folder).generate([prompt], params) for prompt in PROMPTS]


def test_a_block_goes_on_to_the_one_that_is_run_next(made):
    model = InlineEngine(tiny_models.tiny_model("llama"), dummy=True).runner.model
    layers = list(model.model.layers)
    assert [layer.after for layer in layers] == [*layers[1:], None]
    with model.short():
        assert [layer.after for layer in model.model.layers] == [layers[1], None]
        assert all(layer._row_block is not None for layer in model.model.layers)
    assert [layer.after for layer in layers] == [*layers[1:], None]
    assert layers[1]._row_block is not None
    assert made == [True, False, len(layers) > 2]


def test_the_last_block_of_a_stage_goes_on_to_nothing(made):
    model = InlineEngine(tiny_models.tiny_model("llama"), dummy=True).runner.model
    model.model.layers[1] = MissingLayer()
    model.model.link()
    assert model.model.layers[0]._row_block is not None
    assert made == [False]


def test_formats_without_such_a_kernel_have_none():
    block = InlineEngine(tiny_models.tiny_model("llama"), dummy=True).runner.model.model.layers[0]
    assert block._row_block is None


def test_a_sum_over_ranks_comes_between():
    assert Summed(Products(), None).row_block(None, None, None, None) is None
