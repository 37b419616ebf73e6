"""Bytes of weights on a CPU: `quire estimate`, the check at the start, and what a worker holds, for each kind of checkpoint."""

import pytest
import torch
from estimate_cases import read
from quantized_models import WHILE_LOADING, quantized
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from quire.frontend.cli.estimate import estimate
from quire.ipc.config import EngineConfig
from quire.kernels.linear import int4_cpu
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.memory import held_bytes
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

pytestmark = pytest.mark.skipif(not int4_cpu.can_pack(), reason="needs AVX2")

# a family, its format, the dtype, ranks, and whether experts are whole
CASES = [
    ("llama", None, "float32", 1, False),
    ("llama-tied", None, "float32", 1, False),
    ("llama-tied", None, "bfloat16", 1, False),
    ("qwen3-moe", None, "bfloat16", 1, False),
    ("qwen3-moe", "int4", "float32", 2, True),
    ("qwen3-moe", "fp8", "float32", 1, False),
    ("llama", "int8", "float32", 1, False),
    ("llama", "int4", "bfloat16", 1, False),
    ("llama", "gptq", "float32", 1, False),
    ("llama-tied", "gptq", "float32", 1, False),
    ("llama", "gptq", "float32", 2, False),
    ("llama", "gptq", "float16", 1, False),
    ("llama", "w8a8", "bfloat16", 1, False),
    ("llama", "nf4", "float32", 1, False),
    ("llama", "mxfp4", "float32", 1, False),
    ("llama", "fp8-block", "float32", 1, False),
    ("llama", "bnb-int8", "float32", 1, False),
    ("llama", "gptq-head", "float32", 1, False),
]


def folder_of(family, form, tmp_path):
    """The checkpoint; a quantized one's embedding and head have 16 bits, as packers leave them."""
    if form is None or form in WHILE_LOADING:
        return tiny_model(family)
    quantized(family, form, folder := tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    short = {
        name: tensor.bfloat16() for name, tensor in tensors.items() if name.endswith(("embed_tokens.weight", "head.weight"))
    }
    save_file(tensors | short, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("is_dummy", [False, True])
@pytest.mark.parametrize(("family", "form", "dtype", "ranks", "expert_parallel"), CASES)
def test_the_estimate_the_start_and_the_worker_agree(
    family, form, dtype, ranks, expert_parallel, is_dummy, tmp_path, asked_here
):
    folder, asked = folder_of(family, form, tmp_path), form if form in WHILE_LOADING else None
    config = EngineConfig(
        device="cpu", dtype=dtype, quantization=asked, tensor_parallel_size=ranks, enable_expert_parallel=expert_parallel
    )
    found, kind = estimate(read(folder), config, 0), getattr(torch, dtype)
    model = build_model(
        read_model_config(folder, quantization=asked), kind, Parallel(0, ranks, expert_parallel=expert_parallel)
    )
    checked = held_bytes(model, kind)
    if is_dummy:
        dummy_weights(model, 0)
    else:
        load_weights(model, folder, "cpu", progress=False)
    assert found.weights_bytes == checked
    # tables of codes and orders of inputs come while weights are loaded: a few KiB for a layer, whatever its size
    assert abs(model.weights_bytes - checked) <= 0.02 * checked + 2048 * len(list(model.modules()))


def test_pipeline_stages_hold_no_more_than_the_whole(tmp_path, asked_here):
    folder = folder_of("llama", "gptq", tmp_path)
    one, two = (estimate(read(folder), EngineConfig(device="cpu", pipeline_parallel_size=n), 0).weights_bytes for n in (1, 2))
    assert one / 3 < two < one
