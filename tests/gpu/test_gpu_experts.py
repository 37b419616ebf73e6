"""On a GPU: models whose experts stay quantized give the tokens of the dequantized weights, and graphs those of eager steps.

Tokens are judged as in test_gpu_quantized.
"""

import pytest
import torch
from gpu.test_gpu_quantized import FP8_NEAR, GREEDY, NEAR, below_the_maximum, prompts
from inline_engine import InlineEngine
from quantized_packers import awq, fp8_blocks, fp8_rows
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM
from workers.test_experts import QUANTIZED, as_mxfp4, changed, experts_of
from workers.test_experts_kept import AWQ, FP8_BLOCKS, FP8_ROWS, each_expert

from quire.kernels.experts.four_bits_weight import FourBitWeights
from quire.kernels.experts.scaled_weight import ScaledWeights

pytestmark = pytest.mark.gpu

HOW = {"device": "cuda", "dtype": torch.bfloat16, "max_num_seqs": 8, "num_blocks": 64}


def blocks_of_128(w, name):
    return fp8_blocks(w, 128, 128)


def values(pack):
    """What the packed experts stand for."""

    def change(tensors):
        return {k: pack(w, k.removesuffix(".weight"))[1] if ".experts." in k else w for k, w in tensors.items()}

    return change


def stand_in(tensors):
    return as_mxfp4(tensors, plain=True)


CASES = {
    "mxfp4": ("wide-gpt-oss", as_mxfp4, stand_in, QUANTIZED, FourBitWeights, NEAR),
    "awq": ("wide-qwen3-moe", each_expert(awq), values(awq), AWQ, FourBitWeights, NEAR),
    "fp8-rows": ("wide-qwen3-moe", each_expert(fp8_rows), values(fp8_rows), FP8_ROWS, ScaledWeights, FP8_NEAR),
    "fp8-blocks": (
        "wide-qwen3-moe",
        each_expert(blocks_of_128),
        values(blocks_of_128),
        FP8_BLOCKS,
        ScaledWeights,
        FP8_NEAR,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_dequantized_experts(case, tmp_path):
    name, pack, unpack, config, kind, near = CASES[case]
    folder = changed(name, tmp_path / "packed", pack, quantization_config=config)
    model = AutoModelForCausalLM.from_pretrained(changed(name, tmp_path / "plain", unpack), dtype=torch.float32)
    # tiny gpt-oss' tokens lie up to 0.3 of the range off in bfloat16, quantized or not
    how = {**HOW, "dtype": torch.float16} if case == "mxfp4" else HOW
    eager, graphs = (InlineEngine(folder, graphs=graphs, **how) for graphs in (False, True))
    for engine in (eager, graphs):
        assert all(isinstance(module.weights, kind) for module in experts_of(engine.model))
        assert below_the_maximum(model, prompts(), engine.generate(prompts(), GREEDY), share=True) < near
    alone = graphs.generate(prompts()[2:3], GREEDY)
    assert below_the_maximum(model, prompts()[2:3], alone, share=True) < near
    unpadded = torch.arange(4, 68).view(8, 8).tolist()  # the same numbers of rows: the same sums
    assert graphs.generate(unpadded, GREEDY) == eager.generate(unpadded, GREEDY)


@pytest.mark.parametrize("asked", ["fp8", "fp8_per_block", "int8", "int4"])
@pytest.mark.parametrize("family", ["wide-qwen3-moe", "wide-deepseek-v3"])
def test_rounded_while_loading(family, asked):
    how = HOW | {"model_options": {"quantization": asked}}
    eager, graphs = (InlineEngine(tiny_model(family), graphs=graphs, **how) for graphs in (False, True))
    kind = FourBitWeights if asked == "int4" else ScaledWeights
    assert all(isinstance(module.weights, kind) for module in experts_of(eager.model))
    unpadded = torch.arange(4, 68).view(8, 8).tolist()
    assert graphs.generate(unpadded, GREEDY) == eager.generate(unpadded, GREEDY)


def test_dummy_experts_take_no_more_than_they_do_in_the_end():
    """A layer as wide as gpt-oss's, whose experts would take 1.6 GB in 16 bits."""
    from quire.kernels.experts.experts_reference import SwiGLU
    from quire.workers.layers.experts import Experts
    from quire.workers.layers.linear import Placement
    from quire.workers.loading.quantized.config import read_quantization
    from quire.workers.models.families.gpt_oss import NAMES
    from quire.workers.parallel import Parallel
    from quire.workers.shard import whole

    parallel = Parallel(device=torch.device("cuda"))
    place = Placement(torch.bfloat16, parallel, read_quantization(QUANTIZED), "model.layers.0.mlp.experts.")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer = Experts(whole(32), 2880, whole(2880), place, act=SwiGLU(), names=NAMES, has_bias=True)
    layer.fill_dummy(0.03, torch.Generator("cuda").manual_seed(0))
    layer.finish()
    assert torch.cuda.max_memory_allocated() - before < 0.55 * 32 * 3 * 2880**2 * 1.03 + 50e6
