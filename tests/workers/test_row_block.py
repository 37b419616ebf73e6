"""Blocks that give one row to a kernel of all that follows attention, and of the next block's q, k and v: which are fused.

The kernel itself is tested in tests/kernels/test_scaled_block.py; here products one after another stand for it.
"""

import functools

import pytest
import tiny_models
import torch
from inline_engine import InlineEngine

pytest.importorskip("triton")

from quire.ipc.sampling import SamplingParams
from quire.workers.layers.linear import Linear, Placement
from quire.workers.models import decoder, fusion
from quire.workers.models.stage_boundary import MissingLayer
from quire.workers.parallel import Parallel, Stage
from quire.workers.shard import whole

PROMPTS = [list(range(5, 5 + n)) for n in (1, 9, 23)]


@pytest.fixture
def fused(monkeypatch):
    """Blocks of a CPU are fused, too."""
    fuse = functools.partial(fusion.fuse_blocks, parallel=Parallel())
    monkeypatch.setattr(decoder, "choose_fusion", lambda config, parallel: fuse)


@pytest.fixture
def made(fused, monkeypatch):
    """Which kernels were made, each with whether it goes on to the next block."""
    found = []

    def find_kernel(o, norm, gate_up, down, following, state):
        found.append(following is not None)

        def run(x, residual):
            assert x.shape[0] == residual.shape[0] == 1
            h, residual = gate_up.normed(o.split_k(x), residual, norm, True)
            y = down.split_k(h)
            if following is None:
                return y, residual
            qkv, residual = following[1].normed(y, residual, following[0])
            return fusion.NextQKV(qkv), residual

        return run

    monkeypatch.setattr(fusion, "find_kernel", find_kernel)
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
    monkeypatch.undo()
    assert found == [InlineEngine(folder).generate([prompt], params) for prompt in PROMPTS]


def test_a_block_goes_on_to_the_one_that_is_run_next(made):
    model = InlineEngine(tiny_models.tiny_model("llama"), dummy=True).runner.model
    layers = list(model.model.layers)
    blocks = model.model.blocks
    assert [(block.block, block.following) for block in blocks] == list(zip(layers, [*layers[1:], None], strict=True))
    with model.short():
        assert [block.following for block in model.model.blocks] == [layers[1], None]
        assert all(block.kernel is not None for block in model.model.blocks)
    assert model.model.blocks is blocks  # graphs may hold their states
    assert blocks[1].kernel is not None
    assert made == [True, False, len(layers) > 2]


def test_a_block_before_one_that_is_not_fused_goes_on_to_nothing(made):
    layers = InlineEngine(tiny_models.tiny_model("llama"), dummy=True).runner.model.model.layers
    missing = MissingLayer()
    block, other = fusion.fuse_blocks([layers[0], missing], Parallel())
    assert block.kernel is not None and other is missing
    assert made == [False]


def test_blocks_of_a_stage_stay_as_they_are():
    layers = [MissingLayer(), MissingLayer()]
    assert fusion.fuse_blocks(layers, Parallel(stage=Stage(0, 2))) == layers


def test_formats_without_such_a_kernel_have_none(fused):
    block = InlineEngine(tiny_models.tiny_model("llama"), dummy=True).runner.model.model.blocks[0]
    assert block.kernel is None


def test_adapters_and_sums_over_ranks_come_between():
    o_proj = Linear(whole(64), {"o_proj": whole(64)}, False, Placement(torch.float32, Parallel()))
    assert o_proj.bare_format is o_proj.format
    o_proj.set_adapter(object())
    assert o_proj.bare_format is None
    ranks = Parallel(0, 2)
    assert Linear(ranks.split(64), {"o_proj": whole(64)}, False, Placement(torch.float32, ranks)).bare_format is None
