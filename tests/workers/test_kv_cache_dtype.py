"""KV caches of 8 bits on the CPU: transformers' tokens with keys and values rounded by formula, scales, bytes, refusals."""

import contextlib
import json
import logging
import shutil
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from inline_engine import InlineEngine
from safetensors.torch import load_file, save_file
from tiny_models import reference, tiny_model

from quire.ipc import memory_plan
from quire.ipc.config import EngineConfig
from quire.ipc.sampling import SamplingParams
from quire.kernels.attention import rope_kv_cpu
from quire.workers.attention.kv_cache import KVCache
from quire.workers.layers.kv_scales import warn_of_scales
from quire.workers.loading.weights import load_weights
from quire.workers.memory import sizes_of
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
LAST_BITS = 1e-4  # see tests/support/quantized_models.py: our keys and values are taken where they agree
K_SCALES, V_SCALES = (0.03, 0.011, 0.02, 0.05), (0.002, 0.04, 0.01, 0.03)


def prompt_of(n):
    return torch.randint(4, 500, (n,), generator=torch.Generator().manual_seed(n)).tolist()


def with_scales(name, folder, names=("k_scale", "v_scale"), **config):
    shutil.copytree(tiny_model(name), folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([some[layer]])
        for name, some in zip(names, (K_SCALES, V_SCALES), strict=True)
        for layer in range(fields["num_hidden_layers"])
    }
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")
    return folder


@contextlib.contextmanager
def recorded(layers):
    """Keys and values that go into the cache, float32 [T, Hkv, D] of all steps: layer -> (k, v)."""
    calls, found = [], {}
    convert = rope_kv_cpu.to_eight_bits

    def record(x, *more):
        calls.append(torch.from_numpy(np.array(x)))
        return convert(x, *more)

    with mock.patch.object(rope_kv_cpu, "to_eight_bits", record):
        yield found
    for i, layer in enumerate(layers):
        found[layer] = tuple(torch.cat(calls[2 * i + side :: 2 * len(layers)]) for side in (0, 1))


def reference_logits(name, ids, ours, dtype, scales):
    """Of transformers, whose eager attention sees keys and values rounded in the layers of `ours`."""
    model = reference(name)
    module = sys.modules[type(model).__module__]
    eager = module.eager_attention_forward

    def rounded(x, taken, scale):
        x = x.clone()
        taken = taken.transpose(0, 1)[None]
        torch.testing.assert_close(taken, x, rtol=LAST_BITS, atol=LAST_BITS)
        top = torch.finfo(dtype).max
        return (taken / scale).clamp(-top, top).to(dtype).float() * scale

    def attention(layer, q, k, v, *more, **options):
        if layer.layer_idx in ours:
            (our_k, our_v), (k_scale, v_scale) = ours[layer.layer_idx], scales[layer.layer_idx]
            k, v = rounded(k, our_k, k_scale), rounded(v, our_v, v_scale)
        return eager(layer, q, k, v, *more, **options)

    with mock.patch.object(module, "eager_attention_forward", attention), torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    ("name", "dtype", "skipped", "scaled"),
    [
        ("llama", "fp8", [], True),
        ("qwen2-mixed", "fp8_e4m3", ["sliding_window"], True),
        ("qwen3-tied", "fp8_e5m2", ["1"], False),
        pytest.param("qwen3", "fp8", [], True, marks=pytest.mark.slow),
        pytest.param("llama4-top3", "fp8", [], True, marks=pytest.mark.slow),
        pytest.param("mistral-sliding", "fp8_e4m3", ["0", "2"], False, marks=pytest.mark.slow),
        pytest.param("llama-mqa-bias", "fp8_e5m2", [], True, marks=pytest.mark.slow),
        pytest.param("qwen3-mixed", "fp8", ["0", "sliding_window"], False, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_rounded_keys_and_values(name, dtype, skipped, scaled, tmp_path):
    folder = with_scales(name, tmp_path / "model") if scaled else tiny_model(name)
    engine = InlineEngine(folder, model_options={"kv_cache_dtype": dtype, "kv_cache_dtype_skip_layers": skipped}, budget=16)
    layers = [i for i, spec in enumerate(engine.runner.ctx.cache.specs) if spec.cache_dtype is not None]
    assert layers and (not skipped or len(layers) < len(engine.runner.ctx.cache.specs))
    scales = dict(enumerate(zip(K_SCALES, V_SCALES, strict=True))) if scaled else dict.fromkeys(layers, (1.0, 1.0))
    for n in (1, 40):  # of a prompt in chunks, and of one token
        prompt = prompt_of(n)
        with recorded(layers) as ours:
            [output] = engine.generate([prompt], GREEDY)
        logits = reference_logits(name, [*prompt, *output[:-1]], ours, DTYPES[dtype], scales)[n - 1 :]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (chosen >= logits.max(-1).values - 1e-5).all() and len(set(output)) > 4


def loaded(folder, **model_options):
    model = build_model(read_model_config(folder, **model_options), torch.float32, Parallel())
    load_weights(model, folder, "cpu")
    return model


@pytest.mark.parametrize("form", ["k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale"])
def test_scales_by_their_names(form, tmp_path):
    folder = with_scales("llama", tmp_path / "model", (form, form.replace("k_", "v_")))
    scales = loaded(folder, kv_cache_dtype="fp8").kv_scales()
    assert [scales[i].k for i in range(3)] == pytest.approx(K_SCALES[:3])
    assert [scales[i].v for i in range(3)] == pytest.approx(V_SCALES[:3])
    assert loaded(folder).kv_scales() == {}  # with 16 bits they are passed over


def test_one_scale_for_both_and_none(tmp_path, caplog):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    one = {"model.layers.1.self_attn.kv_scale": torch.tensor(0.5), "model.layers.2.self_attn.k_scale": torch.tensor(-1.0)}
    save_file(load_file(folder / "model.safetensors") | one, folder / "model.safetensors")
    scales = loaded(folder, kv_cache_dtype="fp8").kv_scales()
    assert [(scales[i].k, scales[i].v) for i in range(3)] == [(None, None), (0.5, 0.5), (None, None)]
    cache = KVCache(read_model_config(folder, kv_cache_dtype="fp8").attention_specs(Parallel()), 16, torch.float32, scales)
    assert cache.scales == {0: (1.0, 1.0), 1: (0.5, 0.5), 2: (1.0, 1.0)}
    with caplog.at_level(logging.WARNING):
        warn_of_scales(scales)
    assert "2 of 3 layers" in caplog.text and "1.0" in caplog.text
    caplog.clear()
    warn_of_scales({1: scales[1]})
    assert not caplog.text


def test_a_checkpoint_may_say_that_its_cache_has_8_bits(tmp_path):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": group},
              "ignore": ["re:.*"], "kv_cache_scheme": scheme}  # fmt: skip
    folder = with_scales("llama", tmp_path / "model", quantization_config=config)
    for asked, expected in (("auto", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")):
        layers = read_model_config(folder, kv_cache_dtype=asked).layers
        assert {layer.attention.cache_dtype for layer in layers} == {expected}
    engine = InlineEngine(folder)
    assert engine.runner.ctx.cache.scales[1] == pytest.approx((K_SCALES[1], V_SCALES[1]))
    assert len(engine.generate([prompt_of(5)], GREEDY)[0]) == 32


@pytest.mark.parametrize(
    ("change", "said"),
    [({"num_bits": 4}, "num_bits is 4"), ({"type": "int"}, "type is 'int'"), ({"strategy": "attn_head"}, "strategy"),
     ({"dynamic": True}, "dynamic is True"), ({"symmetric": False}, "symmetric is False")],
)  # fmt: skip
def test_schemes_of_a_cache_that_are_refused(change, said, tmp_path):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, **change}
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": group}}
    fields = json.loads((tiny_model("llama") / "config.json").read_text())
    fields["quantization_config"] = {**config, "kv_cache_scheme": scheme}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelConfigError, match=rf"kv_cache_scheme\.{said}"):
        read_model_config(tmp_path)


def test_layers_that_cannot_be_left_out_are_refused():
    with pytest.raises(ModelConfigError, match="skip-layers 3: the model has layers 0 to 2"):
        read_model_config(tiny_model("llama"), kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["1", "3"])
    with pytest.raises(ModelConfigError, match="skip-layers: no layer's cache has 8 bits without --kv-cache-dtype fp8"):
        read_model_config(tiny_model("llama"), kv_cache_dtype_skip_layers=["1"])
    with pytest.raises(ValueError, match="--kv-cache-dtype-skip-layers takes indices"):
        EngineConfig(kv_cache_dtype_skip_layers=["-1"])


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed", "qwen3-mixed", "gemma4"])
@pytest.mark.parametrize("skipped", [[], ["0"], ["2"], ["sliding_window"]])
def test_a_block_has_the_bytes_of_its_tensors(name, skipped):
    config = read_model_config(tiny_model(name), kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=skipped)
    cache = KVCache(config.attention_specs(Parallel()), 16, torch.bfloat16)
    cache.allocate(3, torch.device("cpu"))
    assert cache.block_bytes == sum(x[0].nbytes for x in (*cache.k, *cache.v))
    assert cache.block_bytes == memory_plan.kv_block_bytes(sizes_of(config), 16, 2)
    for layer, spec in enumerate(cache.specs):
        assert cache.k[cache.places[layer].tensor].dtype == (torch.bfloat16 if spec.cache_dtype is None else DTYPES["fp8"])
    if not skipped:
        plain = KVCache(read_model_config(tiny_model(name)).attention_specs(Parallel()), 16, torch.bfloat16)
        assert 2 * cache.block_bytes == plain.block_bytes
    assert cache.kinds == KVCache(read_model_config(tiny_model(name)).attention_specs(Parallel()), 16, torch.float32).kinds


def test_values_beyond_a_scale_saturate():
    x = np.array([[1000.0, -1000.0, 0.1]], np.float32)
    found = torch.from_numpy(rope_kv_cpu.to_eight_bits(x, torch.float32, torch.float8_e4m3fn, 0.5)).view(torch.float8_e4m3fn)
    assert found.float().tolist() == [[448.0, -448.0, 0.203125]]
