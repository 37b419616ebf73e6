"""Quantized layers that stay in few bits on a CPU: products are the dequantized weights', within the format's tolerance."""

import json
import shutil
from types import MappingProxyType

import pytest
import torch
from inline_engine import InlineEngine
from quantized_models import FORMATS, GPU_FORMATS, WHILE_LOADING, quantized
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from step_contexts import context_of
from tiny_models import tiny_model
from workers.test_experts import QUANTIZED, as_mxfp4, changed, expert_parallel_rank
from workers.test_models import PROMPT, DenseAttention
from workers.test_parallel import on_every_rank

from quire.ipc.kept_bytes import kept_bytes
from quire.ipc.sampling import SamplingParams
from quire.kernels.linear import int4_cpu
from quire.workers.layers.experts import Experts
from quire.workers.layers.formats import chosen_cpu
from quire.workers.layers.formats.kept_cpu import KeptCpu, in_blocks
from quire.workers.layers.formats.packed_cpu import PackedCpu
from quire.workers.layers.formats.short_cpu import ShortCpu
from quire.workers.layers.linear import Linear
from quire.workers.loading.mapped import forget
from quire.workers.loading.quantized.packing import QuantizedWeight
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

pytestmark = pytest.mark.skipif(not int4_cpu.can_pack(), reason="needs AVX2")
EVERY = FORMATS | WHILE_LOADING | GPU_FORMATS
ROUGH = 0.05  # of a layer's outputs, by their standard deviation: bfloat16 inputs, scales and results
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def _same_numbers():
    """Of inputs, so that the largest error is the same in each run."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a Llama in a format, which is made once, and not changed."""
    root = tmp_path_factory.mktemp("kept")

    def of(form):
        if not (folder := root / form).exists():
            quantized("llama", form, folder)
        return folder

    return of


def load(folder, form=None, parallel=None, dtype=torch.float32):
    options = {"quantization": form} if form in WHILE_LOADING else {}
    model = build_model(read_model_config(folder, **options), dtype, parallel or Parallel())
    load_weights(model, folder, "cpu", progress=False)
    return model


def plain(monkeypatch, *arguments, **named):
    """The same model, dequantized."""
    with monkeypatch.context() as patched:
        patched.setattr(chosen_cpu, "DTYPES", ())
        return load(*arguments, **named)


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def kept(module):
    parts = getattr(module.format, "formats", [module.format])
    return any(isinstance(part, KeptCpu) for part in parts)


def assert_alike(got, want, tolerance=ROUGH):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got.float() - want.float()).abs().max() <= tolerance * want.float().std(), (got - want).abs().max() / want.std()


# --------------------------------------------------------------------------------------------------------------- layers
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", EVERY)
def test_each_layer_multiplies_as_its_dequantized_self(form, ranks, checkpoint, monkeypatch):
    folder = checkpoint(form)
    last = Parallel(ranks - 1, ranks)
    ours = load(folder, form, last)
    theirs = linears(plain(monkeypatch, folder, form, parallel=last))
    assert any(map(kept, linears(ours).values())) and not any(map(kept, theirs.values()))
    of_first_layer = {name: layer for name, layer in linears(ours).items() if ".1." not in name}
    for name, layer in of_first_layer.items():
        columns = getattr(layer.format, "formats", [layer.format])[0].shard.columns.size
        for rows in (1, 3, int4_cpu.MANY_ROWS + 1):
            x = torch.randn(rows, columns)
            got, want = (one.format.wrapped().product(x) for one in (layer, theirs[name]))
            assert_alike(got, want)


@pytest.mark.parametrize("form", ["gptq", "w8a8", "nf4", "fp8-block", "bnb-int8", "mxfp4", "gptq-v2-8bit"])
def test_activations_of_16_bits(form, checkpoint, monkeypatch):
    folder = checkpoint(form)
    ours, theirs = load(folder, dtype=torch.bfloat16), plain(monkeypatch, folder, dtype=torch.bfloat16)
    for name, layer in linears(ours).items():
        x = torch.randn(3, layer.format.shard.columns.size).bfloat16()
        assert_alike(layer(x), linears(theirs)[name](x))
    assert len(InlineEngine(folder, dtype=torch.bfloat16).generate([[5, 6, 7]], GREEDY)[0]) == 8


@pytest.mark.parametrize(
    ("n", "k", "width"),
    [(40, 64, 32), (130, 96, 16), (64, 100, 48), (64, 256, 300), (200, 72, 8), (128, 512, 512), (1, 64, 64)],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_of_odd_shapes_groups_and_orders(n, k, width, bits, monkeypatch):
    generator, groups = torch.Generator().manual_seed(n + k), -(-k // width)
    most = 1 << bits
    q = torch.randint(0, most, (n, k), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, most, (n, groups), dtype=torch.int32, generator=generator)
    scales = torch.rand(n, groups, generator=generator) + 0.5
    w = (q.float() - zeros.float().repeat_interleave(width, 1)[:, :k]) * scales.repeat_interleave(width, 1)[:, :k]
    order = torch.randperm(k, generator=generator)
    for one, values in ((None, w), (order, torch.empty_like(w).index_copy_(1, order, w))):
        weight = (int4_cpu.pack if bits == 4 else int4_cpu.pack8)(q, zeros, scales, width, one)
        with monkeypatch.context() as patched:  # torch packs the same
            patched.setattr(int4_cpu, "_is_known_layout", lambda: False)
            torchs = (int4_cpu.pack if bits == 4 else int4_cpu.pack8)(q, zeros, scales, width, one)
        assert all(torch.equal(ours.words, theirs.words) for ours, theirs in zip(weight.planes, torchs.planes, strict=True))
        x = torch.randn(int4_cpu.MANY_ROWS + 1, k, generator=generator)
        want = x @ values.t()
        for rows in (1, 2, int4_cpu.MANY_ROWS + 1):
            got = int4_cpu.int4_linear(x[:rows], weight)
            assert (got - want[:rows]).abs().max() <= 0.06 * want.std()
        few = int4_cpu.int4_linear(x[:5], weight)
        assert torch.equal(few[:1], int4_cpu.int4_linear(x[:1], weight))  # a row does not depend on those beside it


def test_chunks_are_joined_to_whole_blocks():
    q = torch.arange(205, dtype=torch.uint8)[:, None].expand(-1, 32)
    chunks = [QuantizedWeight(part, torch.ones(len(part), 1), (1, 32)) for part in q.split([40, 88, 64, 8, 5])]
    blocks = list(in_blocks(iter(chunks)))
    assert [len(block.q) for block in blocks] == [128, 64, 13] == [len(block.scales) for block in blocks]
    assert torch.equal(torch.cat([block.q for block in blocks]), q)


def test_bytes_are_those_that_are_said(checkpoint):
    """Before weights are loaded, and after; without the rest of a table or an order."""
    for form in ("gptq", "w8a8", "nf4", "fp8-block", "bnb-int8", "mxfp4", "int4"):
        folder, options = checkpoint(form), {"quantization": form} if form in WHILE_LOADING else {}
        before = build_model(read_model_config(folder, **options), torch.float32, Parallel()).weights_bytes
        after = (model := load(folder, form)).weights_bytes
        twice = sum(m.format.packed.nbytes for m in model.modules() if isinstance(getattr(m, "format", None), PackedCpu))
        assert abs(after - twice - before) < 0.25 * before, (form, before, after)


def test_bytes_of_an_eight_billion_layer():
    assert kept_bytes("uint4", 4096, 4096, (1, 128)) == 4096 * 2048 + 4 * 4096 * 32
    assert kept_bytes("uint8", 4096, 4096, (1, 4096)) == 4096 * 4096 + 8 * 4096 * 16
    assert kept_bytes("fp8", 4096, 4096, (128, 128)) == 4096 * 4096 + 4 * 32 * 32
    assert kept_bytes("int8", 4096, 4096, (1, 0)) == 4096 * 4096 + 4 * 4096
    assert kept_bytes("nf4", 4096, 4096, (1, 64)) == 4096 * 2048 + 4 * 4096 * 64
    assert kept_bytes("uint4", 40, 24, (1, 8)) == 64 * 96 // 2 + 4 * 64 * 3


# ------------------------------------------------------------------------------------------------- embedding and head
def in_16_bits(folder, dtype, largest=MappingProxyType({})):
    """Round the embedding and the head. largest: the first value of tensors, if it is not 0."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in largest.items():
        tensors[name][0, 0] = value or tensors[name][0, 0]
    floats = {name: t.to(dtype) for name, t in tensors.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    save_file(tensors | floats, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("dtype", "largest"), [(torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.bfloat16, 1e5)])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_embedding_and_head_stay_in_16_bits(family, dtype, largest, tmp_path):
    """A value that float16 does not have stays, too."""
    quantized(family, "w8a8", folder := tmp_path / "model")
    name = "model.embed_tokens.weight" if "tied" in family else "lm_head.weight"
    in_16_bits(folder, dtype, {name: largest})
    ours = load(folder)
    assert ours.model.embed_tokens.weight.dtype == dtype and isinstance(ours.lm_head.format, ShortCpu)
    head = load_file(folder / "model.safetensors")[name].float()
    for rows in (1, 5, 40):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(ours.lm_head(x), x @ head.t(), rtol=1e-5, atol=1e-5 + largest * 1e-6)
    ids = torch.arange(7, dtype=torch.int32)
    assert ours.model.embed_tokens(ids).dtype == torch.float32
    assert len(InlineEngine(folder).generate([[5, 6, 7]], GREEDY)[0]) == 8


def test_a_rank_has_its_part_of_the_head(tmp_path):
    quantized("llama", "gptq", folder := tmp_path / "model")
    in_16_bits(folder, torch.bfloat16)
    head, x = load_file(folder / "model.safetensors")["lm_head.weight"].float(), torch.randn(2, 64)
    parts = [load(folder, parallel=Parallel(rank, 2)).lm_head(x) for rank in range(2)]
    torch.testing.assert_close(torch.cat(parts, 1)[:, : len(head)], x @ head.t(), rtol=1e-5, atol=1e-5)


def test_pages_that_are_let_go_are_read_again(tmp_path):
    values = torch.randn(64, 1024)
    save_file({"a": torch.zeros(7), "b": values}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        mapped = file.get_tensor("b")
        for _ in range(2):
            assert torch.equal(mapped, values)
            forget(mapped)
        assert torch.equal(mapped, values)


def test_tables_of_32_bits_and_of_plain_models_stay_as_they_are(tmp_path):
    quantized("llama", "gptq", folder := tmp_path / "model")
    assert load(folder).model.embed_tokens.weight.dtype == torch.float32
    in_16_bits(shutil.copytree(tiny_model("llama"), other := tmp_path / "plain"), torch.bfloat16)
    model = load(other)
    assert model.model.embed_tokens.weight.dtype == torch.float32 and isinstance(model.lm_head.format, PackedCpu)


# -------------------------------------------------------------------------------------------------------------- experts
def experts_of(model):
    return [module for module in model.modules() if isinstance(module, Experts)]


def assert_same_experts(ours, theirs, tolerance=ROUGH):
    assert experts_of(ours) and not any(module.not_computed for module in experts_of(ours))
    for one, two in zip(experts_of(ours), experts_of(theirs), strict=True):
        assert two.not_computed and not hasattr(one, "gate_up")
        h = torch.randn(9, two.gate_up.shape[2])
        count = len(two.gate_up)
        ids = torch.stack([torch.randperm(count)[:2] for _ in range(9)]).int()
        weights = torch.rand(9, 2)
        assert_alike(one(h, ids, weights), two(h, ids, weights), tolerance)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(1, 2), expert_parallel_rank(1, 2)])
def test_stacked_mxfp4_experts(parallel, tmp_path, monkeypatch):
    folder = changed("wide-gpt-oss", tmp_path / "mxfp4", as_mxfp4, quantization_config=QUANTIZED)
    assert_same_experts(load(folder, parallel=parallel), plain(monkeypatch, folder, parallel=parallel), 1e-4)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(1, 2), expert_parallel_rank(1, 2)])
@pytest.mark.parametrize("form", ["int4", "int8", "fp8", "int8_per_channel_weight_only"])
def test_experts_of_each(form, parallel, monkeypatch):
    folder = tiny_model("qwen3-moe")
    assert_same_experts(load(folder, form, parallel), plain(monkeypatch, folder, form, parallel=parallel))


# ---------------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("family", "form"), [("phi3", "gptq"), ("deepseek-v3", "int4"), ("falcon-40b", "nf4"), ("gpt-neox", "gptq")]
)
def test_ranks_together_are_the_model(family, form, tmp_path):
    folder = tiny_model(family)
    if form not in WHILE_LOADING:
        quantized(family, form, folder := tmp_path / "model")
    config = read_model_config(folder, **({"quantization": form} if form in WHILE_LOADING else {}))

    def logits(parallel):
        model = load(folder, form, parallel)
        with torch.inference_mode():
            attention = DenseAttention(config.attention_specs(parallel))
            return model.compute_all_logits(model(PROMPT, context_of(attention, torch.arange(len(PROMPT)))))

    (one, *_), _ = on_every_rank(1, logits)
    (two, *_), _ = on_every_rank(2, logits)
    assert (one - two).abs().mean() <= 0.1 * one.std()


@pytest.mark.parametrize("form", ["gptq", "nf4", "fp8-block", "mxfp4", "w8a8", "bnb-int8"])
def test_dummy_weights(form, checkpoint):
    engine = InlineEngine(checkpoint(form), dummy=True)
    assert len(engine.generate([[5, 6, 7]], GREEDY)[0]) == 8


def test_without_vector_instructions_layers_are_dequantized_and_it_is_said(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(int4_cpu, "can_pack", lambda: False)
    model = load(checkpoint("gptq"))
    assert not any(map(kept, linears(model).values()))
    [said] = [record.getMessage() for record in caplog.records]
    assert "are dequantized to float32" in said and "on this CPU (PyTorch needs AVX2" in said


def test_a_float16_model_is_dequantized(checkpoint, caplog):
    folder = checkpoint("gptq")
    assert not any(map(kept, linears(load(folder, dtype=torch.float16)).values()))
    assert "float16 on a CPU (float32 and bfloat16 work)" in caplog.text
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "gptq"
