"""Steps of any size run kernels that were compiled before serving began: to compile one stops every request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers import test_family_configs

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

# Triton is asked what each launch would have to be compiled for. Without attention, whose kernels do not depend on tokens.
PROGRAM = """
import itertools, json, pathlib, sys, types
import hopper_offline
from hopper_offline import KEYS, ints, meta
from step_contexts import context_of
import torch
from quire.kernels.linear import blas
from quire.kernels.triton_support import dependent_launch
from quire.kernels.triton_support import hopper
from quire.kernels.linear import split_linear
from quire.kernels.attention.decode_schedule import DecodeWorkspace, choose_decode_configs
from quire.kernels.triton_support.dependent_launch import mode_for
from quire.kernels.tuning.current import current
from quire.kernels.attention.rope_kv import rope_kv
from quire.kernels.linear import fp8
from quire.workers.layers import linear, ops
from quire.workers.layers.formats import chosen_format, quantized
from quire.workers import graph_sizes
from quire.workers.attention.cuda import CudaLatentAttention, CudaModelAttention, Step
from quire.workers.attention.kv_cache import Place
from quire.workers.devices.cuda import CudaDevice
from quire.workers.expert_load import ExpertLoad
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

folder, max_rows, max_tokens, streams = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
size = int(sys.argv[5])
hopper_offline.look_up_launches()
hopper.available = lambda device: streams
dependent_launch.supported = lambda: True
dependent_launch._max_rows = lambda: 64 if streams else 16
source = pathlib.Path(ops.__file__).read_text()
assert "x.is_cuda" in source
exec(compile(source.replace(".is_cuda", ".is_meta"), ops.__file__, "exec"), ops.__dict__)
blas.prefer = lambda library: None
blas.batched_split_k = lambda x, w, parts: meta(parts, len(x), len(w), dtype=torch.float32)

config = read_model_config(folder)
if config.quantization is not None:
    linear.choose_format = lambda place: chosen_format.quantized_format
    chosen_format.capability_of = lambda device: (9, 0)
    fp8._multiplies_blocks = lambda device: True
    fp8.cublas = lambda x, weight, bias, dtype: meta(len(x.data), len(weight.data), dtype=dtype)
    torch.Tensor.__bool__ = lambda self: False  # of zero points and scales, which have no values here
    torch.equal = lambda a, b: True
with torch.device("meta"):
    buffers, exchange = None, types.SimpleNamespace(all_reduce=lambda x: x)
    if size > 1 and config.model.norm.is_plain:
        from quire.kernels.exchange.all_reduce_norm import Buffers, places_shape
        from quire.workers.group.cuda import PeerNormExchange
        def end(two_shot, most):
            places = meta(*places_shape(size, most, config.hidden_size, two_shot=two_shot), dtype=torch.int16)
            return Buffers(0, size, most, two_shot, places, meta(size, dtype=torch.int64), ints(most), 1)
        ways = [end(way, most) for way, most in enumerate(current().exchange.max_rows(size)) if most]
        buffers = PeerNormExchange(ways)
    expert_parallel = size > 1 and any(layer.experts is not None for layer in config.layers)
    ranks = Parallel(0, size, "meta", exchange, buffers, expert_parallel=expert_parallel)
    if expert_parallel:
        ranks.expert_load, starts = ExpertLoad(size, torch.device("meta")), ints(4096)
    model = build_model(config, torch.bfloat16, ranks)
for module in model.modules():
    if isinstance(module, quantized.QuantizedFormat):
        module.fill_dummy(0.1, torch.Generator())
        module.finish()
spec = config.attention_specs(ranks)[0]
def latent_attention(tokens, rows, mixed):
    places, lines = [Place(0, 0)] * len(config.layers), [meta(9, 1, 64, spec.head_dim)]
    cos_sin = meta(4096, spec.rope.rotary_dim, dtype=torch.float32)
    kind = CudaLatentAttention(spec, types.SimpleNamespace(places=places, k=lines), cos_sin, 4096)
    buffers = types.SimpleNamespace(positions=ints(tokens), slot_mapping=meta(1, tokens, dtype=torch.int64))
    lengths, limit = (ints(rows + 1), ints(rows)), ints(1) if mixed else None
    step = Step(buffers, ints(1, 2048, 128), ints(rows), lengths, True, mixed, limit)
    return lambda layer, qkv, q_norm, k_norm: kind.attend(step, layer, qkv)
if spec.latent_dim:
    choose_decode_configs = lambda *sizes: []
choices = choose_decode_configs(torch.bfloat16, torch.bfloat16, spec.head_dim, spec.num_heads // spec.num_kv_heads)
configs = [(choice, 132 * choice.programs_per_sm) for choice in choices]
workspace = types.SimpleNamespace(num_kv_heads=spec.num_kv_heads, configs=configs)
decode = types.SimpleNamespace(launch=lambda rows: DecodeWorkspace.launch(workspace, rows))
spaces, heads = {"shape": types.SimpleNamespace(launch=lambda rows, has_drafts: decode.launch(rows))}, set()
if spec.latent_dim:
    spaces, heads = {}, {spec.num_heads}
attention = types.SimpleNamespace(workspaces=spaces, _latent_heads=heads)
cache, cos_sin = meta(2, spec.num_kv_heads, 64, spec.head_dim), meta(4096, spec.head_dim, dtype=torch.float32)
logits = meta(max_rows, ranks.vocabulary(config.vocab_size).size)

def met(batch):
    tokens, rows, mixed, *_ = batch
    def attend(layer, qkv, q_norm, k_norm, sinks=None):
        slots = meta(tokens, dtype=torch.int64)
        rope_kv(qkv, ints(tokens), cos_sin, slots, cache, cache, spec.num_heads, q_norm, k_norm, 1e-6, pdl=mode_for(tokens))
        return meta(tokens, spec.q_size)
    if spec.latent_dim:
        attend = latent_attention(tokens, rows, mixed)
    KEYS.clear()
    if expert_parallel:
        ranks.expert_load.begin(starts[rows : rows + 1], ints(1), tokens)
    hidden = model(ints(tokens), context_of(attend, ints(tokens)), ints(rows) if mixed else None)
    model.compute_logits(hidden, logits[:rows])
    return set(KEYS)

sizes = graph_sizes.sizes_to_run(graph_sizes.decode_sizes(min(max_rows, max_tokens)))
decode = [graph_sizes.BatchDescriptor(size, size, False) for size in sizes]
tokens, rows = graph_sizes.mixed_token_sizes(max_tokens), graph_sizes.mixed_row_sizes(max_rows)
device = types.SimpleNamespace(ctx=types.SimpleNamespace(config=config, parallel=ranks))
def specialization(t, r):
    return CudaDevice.kernel_specialization(device, t), CudaModelAttention.kernel_specialization(attention, t, r)

ahead = graph_sizes.mixed_specializations(tokens, rows, specialization)
compiled = set().union(*(met(batch) for batch in ahead + decode))
few = [r for r in (1, 2, 3, 5, 37, max_rows) if r <= max_rows]
eager = [graph_sizes.BatchDescriptor(t, r, True) for t in {max_tokens, max_tokens - 1} for r in few]
late = {name: batch for batch in (*graph_sizes.mixed_batches(tokens, rows), *eager) for name, _ in met(batch) - compiled}
print(json.dumps([len(compiled), len({name for name, _ in compiled}), late]))
"""

SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "odd": {
        "hidden_size": 1032,
        "intermediate_size": 3000,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "6 ranks": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 128,
    },
    "V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}

TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
QUANTIZED = {
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 64},
    "w8a16": {"quant_method": "gptq", "bits": 8, "group_size": -1},
    "fp8": {"quant_method": "fp8"},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": ROWS, "input_activations": TOKENS}},
        "ignore": ["lm_head"],
    },
}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("shape,max_rows,max_tokens", [("0.6B", 256, 8192), ("0.5B", 37, 512)])
@pytest.mark.parametrize("form", QUANTIZED)
def test_no_step_compiles_with_quantized_weights(form, shape, max_rows, max_tokens, streams, tmp_path, monkeypatch):
    compiles_nothing_late({"quantization_config": QUANTIZED[form]}, shape, max_rows, max_tokens, streams, tmp_path, monkeypatch)


@pytest.mark.parametrize("form,size", [("fp8", 2), ("int8", 2), ("int8", 4)])
def test_no_step_compiles_with_quantized_weights_on_several_ranks(form, size, tmp_path, monkeypatch):
    """int8's exact sums come with their scales to the norm that exchanges them."""
    compiles_nothing_late({"quantization_config": QUANTIZED[form]}, "8B", 256, 8192, True, tmp_path, monkeypatch, size)


def test_many_rows_of_few_int8_columns_are_not_in_parts(tmp_path, monkeypatch):
    less = {"hidden_size": 128, "intermediate_size": 2048, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    more = {**less, "quantization_config": QUANTIZED["int8"]}
    compiles_nothing_late(more, "8B", 256, 2048, True, tmp_path, monkeypatch)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    "shape,max_rows,max_tokens,size",
    [
        ("0.6B", 1024, 8192, 1),
        ("0.5B", 37, 512, 1),
        ("8B", 256, 2048, 1),
        ("odd", 5, 64, 1),
        ("30B-A3B", 1024, 8192, 1),
        ("V2-Lite", 256, 8192, 1),
        ("8B", 1024, 8192, 2),
        ("8B", 1024, 8192, 4),
        ("30B-A3B", 256, 2048, 2),
        ("6 ranks", 37, 2100, 6),
        ("8B", 37, 2100, 8),
    ],
)
def test_no_step_compiles_while_serving(shape, max_rows, max_tokens, size, streams, tmp_path, monkeypatch):
    compiles_nothing_late({}, shape, max_rows, max_tokens, streams, tmp_path, monkeypatch, size)


def compiles_nothing_late(more, shape, max_rows, max_tokens, streams, tmp_path, monkeypatch, size=1):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 32_003}
    config |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    check({**config, **SHAPES[shape], **more}, max_rows, max_tokens, streams, tmp_path, monkeypatch, size)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    "name", ["GEMMA2_9B", "COMMAND_R", "PYTHIA", "OLMO2_7B", "GRANITE_33_8B", "FALCON_40B", "BLOOM_560M", "PHI_2"]
)
def test_no_step_of_another_family_compiles_either(name, streams, tmp_path, monkeypatch):
    """Other norms, activations and residuals, scaled embeddings and logits."""
    fields = getattr(test_family_configs, name)
    layers = {"n_layer": 2} if "n_layer" in fields else {"num_hidden_layers": 2}
    more = {"use_qk_norm": True} if name == "COMMAND_R" else {}
    check({**fields, **layers, **more, "vocab_size": 32_003}, 37, 512, streams, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["GEMMA2_9B", "PYTHIA"])
def test_nor_does_one_of_several_ranks_whose_norms_exchange_nothing(name, tmp_path, monkeypatch):
    layers = {"num_hidden_layers": 2, "vocab_size": 32_003}
    check({**getattr(test_family_configs, name), **layers}, 37, 2100, True, tmp_path, monkeypatch, 4)


@pytest.mark.parametrize("streams", [True, False])
def test_no_step_compiles_with_experts_of_4_bits(streams, tmp_path, monkeypatch):
    config = json.loads((Path(__file__).parent / "published" / "gpt-oss-20b" / "config.json").read_text())
    less = {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2], "vocab_size": 32_003}
    check({**config, **less}, 256, 8192, streams, tmp_path, monkeypatch)


def check(config, max_rows, max_tokens, streams, tmp_path, monkeypatch, size=1):
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    arguments = [str(tmp_path), str(max_rows), str(max_tokens), str(streams), str(size)]
    child = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    num_compiled, num_functions, late = json.loads(child.stdout)
    assert late == {} and num_compiled > num_functions > 4
