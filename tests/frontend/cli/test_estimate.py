"""`quire estimate`: against what engines measured on an H100, and against a CPU engine's own arithmetic."""

import argparse
import json
import os
import shutil

import pytest
import torch
from estimate_cases import QWEN3_06B, folder_of, read
from quantized_models import quantized
from tiny_models import MODELS, tiny_model

from quire.enginecore import daemon
from quire.enginecore.loading.model_files import model_summary
from quire.frontend.cli import main as cli
from quire.frontend.cli.estimate import GPUS, estimate, gpu_bytes, machine_of, text_of
from quire.frontend.cli.estimate_model import BY_HAND, on_rank, read_model, sizes_of
from quire.frontend.cli.estimate_sizes import EstimateError
from quire.frontend.cli.estimate_stage import share_of
from quire.ipc import memory_plan
from quire.ipc.config import EngineConfig
from quire.ipc.memory_plan import GIB
from quire.kernels.tuning.default import DEFAULT
from quire.workers.attention.kv_cache import KVCache
from quire.workers.layers.formats.packed_cpu import SMALL_BYTES
from quire.workers.loading.weights import load_weights
from quire.workers.memory import cpu_budget, cpu_step_bytes, state_needs
from quire.workers.memory import sizes_of as workers_sizes_of
from quire.workers.models.build import build_model
from quire.workers.models.family_table import FAMILIES, parse_model_config, read_model_config
from quire.workers.parallel import Parallel
from quire.workers.recurrent.state_cache import state_cache_of
from quire.workers.stages import stage_of

pytestmark = pytest.mark.usefixtures("asked_here")  # test_estimate_families.py asks a process of its own

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "weights_gib", "activations_gib", "kv_gib", "tokens"),
    [(LLAMA_8B, 14.96, 0.91, 53.18, 435_584), (LLAMA_8B, 14.96, 0.91, 53.37, 437_120), (QWEN3_06B, 1.11, 0.20, 67.68, 633_536)],
)
def test_what_engines_said_of_an_h100(tmp_path, config, weights_gib, activations_gib, kv_gib, tokens):
    """The lines that they logged, with a --max-model-len of 4096."""
    model = read(folder_of(tmp_path, config))
    found = estimate(model, EngineConfig(max_model_len=4096), gpu_bytes("H100", None))
    assert round(found.weights_bytes / GIB, 2) == weights_gib and round(found.activation_bytes / GIB, 2) == activations_gib
    assert found.kv_cache_bytes / GIB == pytest.approx(kv_gib, rel=0.01)
    assert found.tokens == pytest.approx(tokens, rel=0.01)
    assert found.max_num_seqs == 1024 and found.block_size == 64


@pytest.mark.parametrize("skipped", [[], ["1"], ["sliding_window"]])
def test_an_8_bit_cache_is_counted_as_an_engine_does(skipped):
    folder = tiny_model("qwen2-mixed")
    config = EngineConfig(device="cpu", cpu_kv_cache_gib=0.01, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=skipped)
    worker_config = read_model_config(folder, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=skipped)
    cache = KVCache(worker_config.attention_specs(Parallel()), 16, torch.float32)
    found = estimate(read(folder), config, 0)
    worker = daemon.worker_config(config, folder, model_summary(folder)).engine
    assert (worker.kv_cache_dtype, worker.kv_cache_dtype_skip_layers) == ("fp8", skipped)
    assert (found.num_blocks, found.kv_cache_bytes) == (n := cpu_budget(worker, cache, 0, 0).num_blocks, n * cache.block_bytes)


FEW = ("llama", "llama-tied", "mistral-sliding", "qwen2-mixed", "qwen3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in sorted(MODELS)])
def test_a_cpu_engine_counts_the_same(name):
    folder = tiny_model(name)
    config, worker_config = EngineConfig(device="cpu", cpu_kv_cache_gib=0.01), read_model_config(folder)
    model = read(folder)
    assert model.sizes == workers_sizes_of(worker_config)
    found = estimate(model, config, 0)
    worker = daemon.worker_config(config, folder, model_summary(folder)).engine
    cache = KVCache(worker_config.attention_specs(Parallel()), worker.block_size, torch.float32)
    rows, tokens = worker.max_num_seqs, max(worker.max_num_batched_tokens, worker.max_num_seqs)
    step = cpu_step_bytes(worker_config, tokens, rows, torch.float32)
    assert (found.num_blocks, found.kv_cache_bytes) == (n := cpu_budget(worker, cache, 0, 0).num_blocks, n * cache.block_bytes)
    assert found.activation_bytes == step and found.max_model_len == worker.max_model_len
    loaded = build_model(worker_config, torch.float32, Parallel())
    load_weights(loaded, folder, torch.device("cpu"))
    assert found.weights_bytes == loaded.weights_bytes and model.is_counted


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("qwen3-next", marks=pytest.mark.slow)])
def test_states_are_counted_as_the_worker_divides_memory(name, asked_here):
    folder = tiny_model(name)
    config, worker_config = EngineConfig(device="cpu", cpu_kv_cache_gib=0.01), read_model_config(folder)
    found = estimate(read(folder), config, 0)
    worker = daemon.worker_config(config, folder, model_summary(folder)).engine
    cache = KVCache(worker_config.attention_specs(Parallel()), worker.block_size, torch.float32)
    size = state_cache_of(worker_config, Parallel(), torch.float32).state_bytes
    budget = cpu_budget(worker, cache, 0, 0, state_needs(worker, worker_config, size))
    assert (found.num_blocks, found.num_states) == (budget.num_blocks, budget.num_states)
    assert found.states_bytes == budget.num_states * size > 0


@pytest.mark.parametrize(("name", "size"), [("split-qwen2", 2), ("split-llama", 4), ("split-qwen3", 2)])
def test_one_of_several_ranks_is_counted_as_it_is_built(name, size, asked_here):
    folder, ranks = tiny_model(name), Parallel(0, size)
    config, worker_config = EngineConfig(device="cpu", tensor_parallel_size=size), read_model_config(folder)
    model = on_rank(read(folder), size)
    assert model.sizes == workers_sizes_of(worker_config, ranks)
    built = build_model(worker_config, torch.float32, ranks)
    assert model.num_parameters == pytest.approx(sum(p.numel() for p in built.parameters()), rel=0.05)
    cache = KVCache(worker_config.attention_specs(ranks), 16, torch.float32)
    assert estimate(read(folder), config, 0).kv_bytes_per_token == cache.block_bytes * len(cache.groups) // 16
    assert f"each of {size}" in text_of(estimate(read(folder), config, 0), read(folder), config)
    with pytest.raises(EstimateError, match="--tensor-parallel-size 3 does not divide attention heads"):
        on_rank(read(folder), 3)


@pytest.mark.parametrize(("name", "stages", "size"), [("split-qwen2", 2, 1), ("llama", 3, 1), ("split-llama", 2, 2)])
def test_the_largest_of_several_stages_is_counted_as_it_is_built(name, stages, size, asked_here):
    folder = tiny_model(name)
    config = EngineConfig(device="cpu", tensor_parallel_size=size, pipeline_parallel_size=stages)
    worker_config, model = read_model_config(folder), share_of(read(folder), size, stages)
    parts = [stage_of(worker_config, torch.float32, i, stages) for i in range(stages)]
    built = [build_model(worker_config, torch.float32, Parallel(0, size, stage=part)) for part in parts]
    assert model.num_parameters == pytest.approx(max(sum(p.numel() for p in m.parameters()) for m in built), rel=0.05 * size**2)
    assert len(model.sizes.layers) in {len(part.layers) for part in parts}
    text = text_of(estimate(read(folder), config, 0), read(folder), config)
    assert f"each of {stages * size}" in text
    with pytest.raises(EstimateError, match="--pipeline-parallel-size 9 is more than the layers of"):
        share_of(read(folder), size, 9)


def test_the_constants_are_the_tuning_tables():
    step = DEFAULT.step
    assert step.captured_tokens == memory_plan.CAPTURED_TOKENS and memory_plan.PACKED_TWICE_BYTES == SMALL_BYTES
    assert step.large_weights_bytes == memory_plan.LARGE_WEIGHTS_BYTES
    sizes = memory_plan.ModelSizes(vocab_size=512, hidden_size=64, layers=())
    assert memory_plan.exchange_bytes(sizes, 1, 2) == 0
    for size in range(2, 9):
        one_shot, two_shot = DEFAULT.exchange.max_rows(size)
        elements = 3 * 64 * (size * one_shot + 2 * two_shot)  # all_reduce_norm.places_shape, which needs Triton
        assert memory_plan.exchange_bytes(sizes, size, 2) == pytest.approx(2 * elements, rel=0.02)


def test_parameters_are_computed_where_no_file_counts_them(tmp_path):
    assert read(folder_of(tmp_path, LLAMA_8B)).num_parameters == 8_030_261_248  # what its model card counts
    counted = read(tiny_model("llama"))
    shutil.copy(tiny_model("llama") / "config.json", tmp_path)
    computed = read(tmp_path)
    assert (computed.num_parameters, computed.is_counted) == (counted.num_parameters, False)


def test_flags_change_the_plan(tmp_path):
    model, memory = read(folder_of(tmp_path, LLAMA_8B)), gpu_bytes("H100", None)

    def tokens(**flags):
        return estimate(model, EngineConfig(**flags), memory).tokens

    base = tokens()
    assert tokens(gpu_memory_utilization=0.5) < base < tokens(enforce_eager=True)
    assert tokens(max_num_batched_tokens=2048) > base > tokens(dtype="float32")
    assert tokens(kv_cache_memory_bytes=GIB) == GIB // 131072 - 64 and tokens(num_gpu_blocks_override=11) == 640
    assert estimate(model, EngineConfig(), int(24 * GIB)).max_num_seqs == 256
    alone, of_two = (estimate(model, EngineConfig(tensor_parallel_size=n), memory).tables_bytes for n in (1, 2))
    assert of_two - alone == 6 * 2048 * 4096 * 2  # where the other's rows arrive
    with pytest.raises(EstimateError, match="more than the model was made for"):
        tokens(max_model_len=200_000)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"hidden_size": None}, "hidden_size"),
     ({"vocab_size": "x"}, "vocab_size"),
     ({"num_key_value_heads": 3}, "num_attention_heads 32 is not a multiple of num_key_value_heads 3"),
     ({"dtype": "float8"}, "float8")],
)  # fmt: skip
def test_models_that_cannot_be_estimated(tmp_path, change, said):
    with pytest.raises(EstimateError, match=said):
        estimate(read(folder_of(tmp_path, {**LLAMA_8B, **change})), EngineConfig(), gpu_bytes("H100", None))


def test_the_families_are_the_workers():
    assert set(BY_HAND) < set(FAMILIES)


def test_windows_and_head_sizes_by_family():
    base = {**QWEN3_06B, "num_hidden_layers": 4}
    del base["head_dim"]
    assert {layer.head_dim for layer in sizes_of(base).layers} == {128}
    mixed = {**base, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert [layer.window for layer in sizes_of(mixed).layers] == [0, 0, 64, 64]
    assert [layer.window for layer in sizes_of({**mixed, "use_sliding_window": False}).layers] == [0] * 4


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": None}])
def test_absent_heads_of_keys_and_values_are_what_a_worker_takes(architecture, changes):
    less = {name: value for name, value in LLAMA_8B.items() if name != "num_key_value_heads"}
    config = {**less, "architectures": [architecture], "num_attention_heads": 64, "head_dim": 128, **changes}
    assert sizes_of(config) == workers_sizes_of(parse_model_config(config))


def test_the_command(tmp_path, capsys):
    folder = folder_of(tmp_path, LLAMA_8B)
    assert cli.main(["estimate", folder, "--gpu", "h200", "--max-model-len", "8K"]) == 0
    out = capsys.readouterr().out
    assert "on h200 (139.8 GiB), bfloat16" in out and "requests of 8,192 tokens fit at once" in out
    assert cli.main(["estimate", folder, "--json", "--gpu-memory", "24GiB", "--hf-overrides.num_hidden_layers=16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total_bytes"] == 24 * GIB and found["kv_bytes_per_token"] == 65536
    assert cli.main(["estimate", folder, "--gpu-memory", "16GB"]) == 1
    assert "It does not fit" in capsys.readouterr().out
    assert cli.main(["estimate", str(tmp_path / "config.json")]) == 1
    assert "give the model's folder" in capsys.readouterr().err
    for words, said in (
        (["x", "--gpu", "abacus"], "known are H100"),
        (["x", "--gpu-memory", "12"], "24GiB"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["estimate", *words])
        assert said in capsys.readouterr().err
    assert cli.main(["estimate", folder, "--gpu", "L4"]) == 0
    assert "not one of 131,072 fits" in capsys.readouterr().out
    assert cli.main(["estimate", "--gpu", "H100"]) == 0  # the bundled model, as elsewhere
    assert "All 1,024 requests of --max-num-seqs fit at once, with 2,048 tokens each" in capsys.readouterr().out
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert cli.main(["estimate", folder]) == 1
    assert "is not a safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "name"),
    [("RTX 4090", "RTX-4090"), ("A100-80GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"), ("nvidia-l4-24gb", "L4"),
     ("a100-40gb", "A100-40GB"), ("L40S", "L40S")],
)  # fmt: skip
def test_names_of_gpus_as_they_may_be_written(written, name):
    assert gpu_bytes(written, None) == int(GPUS[name] * GIB)
    with pytest.raises(ValueError, match="known are"):
        gpu_bytes("H100-40GB", None)


def test_a_model_of_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EstimateError, match="owner/name is no local folder, and the hub cannot be reached"):
        read_model("owner/name", None, str(tmp_path), None, {})


def test_names_of_gpus():
    assert all(gpu_bytes(name.lower().replace("-", " "), None) == int(gib * GIB) for name, gib in GPUS.items())


def test_a_checkpoint_whose_config_lies_elsewhere(tmp_path):
    quantized("llama", "gptq", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model = read(tmp_path / "model")
    assert estimate(model, EngineConfig(), 8 * GIB).weights_bytes == model.stored_bytes > 0


@pytest.mark.parametrize(
    ("skipped", "dtype", "said"),
    [
        (["0"], "auto", "no layer's cache has 8 bits without --kv-cache-dtype fp8"),
        (["sliding_window"], "auto", "no layer's cache has 8 bits without --kv-cache-dtype fp8"),
        (["1", "9"], "fp8", "--kv-cache-dtype-skip-layers 9: .* has layers 0 to 3"),
    ],
)
def test_layers_that_cannot_be_left_out_are_refused_as_by_an_engine(skipped, dtype, said):
    config = EngineConfig(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=skipped)
    with pytest.raises(EstimateError, match=said):
        estimate(read(tiny_model("qwen2-mixed")), config, 8 * GIB)


def test_a_layer_that_is_left_out_counts_on_its_own_stage():
    """By its number in the model, whichever stage has it: the first holds the embedding, and so fewer layers' worth."""
    model = read(tiny_model("qwen2-mixed"))
    model = model._replace(sizes=model.sizes._replace(layers=model.sizes.layers[:1] * 4))

    def of(*skipped):
        config = EngineConfig(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=list(skipped), pipeline_parallel_size=2)
        return estimate(model, config, 8 * GIB).kv_bytes_per_token

    grows = [of(str(i)) > of() for i in range(4)]
    assert grows in ([True, True, False, False], [False, False, True, True])


@pytest.mark.parametrize(
    ("answer", "name", "memory"),
    [("NVIDIA H200, 143771\nNVIDIA H200, 143771\n", "NVIDIA H200", 143771 << 20), ("", "", 0), ("no devices\n", "", 0)],
)
def test_without_a_flag_it_is_for_the_gpu_that_is_here_or_the_cpu(answer, name, memory, tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    asked = argparse.Namespace(device="auto", gpu=None, gpu_memory=None)
    assert machine_of(asked) == (name, memory)
    asked.gpu = "RTX 4060"
    assert machine_of(asked) == ("RTX 4060", int(GPUS["RTX-4060"] * GIB))
    asked.device = "cpu"
    assert machine_of(asked) == ("", 0)


def test_a_model_without_attention_has_states_alone():
    """And so has room for as many requests as rows, of whatever length."""
    folder = str(tiny_model("mamba2"))
    found = estimate(read(folder), EngineConfig(), gpu_bytes("H200", None))
    assert (found.kv_bytes_per_token, found.kv_cache_bytes, found.num_states) == (0, 0, 513)
    assert text_of(found, read(folder), EngineConfig()).endswith("256 requests fit at once, of any length.")
    assert cli.main(["estimate", folder, "--gpu", "h200"]) == 0
    assert cli.main(["estimate", folder, "--gpu-memory", "1GiB"]) == 1


def test_an_encoder_needs_no_cache(capsys):
    assert cli.main(["estimate", "--runner", "pooling", "--gpu", "H100"]) == 0  # the bundled embedder
    text = capsys.readouterr().out
    assert "quire-tiny-embed" in text and "A step computes 16 texts of 512 tokens" in text and "KV cache" not in text
    assert cli.main(["estimate", "--runner", "pooling", "--gpu", "H100", "--json", "--max-num-batched-tokens", "256"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["max_model_len"], found["is_encoder"]) == (1.0, 256, True)
