"""Experts as a layer: checkpoints that stack them or not, quantized ones, ranks that hold a part of each."""

import json
import re
import shutil

import msgspec
import pytest
import tiny_models
import tiny_moe
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from step_contexts import context_of
from workers.test_models import PROMPT, DenseAttention
from workers.test_parallel import on_every_rank

from quire.ipc.messages.stats import ExpertTokens
from quire.kernels.experts import routing_reference
from quire.workers.expert_load import ExpertLoad
from quire.workers.layers.experts import Experts, Router
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.models import build
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.shard import Shard

pytestmark = pytest.mark.usefixtures("dequantized")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def changed(name, folder, change, **fields):
    """A copy of a tiny model with other tensors, and other fields of config.json."""
    shutil.copytree(tiny_models.tiny_model(name), folder)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def model_of(folder, parallel=None):
    model = build_model(read_model_config(folder), torch.float32, parallel or Parallel())
    load_weights(model, folder, "cpu", progress=False)
    return model


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, Experts)]


def assert_same_experts(model, other, part=slice(None)):
    """part: which of the other's."""
    for a, b in zip(experts_of(model), experts_of(other), strict=True):
        for one, two in zip(a.weights, b.weights, strict=True):
            assert (one is None) == (two is None) and (one is None or torch.equal(one, two[part]))


def expert_parallel_rank(rank, size):
    return Parallel(rank, size, expert_parallel=True)


def stacked(tensors):
    """As transformers has them in memory."""
    found = dict(tensors)
    for prefix in {key.partition(".experts.")[0] for key in tensors if ".experts.0." in key}:
        names = {"gate_proj": [], "up_proj": [], "down_proj": []}
        while f"{prefix}.experts.{len(names['gate_proj'])}.gate_proj.weight" in tensors:
            for kind, some in names.items():
                some.append(found.pop(f"{prefix}.experts.{len(some)}.{kind}.weight"))
        gate, up, down = (torch.stack(some) for some in names.values())
        found |= {f"{prefix}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.experts.down_proj": down}
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["qwen2-moe", "deepseek-v3"])
def test_stacked_tensors_are_those_of_each_expert(name, size, tmp_path):
    folder = changed(name, tmp_path / "stacked", stacked)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(folder / "model.safetensors"))
    for rank in range(size):
        parallel = Parallel(rank, size)
        assert_same_experts(model_of(folder, parallel), model_of(tiny_models.tiny_model(name), parallel))


@pytest.mark.parametrize("name", ["mixtral", "minimax-m2"])
def test_transformers_5_may_save_its_own_names(name, tmp_path):
    own = tiny_models.tiny_model(name)
    tiny_models.reference(name).save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.gate.weight" in load_file(tmp_path / "model.safetensors")
    assert_same_experts(model_of(tmp_path), model_of(own))
    quantized = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp"]}
    scheme_of = read_model_config(own, {"quantization_config": quantized}).quantization.scheme_of
    found = [scheme_of(f"model.layers.{layer}.block_sparse_moe.experts.0.w1") for layer in (0, 1)]
    assert found[0] is None and found[1] is not None


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_whole_experts_of_every_way_to_store_them(size, tmp_path):
    fp8_config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    fp8_config["modules_to_not_convert"] = [f"model.layers.{i}.self_attn" for i in range(3)] + ["gate", "mlp.gate"]
    folders = [
        tiny_models.tiny_model("qwen3-moe"),
        tiny_models.tiny_model("gpt-oss"),
        changed("qwen3-moe", tmp_path / "stacked", stacked),
        changed("gpt-oss", tmp_path / "mxfp4", as_mxfp4, quantization_config=QUANTIZED),
        changed("qwen3-moe", tmp_path / "fp8", fp8, quantization_config=fp8_config),
    ]
    for folder in folders:
        whole, config, stop = model_of(folder), read_model_config(folder), 0
        for rank in range(size):
            model = build_experts_alone(config, expert_parallel_rank(rank, size), folder)
            held = len(experts_of(model)[0].down)
            assert_same_experts(model, whole, slice(stop, stop + held))
            stop += held
        assert stop == 8


def build_experts_alone(config, parallel, folder):
    """The model of a rank, whose attention is whole: three ranks cannot share four heads."""
    parallel.split = parallel.kv_heads = lambda n: Shard(n, 0, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_check_size", lambda *_: None)
        model = build_model(config, torch.float32, parallel)
    load_weights(model, folder, "cpu", progress=False)
    return model


def test_a_rank_reads_its_own_experts_alone(tmp_path):
    """Those of others need only fit, by the headers of the files."""
    folder, kinds = tiny_models.tiny_model("qwen3-moe"), load_file(tiny_models.tiny_model("qwen3-moe") / "model.safetensors")
    of_experts = sum(t.numel() * 4 for key, t in kinds.items() if ".experts." in key)
    config, loaded = read_model_config(folder), []
    for parallel in (Parallel(), expert_parallel_rank(0, 2), expert_parallel_rank(1, 2)):
        model = build_model(config, torch.float32, parallel)
        loaded.append(load_weights(model, folder, "cpu", progress=False))
    assert loaded[0] - loaded[1] == loaded[0] - loaded[2] == of_experts // 2

    def misshapen(tensors):
        key = "model.layers.1.mlp.experts.7.up_proj.weight"
        return tensors | {key: tensors[key][:3]}

    with pytest.raises(WeightsError, match=r"misshapen: model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight"):
        model_of(changed("qwen3-moe", tmp_path / "misshapen", misshapen), expert_parallel_rank(0, 2))


def test_what_experts_cannot_be_distributed_over_is_refused():
    for parallel in (expert_parallel_rank(0, 1), expert_parallel_rank(0, 2)):
        with pytest.raises(ModelConfigError, match=r"--enable-expert-parallel: the model has no experts"):
            build_model(read_model_config(tiny_models.tiny_model("llama")), torch.float32, parallel)
    config = read_model_config(tiny_models.tiny_model("gpt-oss-plain"))
    with pytest.raises(ModelConfigError, match="its 4 attention heads cannot be split over 8 ranks"):
        build_model(config, torch.float32, expert_parallel_rank(0, 8))
    wide = msgspec.structs.replace(config.layers[0].attention, num_heads=8, num_kv_heads=8)
    layers = tuple(msgspec.structs.replace(layer, attention=wide) for layer in config.layers)
    with pytest.raises(ModelConfigError, match="its 4 experts cannot be split over 8 ranks; 1, 2, 4 would do"):
        build_model(msgspec.structs.replace(config, layers=layers), torch.float32, expert_parallel_rank(0, 8))
    odd = msgspec.structs.replace(config.layers[0].experts, intermediate_size=47)
    layers = tuple(msgspec.structs.replace(layer, experts=odd) for layer in config.layers)
    said = "its moe_intermediate_size 47 cannot be split over 2 ranks; 1 would do, or --enable-expert-parallel"
    with pytest.raises(ModelConfigError, match=said):
        build_model(msgspec.structs.replace(config, layers=layers), torch.float32, Parallel(0, 2))
    assert build_model(msgspec.structs.replace(config, layers=layers), torch.float32, expert_parallel_rank(0, 2)) is not None


def test_tokens_are_counted_by_rank():
    """Of every layer with experts, real rows alone; the busiest of each layer."""
    load = ExpertLoad(2, torch.device("cpu"))
    parallel = expert_parallel_rank(0, 2)
    parallel.expert_load = load
    model = build_model(read_model_config(tiny_models.tiny_model("mixtral-sliding-tied")), torch.float32, parallel)
    dummy_weights(model, 1)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    told = [ExpertTokens([0, 0], 0)]
    for rows, real in ((7, 7), (5, 3)):
        h = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        load.begin(torch.tensor([real], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), rows)
        by_layer = []
        for router in routers:
            ids, _ = routing_reference.route(F.linear(h, router.weight), router.routing)
            by_layer.append([int((ids[:real] < 3).sum()), int((ids[:real] >= 3).sum())])
            router(h)
        told.append(ExpertTokens([sum(some) for some in zip(*by_layer, strict=True)], sum(map(max, by_layer))))
        assert msgspec.msgpack.decode(load.take(), type=ExpertTokens) == told[-1]
    assert msgspec.msgpack.decode(load.take(), type=ExpertTokens) == told[0]
    routers[0](torch.randn(1, 64))  # of a step's last tokens: one row
    assert sum(msgspec.msgpack.decode(load.take(), type=ExpertTokens).by_rank) == 3


def test_an_expert_that_is_missing_is_named(tmp_path):
    def without_one(tensors):
        return {key: tensor for key, tensor in tensors.items() if ".1.mlp.experts.3.up_proj" not in key}

    folder = changed("qwen3-moe", tmp_path / "missing", without_one)
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        model_of(folder)


def mxfp4(weight):
    """Weights [..., K] as (blocks [..., K / 32, 16], scales [..., K / 32], what they stand for)."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    q = groups / 2.0 ** exponent[..., None]
    codes = (q.abs()[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[codes] * q.sign() * 2.0 ** exponent[..., None]
    codes = codes + 8 * (q < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8), values.flatten(-2)


def as_mxfp4(tensors, *, plain=False):
    """gpt-oss' experts, [E, in, out] in memory; plain: what the quantized ones stand for."""
    found = dict(tensors)
    for key in tensors:
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, values = mxfp4(found.pop(key).transpose(1, 2))
            if plain:
                found[key] = values.transpose(1, 2)
            else:
                found |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    return found


QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


@pytest.mark.parametrize("size", [1, 2])
def test_mxfp4_experts_are_dequantized_while_they_are_loaded(size, tmp_path):
    packed = changed("gpt-oss", tmp_path / "mxfp4", as_mxfp4, quantization_config=QUANTIZED)
    plain = changed("gpt-oss", tmp_path / "plain", lambda tensors: as_mxfp4(tensors, plain=True))
    for rank in range(size):
        parallel = Parallel(rank, size)
        assert_same_experts(model_of(packed, parallel), model_of(plain, parallel))
    assert not torch.equal(experts_of(model_of(plain))[0].down, experts_of(model_of(tiny_models.tiny_model("gpt-oss")))[0].down)


def fp8(tensors, *, plain=False):
    """Blocks of 32 by 16 of every expert's layers."""
    found = dict(tensors)
    for key in tensors:
        if ".experts." in key:
            w = found.pop(key)
            grid = w.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2)
            scale = grid.abs().amax((2, 3)) / 448
            q = (grid / scale[:, :, None, None]).to(torch.float8_e4m3fn)
            values = q.float() * scale[:, :, None, None]
            q, values = (x.transpose(1, 2).flatten(2, 3).flatten(0, 1) for x in (q, values))
            found |= {key: values} if plain else {key: q, f"{key}_scale_inv": scale}
    return found


def test_experts_quantized_one_by_one_are_dequantized(tmp_path):
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["self_attn", "gate", "mlp.gate"]}
    config["modules_to_not_convert"] = [f"model.layers.{i}.self_attn" for i in range(3)]
    packed = changed("qwen3-moe", tmp_path / "fp8", fp8, quantization_config=config)
    plain = changed("qwen3-moe", tmp_path / "plain", lambda tensors: fp8(tensors, plain=True))
    for parallel in (Parallel(), Parallel(1, 2)):
        assert_same_experts(model_of(packed, parallel), model_of(plain, parallel))


def test_rules_may_leave_some_of_the_experts_layers_out(tmp_path):
    left_out = r"model\.layers\.\d+\.(self_attn|mlp\.gate$|mlp\.experts\.\d+\.down_proj|mlp\.experts\.0\.)"
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": [left_out]}

    def some(tensors, *, plain=False):
        some = {key: tensor for key, tensor in tensors.items() if not re.match(left_out, key)}
        return {key: tensor for key, tensor in tensors.items() if key not in some} | fp8(some, plain=plain)

    packed = changed("qwen3-moe", tmp_path / "fp8", some, quantization_config=config)
    plain = changed("qwen3-moe", tmp_path / "plain", lambda tensors: some(tensors, plain=True))
    for parallel in (Parallel(), Parallel(1, 2), expert_parallel_rank(1, 2)):
        assert_same_experts(model_of(packed, parallel), model_of(plain, parallel))


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("name", ["gpt-oss", "llama4", "gemma4-moe", "mistral4"])
def test_experts_of_floats_in_one_tensor_are_rounded_while_they_are_loaded(name, rank, tmp_path):
    """Each output by its own scale, in whichever order the tensor has inputs, outputs, gates and ups."""

    def rounded(tensors):
        found = dict(tensors)
        for key in tensors:
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                inputs = 1 if name in ("gpt-oss", "llama4") else 2
                scale = tensors[key].abs().amax(inputs, keepdim=True) / 127
                found[key] = (tensors[key] / scale).round() * scale
        return found

    parallel = Parallel() if rank is None else Parallel(rank, 2)
    config = read_model_config(tiny_models.tiny_model(name), quantization="int8_per_channel_weight_only")
    ours = build_model(config, torch.float32, parallel)
    load_weights(ours, tiny_models.tiny_model(name), "cpu", progress=False)
    assert_same_experts(ours, model_of(changed(name, tmp_path / "rounded", rounded), parallel))


def test_stacked_experts_of_another_format_are_refused(tmp_path):
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}

    def small(tensors):
        return {name: t.to(torch.float8_e4m3fn) if "experts" in name and t.dim() == 3 else t for name, t in tensors.items()}

    folder = changed("gpt-oss", tmp_path / "fp8", small, quantization_config=config)
    with pytest.raises(ModelConfigError, match=r"gate_up_proj holds all experts: only mxfp4 is supported there"):
        build_model(read_model_config(folder), torch.float32, Parallel())


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", tiny_moe.FIRST)
def test_the_ranks_together_are_the_whole_model(name, expert_parallel):
    """Parts of each expert, or whole ones, and parts of shared ones, summed once; biases that are added once."""
    folder = tiny_models.tiny_model(name)
    config = read_model_config(folder)

    def logits(parallel):
        model = model_of(folder, parallel)
        with torch.inference_mode():
            return model.compute_logits(
                model(PROMPT, context_of(DenseAttention(config.attention_specs(parallel)), torch.arange(len(PROMPT))))
            )

    [alone], _ = on_every_rank(1, logits)
    parts, group = on_every_rank(2, logits, expert_parallel=expert_parallel)
    assert torch.equal(*parts)
    torch.testing.assert_close(parts[0], alone, atol=2e-4, rtol=1e-4)
    of_norms = 2 if name in ("minimax-m2", "olmoe") else 0
    beside = 1 if name == "gemma4-moe" else 0  # experts beside the MLP
    assert group.sums == (2 + of_norms + beside) * len(config.layers)


def test_dummy_weights_choose_many_experts():
    config = read_model_config(tiny_models.tiny_model("deepseek-v3"))
    model = build_model(config, torch.float32, Parallel())
    dummy_weights(model, 1)
    ids, weights = model.model.layers[1].mlp.gate(torch.randn(200, config.hidden_size))
    assert len(ids.unique()) == 8 and torch.isfinite(weights).all()
    assert all(w.std() > 0 for module in experts_of(model) for w in module.weights if w is not None)


def test_a_cache_of_eight_bits_is_refused_for_latents():
    with pytest.raises(ModelConfigError, match="--kv-cache-dtype fp8: of latent attention"):
        read_model_config(tiny_models.tiny_model("deepseek-v3"), kv_cache_dtype="fp8")
