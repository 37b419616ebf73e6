"""Formats that keep a quantized weight (workers/layers/formats), in Triton's interpreter: their products against those of the
dequantized weights, layer by layer and token for token.

Inputs of fp8 products are quantized by the reference here, for the interpreter's cast to e4m3 loses the carry of a rounding;
test_quantize.py has the kernels that do it on a GPU.
"""

import json
import threading

import pytest
import torch
from inline_engine import InlineEngine
from kept_weights import keep_quantized, linears, values
from quantized_models import FORMATS, GPU_FORMATS, WHILE_LOADING, quantized
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

from quire.ipc.sampling import SamplingParams
from quire.kernels.elementwise import activation_cpu, norm_reference
from quire.kernels.linear import int4 as int4_kernels
from quire.kernels.linear import quantize
from quire.workers.layers import linear
from quire.workers.layers.formats import chosen_format, int4
from quire.workers.layers.formats.dense import Dense
from quire.workers.layers.formats.format import WeightShard
from quire.workers.layers.formats.quantized import QuantizedFormat, SideBySide
from quire.workers.layers.formats.scaled import ScaledFormat
from quire.workers.layers.formats.w8a16 import W8A16
from quire.workers.layers.norm import RMSNorm
from quire.workers.loading.quantized import packing
from quire.workers.loading.quantized.packing import ScaledPacking
from quire.workers.loading.quantized.packing_words import PackQuantizedPacking
from quire.workers.loading.quantized.schemes import Activations, PackQuantized, Scaled
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.shard import Shard, whole

STORED = ["gptq", "awq", "auto-round", "w8a8", "fp8-tensor", "bnb-int8", "mxfp4", *GPU_FORMATS]
KEPT = [*STORED, *WHILE_LOADING]
PLAIN = ["gptq-v2-8bit", "pack-quantized", "pack-quantized-order", "fp8-block", "w8a8-static", "nf4"]
SEVERAL = ["mixed", "gptq-head"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def by_reference(x, dtype, *, pdl=0, **how):
    return quantize.quantize_reference(x, dtype, **how)


def norm_by_reference(x, residual, weight, eps, dtype, *, pdl=0, **how):
    if x is not None:
        residual += x
    return quantize.quantize_reference(norm_reference.rms_norm(residual, weight, eps), dtype, **how)


def silu_by_reference(gate_up, dtype, *, pdl=0, **how):
    return quantize.quantize_reference(activation_cpu.silu_mul(gate_up), dtype, **how)


@pytest.fixture
def on_gpu(monkeypatch):
    """Models are built as on a GPU, of float32 on a CPU."""
    keep_quantized(monkeypatch)
    monkeypatch.setattr(int4_kernels, "choose", lambda rows, n, words: int4_kernels.Config(64, 16, 4))  # few programs are quick
    monkeypatch.setattr(quantize, "quantize", by_reference)
    monkeypatch.setattr(quantize, "rms_norm_quantize", norm_by_reference)
    monkeypatch.setattr(quantize, "silu_mul_quantize", silu_by_reference)


def built(folder, form="", monkeypatch=None, dtype=torch.float32):
    """The model of a folder; with monkeypatch, its weights dequantized."""
    config = read_model_config(folder, quantization=form if form in WHILE_LOADING else None)
    if monkeypatch is None:
        model = build_model(config, dtype, Parallel())
    else:
        with monkeypatch.context() as plain:
            plain.setattr(linear, "choose_format", lambda place: Dense)
            model = build_model(config, dtype, Parallel())
    load_weights(model, folder, "cpu", progress=False)
    return model


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


# One row of 4 bits takes the interpreter half a minute, and one kernel multiplies them all: here "int4" alone stands for them.
ONE_KERNEL = ("auto-round", "awq", "pack-quantized-symmetric")
ROWS_AND_FORMS = [
    pytest.param(rows, form, marks=[pytest.mark.slow] * (rows == 1 and form in ONE_KERNEL)) for form in KEPT for rows in (1, 5)
]


@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "form"), ROWS_AND_FORMS)
def test_products_are_those_of_the_dequantized_weights(form, rows, tmp_path, on_gpu, monkeypatch):
    quantized("llama-mqa-bias", form, tmp_path / "model")
    ours, plain = built(tmp_path / "model", form), built(tmp_path / "model", form, monkeypatch)
    norm = RMSNorm(64, 1e-5, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rows)  # in which no input lies on a rounding's edge
    norm.weight.data.uniform_(0.5, 1.5, generator=generator)
    for name, theirs in list(linears(plain).items())[:4]:
        layer = linears(ours)[name]
        assert isinstance(layer.format, QuantizedFormat), name
        k = theirs.format.shard.columns.size
        x, residual = (torch.randn(rows, k, generator=generator) for _ in range(2))
        out = torch.empty(rows, theirs.format.shard.shape[0])
        close(layer(x), theirs(x))
        assert layer(x, out) is out
        close(out, theirs(x))
        close(layer.split_k(x), theirs(x))
        if "gate_up" in name:
            close(layer.gated(x), theirs.gated(x))
        if "down" in name:
            gate_up = torch.randn(rows, 2 * k, generator=generator)
            close(layer.behind_silu(gate_up), theirs.behind_silu(gate_up))
        if k == 64:
            for first in (None, x):
                for is_gated in {False, "gate_up" in name}:
                    got, total = layer.normed(first, residual.clone(), norm, is_gated)
                    want, want_total = theirs.normed(first, residual.clone(), norm, is_gated)
                    close(got, want)
                    assert torch.equal(total, want_total)


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["w8a8", "gptq"])
def test_one_row_of_16_bits_is_one_kernel_with_what_is_before(form, tmp_path, on_gpu, monkeypatch):
    """Inputs to 8 bits, or the norm of them, within the product."""
    quantized("llama-mqa-bias", form, tmp_path / "model")
    ours = built(tmp_path / "model", form, dtype=torch.bfloat16)
    plain = built(tmp_path / "model", form, monkeypatch)
    for name in ("quantize", "rms_norm_quantize", "silu_mul_quantize") if form == "w8a8" else ():
        monkeypatch.setattr(quantize, name, None)
    norm, plain_norm = (RMSNorm(64, 1e-5, dtype, torch.device("cpu")) for dtype in (torch.bfloat16, torch.float32))
    g = torch.Generator().manual_seed(0)
    norm.weight.data.uniform_(0.5, 1.5, generator=g)
    plain_norm.weight.data.copy_(norm.weight)
    qkv, o, _, down = list(linears(ours).values())[:4]
    qkv_plain, o_plain, _, down_plain = list(linears(plain).values())[:4]
    x, residual, inner = (torch.randn(1, n, generator=g).bfloat16() for n in (64, 64, 2 * down.format.shard.columns.size))
    near = {"rtol": 0.05, "atol": 0.1}  # an input that bfloat16 rounds to another of 8 bits
    if form == "w8a8":
        torch.testing.assert_close(o.split_k(x).float(), o_plain(x.float()), **near)
        torch.testing.assert_close(o(x).float(), o_plain(x.float()), **near)
        torch.testing.assert_close(down.behind_silu(inner).float(), down_plain.behind_silu(inner.float()), **near)
    for first in (None, x):
        got, total = qkv.normed(first, residual.clone(), norm)
        added = residual if first is None else residual + first
        want, _ = qkv_plain.normed(None, added.float(), plain_norm)
        torch.testing.assert_close(got.float(), want, **near)
        torch.testing.assert_close(total, added, rtol=0.01, atol=0)  # the interpreter cuts bits of bfloat16 off


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "gptq"), ("llama", "gptq-head"), ("qwen3", "awq"), ("qwen2-tied", "w8a8")]
    + [("gpt-neox", "gptq"), ("gemma2", "w8a8"), ("phi3", "awq"), ("olmo2", "gptq")],
)
def test_tokens_are_those_of_transformers(family, form, tmp_path, on_gpu):
    model = quantized(family, form, tmp_path / "model")
    prompts = [[5, 80, 300], list(range(10, 30))]
    for prompt, output in zip(prompts, InlineEngine(tmp_path / "model").generate(prompts, GREEDY), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (chosen >= logits.max(-1).values - (0.05 if form == "w8a8" else 1e-4)).all()


# ----------------------------------------------------------------------------------------------- what is held, and how
def changed(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", PLAIN)
def test_what_no_kernel_takes_is_dequantized_and_says_why(form, tmp_path, on_gpu, caplog):
    model = quantized("llama", form, tmp_path / "model")
    with caplog.at_level("WARNING"):
        ours = built(tmp_path / "model")
    assert all(isinstance(layer.format, Dense) for layer in linears(ours).values())
    down, want = ours.model.layers[1].mlp.down_proj.format.weight, model.model.layers[1].mlp.down_proj.weight
    assert torch.equal(down, want)
    [line] = [record.getMessage() for record in caplog.records]
    assert "21 layers" in line and "model.layers.0.self_attn.q_proj" in line and "kernels take" in line, line


def test_orders_are_shared_and_where_they_are_not_layers_are_multiplied_apart(tmp_path, on_gpu):
    quantized("llama", "gptq", tmp_path / "model")
    assert [len(layer.format.weights) for layer in linears(built(tmp_path / "model")).values()] == [1] * 12
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    first, *others = linears(built(tmp_path / "model")).values()
    assert len(first.format.weights) == 3 and all(len(layer.format.weights) == 1 for layer in others)


def test_static_scales_that_differ_are_products_of_their_own(tmp_path, on_gpu):
    quantized("llama", "fp8-tensor", tmp_path / "model")  # q, k and v differ, gate and up do, too
    formats = [layer.format for layer in linears(built(tmp_path / "model")).values()]
    assert [len(form.weights) for form in formats] == [3, 1, 2, 1] * 3
    assert all(weight.scales.shape == (len(weight.data), 1) for form in formats for weight, _ in form.weights)


def test_layers_in_different_formats_lie_side_by_side(tmp_path, on_gpu):
    quantized("llama", "gptq", tmp_path / "model")
    changed(tmp_path / "model", dynamic={r"+:.*\.v_proj": {"bits": 8}, r"-:.*\.up_proj": {}})
    model = build_model(read_model_config(tmp_path / "model"), torch.float32, Parallel())
    qkv, _, gate_up, _ = list(linears(model).values())[:4]
    assert isinstance(qkv.format, SideBySide) and isinstance(gate_up.format, SideBySide)
    assert [type(form).__name__ for form in qkv.format.formats] == ["Int4", "W8A16"]
    assert [type(form).__name__ for form in gate_up.format.formats] == ["Int4", "Dense"]
    names = {name for name, _ in gate_up.format.formats[1].loaders("model.layers.0.mlp.gate_up_proj.format.formats.1")}
    assert names == {"model.layers.0.mlp.up_proj.weight"}
    dummy_weights(model, 0)
    x = torch.randn(2, 64)
    assert gate_up.format.formats[1].product(x).shape == (2, 128)


@pytest.mark.interpret
def test_a_product_of_layers_side_by_side(tmp_path, on_gpu, monkeypatch):
    quantized("llama", "gptq", tmp_path / "model")
    changed(tmp_path / "model", dynamic={r"-:.*\.v_proj": {}})
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name in [name for name in tensors if ".v_proj." in name]:
        del tensors[name]
    tensors.update({f"model.layers.{i}.self_attn.v_proj.weight": torch.randn(32, 64) for i in range(3)})
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    ours, plain = built(tmp_path / "model"), built(tmp_path / "model", "", monkeypatch)
    for layer, theirs in zip(list(linears(ours).values())[:2], list(linears(plain).values())[:2], strict=True):
        x = torch.randn(3, 64)
        close(layer(x), theirs(x))
    assert isinstance(ours.model.layers[0].self_attn.qkv_proj.format, SideBySide)


@pytest.mark.parametrize("form", STORED)
def test_dummy_weights_are_integers_from_the_start(form, tmp_path, on_gpu, monkeypatch):
    quantized("llama", form, tmp_path / "model")
    loaded = built(tmp_path / "model")
    model = build_model(read_model_config(tmp_path / "model"), torch.float32, Parallel())
    largest = []
    monkeypatch.setattr(torch.Tensor, "uniform_", watched(torch.Tensor.uniform_, largest))
    dummy_weights(model, 0)
    ours, theirs = ({name: p.dtype for name, p in m.named_parameters() if "mlp" in name} for m in (model, loaded))
    assert set(ours) <= set(theirs) and any(d not in (torch.float32, torch.bfloat16) for d in ours.values())
    if not form.startswith("fp8"):
        assert max(largest) <= 512 * 64  # embedding and head
    values = {name: p for name, p in model.named_parameters() if "data" in name}
    assert all(torch.isfinite(p.float()).all() for p in values.values())


def watched(uniform, seen):
    def call(self, *args, **how):
        seen.append(self.numel())
        return uniform(self, *args, **how)

    return call


@pytest.mark.parametrize("form", ["awq", "w8a8", "fp8-block-128", "bnb-int8", "pack-quantized-symmetric"])
def test_ranks_hold_their_parts(form, tmp_path, on_gpu):
    quantized("llama", form, tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    whole = built(tmp_path / "model")
    parts = [build_model(config, torch.float32, Parallel(rank, 2)) for rank in range(2)]
    for part in parts:
        load_weights(part, tmp_path / "model", "cpu", progress=False)
    for name in ("down_proj", "gate_up_proj"):
        got = [values(getattr(part.model.layers[1].mlp, name)) for part in parts]
        want = values(getattr(whole.model.layers[1].mlp, name))
        if name == "down_proj":
            assert torch.equal(torch.cat(got, 1), want)
        else:
            halves = [torch.cat(x) for x in zip(*(g.chunk(2) for g in got), strict=True)]
            assert torch.equal(torch.cat(halves), want)


def test_few_rows_are_gated_by_their_product(tmp_path, on_gpu):
    """One row of little by the product behind; so many that cuBLAS multiplies them, with their 8 bits."""
    quantized("llama", "w8a8", tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    model = build_model(config, torch.bfloat16, Parallel())
    load_weights(model, tmp_path / "model", "cpu", progress=False)
    assert [model.model.layers[0].mlp.down_proj.fuses_silu(rows) for rows in (1, 2, 64, 65)] == [True, False, False, True]


def test_an_order_across_ranks_is_dequantized(tmp_path, on_gpu):
    quantized("llama", "gptq", tmp_path / "model")
    model = build_model(read_model_config(tmp_path / "model"), torch.float32, Parallel(1, 2))
    kinds = [type(layer.format).__name__ for layer in linears(model).values()]
    assert kinds == ["Int4", "Dense", "Int4", "Dense"] * 3
    load_weights(model, tmp_path / "model", "cpu", progress=False)


def test_zero_points_of_what_is_called_symmetric_are_refused(tmp_path, on_gpu):
    quantized("llama", "w8a8", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[f"{name}_zero_point"] = torch.zeros(64, 1, dtype=torch.int8)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    built(tmp_path / "model")
    tensors[f"{name}_zero_point"][3] = 1
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"^model\.layers\.0\.mlp\.down_proj: zero points"):
        built(tmp_path / "model")


def test_what_cannot_be_unpacked_names_its_layer_once(tmp_path, on_gpu):
    quantized("llama", "gptq", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.g_idx"][0] = 1
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"^model\.layers\.1\.self_attn\.k_proj cannot be unpacked: g_idx"):
        built(tmp_path / "model")


def test_gpus_without_fp8_take_integers_alone(tmp_path, on_gpu, monkeypatch, caplog):
    monkeypatch.setattr(chosen_format, "capability_of", lambda device: (8, 6))
    for form in ("fp8-row", "fp8-weight-only", "w8a8", "bnb-int8", "awq"):
        quantized("llama", form, tmp_path / form)
        with caplog.at_level("WARNING"):
            kinds = {type(layer.format) for layer in linears(built(tmp_path / form)).values()}
        assert (kinds == {Dense}) == form.startswith("fp8") == ("8.9" in caplog.text)
        caplog.clear()


def test_scales_of_whole_layers_are_stacked():
    """q, k and v with a scale each, of 16-bit inputs."""
    kinds = {
        chosen_format.choose(ScaledPacking(Scaled(dtype="int8", block=(0, 0)), n, 64), whole(64), (9, 0)) for n in (64, 32)
    }
    assert kinds == {chosen_format.ChosenFormat(W8A16, ("int8", 64))}


@pytest.mark.parametrize(("size", "by_block"), [(128, True), (256, False)])
def test_groups_of_inputs_that_are_all_of_a_ranks(size, by_block):
    scheme = Scaled(dtype="int8", block=(1, size), activations=Activations(dtype="int8", group_size=size))
    packing = ScaledPacking(scheme, 16, 512)
    shard = WeightShard(Shard(512, 256, 512), {"down_proj": whole(16)}, True, {"down_proj": packing})
    assert chosen_format.choose(packing, shard.columns, (9, 0)).kind is ScaledFormat
    assert ScaledFormat(shard, False, torch.bfloat16, torch.device("cpu")).by_block == by_block


# ------------------------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("form", ["gptq", "awq", "auto-round", "pack-quantized-symmetric", "gptq-8bit", "int4"])
def test_readers_unpack_some_outputs_at_a_time(form, tmp_path, on_gpu, monkeypatch):
    """As much memory as a chunk takes, as many of them as there are readers."""
    quantized("llama-mqa-bias", form, tmp_path / "model")
    want = {name: p.clone() for name, p in built(tmp_path / "model", form).named_parameters()}
    monkeypatch.setattr(packing, "CPU_STRETCH", 64 * 64)
    seen = []
    for kind in (int4.Int4, W8A16):
        monkeypatch.setattr(kind, "_weight_of", watched_unpacking(kind._weight_of, seen))
    got = built(tmp_path / "model", form)
    assert all(torch.equal(p, want[name]) for name, p in got.named_parameters()) and len(want) == len(list(got.parameters()))
    assert all(thread.startswith("weights") for _, thread in seen)
    assert form == "int4" or max(size for size, _ in seen) <= 64 * 128 < max(p.numel() for p in got.parameters())


def watched_unpacking(unpack, seen):
    def call(self, quantized, stored):
        seen.append((quantized.q.numel(), threading.current_thread().name))
        return unpack(self, quantized, stored)

    return call


def test_a_ranks_outputs_may_begin_within_a_word(tmp_path, on_gpu, monkeypatch):
    monkeypatch.setattr(packing, "CPU_STRETCH", 64 * 64)
    quantized("llama", "pack-quantized-symmetric", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    stored = {name: tensors[f"{layer}.{name}"] for name in ("weight_packed", "weight_scale")}
    made = PackQuantizedPacking(PackQuantized(bits=4, group_size=64), layer, 128, 64)
    plain = made.unpacked(stored)
    for rows in (slice(0, 128), slice(3, 101), slice(64, 128), slice(60, 61)):
        parts = list(made.chunks(stored, rows, slice(0, 64)))
        assert torch.equal(torch.cat([p.q for p in parts]), plain.q[rows])
        assert torch.equal(torch.cat([p.scales for p in parts]), plain.scales[rows])


def test_forms_that_kernels_take_are_said_of_every_format():
    assert {*STORED, *PLAIN, *SEVERAL} == {*FORMATS, *GPU_FORMATS}
