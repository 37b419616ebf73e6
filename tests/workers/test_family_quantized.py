"""Quantized checkpoints whose layers are several in one tensor: rows are sorted after they were dequantized, on every rank,
and where a GPU keeps what is quantized."""

import pytest
import torch
from quantized_models import WHILE_LOADING, quantized
from safetensors.torch import load_file, save_file
from step_contexts import context_of
from tiny_models import tiny_model
from workers.test_models import PROMPT, DenseAttention
from workers.test_parallel import on_every_rank

from quire.workers.layers import linear
from quire.workers.layers.formats.dense import Dense
from quire.workers.loading.quantized.packing import QuantizedWeight, joined
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("falcon-40b", "nf4"),
        ("phi3", "gptq"),
        ("phi3", "awq"),
        ("glm4", "nf4"),
        ("gpt-neox", "gptq"),
        ("gemma4-joint", "nf4"),
        ("gemma4", "gptq"),
    ],
)
def test_fused_layers_are_sorted(name, form, ranks, tmp_path, dequantized):
    theirs = quantized(name, form, tmp_path / "model")
    config = read_model_config(tmp_path / "model")

    def logits(parallel):
        model = build_model(config, torch.float32, parallel)
        load_weights(model, tmp_path / "model", "cpu", progress=False)
        with torch.inference_mode():
            attention = DenseAttention(config.attention_specs(parallel))
            return model.compute_logits(model(PROMPT, context_of(attention, torch.arange(len(PROMPT)))))

    with torch.inference_mode():
        want = theirs(PROMPT.long()[None]).logits[0]
    parts, _ = on_every_rank(ranks, logits)
    torch.testing.assert_close(parts[0], want, atol=2e-4 * max(1.0, float(want.abs().max()) / 8), rtol=1e-4)


def test_static_scales_of_inputs_have_two_names(tmp_path):
    """As transformers writes fp8 (Ministral 3), activation_scale."""
    quantized("llama", "fp8-tensor", tmp_path / "model")
    config, file = read_model_config(tmp_path / "model"), tmp_path / "model" / "model.safetensors"

    def logits():
        model = build_model(config, torch.float32, Parallel())
        load_weights(model, tmp_path / "model", "cpu", progress=False)
        with torch.inference_mode():
            attention = DenseAttention(config.attention_specs(Parallel()))
            return model.compute_logits(model(PROMPT, context_of(attention, torch.arange(len(PROMPT)))))

    want, tensors = logits(), load_file(file)
    renamed = {name.replace(".input_scale", ".activation_scale"): tensor.clone() for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file, metadata={"format": "pt"})
    assert torch.equal(logits(), want)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("family", "form"),
    [("phi3", "gptq"), ("falcon-40b", "awq"), ("gpt-neox", "w8a8"), ("gpt-neox", "int4"), ("glm4", "fp8")]
    + [("qwen2-moe", "int8"), ("deepseek-v3", "int4"), ("gemma4-joint", "int4"), ("gemma4", "fp8")],
)
def test_what_a_gpu_keeps_stands_for_the_same_values(family, form, ranks, tmp_path, monkeypatch):
    """Of layers that are several in one tensor, and beside experts, which are dequantized."""
    kept = pytest.importorskip("kept_weights", exc_type=ImportError)  # Triton, which a CPU may not have
    kept.keep_quantized(monkeypatch)
    folder = tiny_model(family)
    if form not in WHILE_LOADING:
        quantized(family, form, folder := tmp_path / "model")
    config = read_model_config(folder, quantization=form if form in WHILE_LOADING else None)
    for rank in range(ranks):
        ours = build_model(config, torch.float32, Parallel(rank, ranks))
        with monkeypatch.context() as plain:
            plain.setattr(linear, "choose_format", lambda place: Dense)
            theirs = build_model(config, torch.float32, Parallel(rank, ranks))
        for model in (ours, theirs):
            load_weights(model, folder, "cpu", progress=False)
        of_ours, others = kept.linears(ours), dict(ours.named_parameters())
        kinds = {name: isinstance(layer.format, Dense) for name, layer in of_ours.items()}
        assert not any(plain for name, plain in kinds.items() if name.endswith(("qkv_proj", "gate_up_proj")))
        for name, parameter in theirs.named_parameters():
            assert ".format." in name or torch.equal(others[name], parameter), name
        for name, layer in kept.linears(theirs).items():
            torch.testing.assert_close(kept.in_order(of_ours[name]), layer.format.weight, rtol=1e-6, atol=0)
            assert (layer.format.bias is None) or torch.equal(of_ours[name].format.bias, layer.format.bias)


@pytest.mark.parametrize("block", [(1, 8), (12, 16), (4, 8), (3, 16)])
@pytest.mark.parametrize("ranges", [[(0, 4), (8, 12)], [(4, 12)], [(8, 11), (0, 3), (3, 4)], [(1, 7), (9, 12), (0, 1)]])
def test_pieces_that_are_joined_are_the_rows_of_the_whole(block, ranges):
    """As kernels that keep integers get them: blocks that pieces cut are given a scale for each row."""
    gen = torch.Generator().manual_seed(0)
    grid = (-(-12 // block[0]), -(-16 // block[1]))
    q, scales = torch.randint(0, 16, (12, 16), dtype=torch.uint8, generator=gen), torch.rand(grid, generator=gen)
    whole = QuantizedWeight(q, scales, block, torch.randint(0, 9, grid, dtype=torch.int32, generator=gen))
    want = torch.empty(12, 16)
    whole.dequantize_into(want)
    pieces = joined([whole.shard(slice(*range_), slice(0, 16)) for range_ in ranges])
    got = torch.empty(len(pieces.q), 16)
    pieces.dequantize_into(got)
    assert torch.equal(got, torch.cat([want[start:stop] for start, stop in ranges]))
