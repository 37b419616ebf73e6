"""Weight formats: a layer asks and never looks; toy formats unpack and stack while they load; adapters; packing on the CPU."""

import json
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from quire.ipc.memory_plan import PRIMITIVES_BYTES
from quire.kernels.elementwise.norm_reference import Term
from quire.kernels.linear.linear_cpu import can_pack
from quire.workers.layers import linear, ops
from quire.workers.layers.adapter import Adapter
from quire.workers.layers.formats import packed_cpu
from quire.workers.layers.formats.dense import Dense
from quire.workers.layers.formats.format import Format, WeightFormat, WeightShard, checkpoint_prefix
from quire.workers.layers.formats.packed_cpu import PackedCpu, padded_rows
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import WeightOwner, new_parameter
from quire.workers.layers.norm import LayerNorm, NoNorm, RMSNorm
from quire.workers.layers.unadded import Unadded
from quire.workers.loading import weights
from quire.workers.loading.weight_loader import WeightLoader, WeightsError, copied
from quire.workers.loading.weights import dummy_weights, load_weights, weight_loaders
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.models.taps import Tapped
from quire.workers.parallel import Parallel
from quire.workers.shard import whole

CPU = Placement(torch.float32, Parallel())


def made_linear(inputs=8, outputs=6):
    layer = Linear(whole(inputs), {"o_proj": whole(outputs)}, True, CPU)
    for parameter in layer.parameters():
        parameter.normal_()
    loaders = dict(layer.format.loaders("o_proj.format"))
    weight, bias = (loader.write.args[0].clone() for loader in loaders.values())
    layer.format.finish()
    return layer, weight, bias


@pytest.fixture
def packed(monkeypatch):
    """Formats are packed; where the machine has no packed layout, a copy of the weight stands for it."""
    if not can_pack(torch.empty(0)):
        monkeypatch.setattr(linear, "can_pack", lambda weight: True)
        monkeypatch.setattr(packed_cpu, "pack", torch.clone)
        monkeypatch.setattr(packed_cpu, "packed_linear", torch.nn.functional.linear)


# -------------------------------------------------------------------------------------------------------- four products
@pytest.mark.parametrize("is_packed", [True, False])
def test_all_products_are_one_product_in_different_dress(is_packed, packed, monkeypatch):
    if not is_packed:
        monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    layer, weight, bias = made_linear()
    assert isinstance(layer.format, PackedCpu if is_packed else Dense)
    norm = RMSNorm(8, 1e-5, torch.float32, torch.device("cpu"))
    norm.weight.normal_()
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    y = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(layer(x), y)
    torch.testing.assert_close(layer.split_k(x), y)
    torch.testing.assert_close(layer.gated(x), ops.silu_mul(y))
    out = torch.empty_like(y)
    assert layer(x, out) is out and torch.equal(out, layer(x))
    for first in (None, x):
        total = residual if first is None else residual + x
        h = torch.nn.functional.linear(norm(total), weight, bias)
        for is_gated in (False, True):
            got, new_residual = layer.normed(first, residual.clone(), norm, is_gated)
            torch.testing.assert_close(got, ops.silu_mul(h) if is_gated else h)
            torch.testing.assert_close(new_residual, total)


class Doubled(Adapter):
    def expand(self, h, y):
        return y.add_(h.sum(-1, keepdim=True))


class InParts(Format):
    def product(self, x, out=None):
        return x * 2

    def split_k(self, x):
        return torch.stack([x, x])


class InIntegerParts(InParts):
    splits_in_float = False


def test_an_adapter_adds_to_one_of_the_partial_sums_unless_they_are_integers():
    x = torch.randn(2, 8)
    want = x * 2 + x.sum(-1, keepdim=True)
    parts = linear.Adapted(InParts(), Doubled()).split_k(x)
    assert parts.shape == (2, 2, 8)
    torch.testing.assert_close(parts.sum(0), want)
    assert torch.equal(linear.Adapted(InIntegerParts(), Doubled()).split_k(x), want)


class Deferred(Doubled):
    def term(self, h, num_tokens):
        return Term(h, *[torch.empty(0)] * 4, 8)


def test_what_an_adapter_leaves_to_the_norm_is_added_once_whatever_is_behind_it():
    """By a norm or a tap, or by the next layer, whether or not it has an adapter; not behind integers, nor in other steps."""
    switch, (first, other) = SimpleNamespace(is_active=True), (made_linear(outputs=8)[0] for _ in range(2))
    plain_y, plain_normed = first.split_k, other.normed
    first.set_adapter(Deferred(), switch)
    other.set_adapter(None, switch)
    norms = [RMSNorm(8, 1e-5, torch.float32, torch.device("cpu")), LayerNorm(8, 1e-5, torch.float32, torch.device("cpu"))]
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    want = residual + plain_y(x) + x.sum(-1, keepdim=True)
    assert isinstance(first.split_k(x), Unadded)
    for norm in (*norms, NoNorm()):
        total = residual.clone()
        norm.add(first.split_k(x), total)
        torch.testing.assert_close(total, want)
    norms[0].weight.fill_(1.0)
    behind, total = other.normed(first.split_k(x), residual.clone(), norms[0])
    torch.testing.assert_close(behind, plain_normed(None, want, norms[0])[0])
    torch.testing.assert_close(total, want)
    out, total = torch.empty(2, 8), residual.clone()
    Tapped(lambda x, residual: (x, residual), norms[0], out)(first.split_k(x), total)
    torch.testing.assert_close(out, want)
    assert linear.Adapted(InIntegerParts(), Deferred(), can_defer=True).split_k(x).shape == (2, 8)
    switch.is_active = False
    assert torch.equal(first.split_k(x), plain_y(x))


def test_parts_of_one_row_are_added_by_a_norm_of_its_own(monkeypatch):
    """A quantized product may be in parts at one row, which the norm within a plain product does not add up."""
    dense = Dense(WeightShard(whole(8), {"q_proj": whole(4)}), False, torch.float32, torch.device("cpu"))
    dense.weight.data.normal_()
    norm, residual, parts = RMSNorm(8, 1e-5, torch.float32, torch.device("cpu")), torch.randn(1, 8), torch.randn(3, 1, 8)
    norm.weight.data.fill_(1)
    monkeypatch.setattr(ops, "fuses_norm", lambda residual, weight: True)
    monkeypatch.setattr(ops, "norm_linear", lambda *arguments: "fused")
    monkeypatch.setattr(RMSNorm, "add", lambda self, x, residual: self(residual.add_(x.sum(0) if x.dim() == 3 else x)))
    want = torch.nn.functional.linear(norm(residual + parts.sum(0)), dense.weight)
    got, total = dense.normed(parts, residual.clone(), norm)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(total, residual + parts.sum(0))
    assert dense.normed(parts[0], residual, norm) == dense.normed(None, residual, norm) == "fused"


def test_an_adapter_adds_to_every_product_and_an_empty_slot_is_the_format_itself():
    layer, _, _ = made_linear()
    norm = RMSNorm(8, 1e-5, torch.float32, torch.device("cpu"))
    norm.weight.fill_(1.0)
    x = torch.randn(2, 8)
    plain = layer(x)
    products = [layer.gated, layer.split_k, layer.normed]
    assert products == [layer.format.gated, layer.format.split_k, layer.format.normed]
    layer.set_adapter(Doubled())
    y = plain + x.sum(-1, keepdim=True)
    assert torch.equal(layer(x), y) and torch.equal(layer.split_k(x), y) and torch.equal(layer.gated(x), ops.silu_mul(y))
    h = norm(x)
    assert torch.equal(layer.normed(None, x, norm)[0], layer(h))
    layer.set_adapter(None)
    assert torch.equal(layer(x), plain) and layer.gated == products[0]
    assert [name for name, _ in layer.named_children()] == ["format"]


# -------------------------------------------------------------------------------------------------------- on the CPU
def test_a_packed_weight_takes_the_place_of_the_plain_one(packed, monkeypatch):
    layer, weight, bias = made_linear(64, 48)
    assert layer.format.weight is not None  # small: one row goes through it
    monkeypatch.setattr(packed_cpu, "SMALL_BYTES", 0)
    large, weight, bias = made_linear(64, 48)
    assert large.format.weight is None and len(list(large.parameters())) == 2
    for rows in (1, 2, 16, 17, 37, 130):
        x = torch.randn(rows, 64)
        assert large(x).shape == (rows, 48)
        torch.testing.assert_close(large(x), torch.nn.functional.linear(x, weight, bias))


def test_rows_are_padded_to_few_numbers_by_an_eighth_at_most():
    sizes = [padded_rows(rows) for rows in range(1, 4097)]
    assert sizes[:16] == list(range(1, 17)) and len(set(sizes)) == 16 + 8 * 8
    assert all(rows <= size <= rows * 1.125 for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)


MANY_SHAPES = """
import os, sys
from pathlib import Path
from quire.workers.__main__ import ENVIRONMENT
os.environ.update(ENVIRONMENT)
import torch
from quire.workers.layers.linear import Linear, Placement
from quire.workers.parallel import Parallel
from quire.workers.shard import whole

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
place, shapes = Placement(torch.float32, Parallel()), ((256, 64), (64, 128), (512, 96))
layers = [Linear(whole(k), {"w": whole(n)}, False, place) for n, k in shapes]
for layer in layers:
    for parameter in layer.parameters():
        parameter.normal_()
    layer.format.finish()
before = rss()
with torch.inference_mode():
    for rows in range(2, 350):
        for layer in layers:
            layer(torch.empty(rows, layer.format.shard.columns.size))
print(rss() - before)
"""


def test_memory_of_a_cpu_worker_does_not_grow_with_every_number_of_rows():
    """350 numbers of rows of three shapes: some 200 MB unless rows are padded, and with the caches unbounded more."""
    child = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    assert int(child.stdout) < PRIMITIVES_BYTES


@pytest.mark.parametrize(("dtype", "device"), [(torch.float16, "cpu"), (torch.float32, "meta")])
def test_without_a_packed_layout_the_format_is_plain(dtype, device):
    assert linear.choose_format(Placement(dtype, Parallel(device=device))) is Dense


# --------------------------------------------------------------------------------------------- formats of their own
class Nibbles(WeightFormat):
    """Eight values of 4 bits in an int32, [out, in / 8], with a scale a row: unpacked while they come in."""

    def __init__(self, shard, has_bias, dtype, device, tied_to=None):
        super().__init__()
        assert not has_bias and tied_to is None
        self.shard, self.finished = shard, 0
        self.values = new_parameter(shard.shape, torch.float32, device)
        self.scales = new_parameter(shard.shape[:1], torch.float32, device)

    def product(self, x, out=None):
        return torch.nn.functional.linear(x, self.values)

    def loaders(self, name):
        start, columns = 0, self.shard.columns
        packed_columns = slice(columns.start // 8, columns.stop // 8)
        for layer, rows in self.shard.rows.items():
            stop = start + rows.size
            write = partial(self.unpack, self.values[start:stop])
            prefix = f"{checkpoint_prefix(name)}{layer}"
            yield (
                f"{prefix}.qweight",
                WeightLoader((rows.full, columns.full // 8), (rows.slice, packed_columns), ("I32",), write),
            )
            yield f"{prefix}.scales", copied(self.scales[start:stop], (rows,))
            start = stop

    @staticmethod
    def unpack(values, piece, row):
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        nibbles = (piece.to(values.device)[:, :, None] >> shifts) & 15
        values[row : row + len(piece)] = nibbles.flatten(1).float() - 8

    def finish(self):
        self.finished += 1
        self.values *= self.scales[:, None]


def nibble_checkpoint(folder):
    """The same model with every linear weight of its layers as nibbles; returns their values."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.startswith("model.layers") and "_proj" in name]:
        weight = tensors.pop(name)
        scale = weight.abs().amax(1) / 7
        nibbles = (weight / scale[:, None]).round().clamp(-8, 7).to(torch.int64)
        values[name] = nibbles.float() * scale[:, None]
        shifted = (nibbles + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
        words = shifted.sum(-1)
        tensors[name.replace(".weight", ".qweight")] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        tensors[name.replace(".weight", ".scales")] = scale
    save_file(tensors, folder / "model.safetensors")
    return values


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_models.tiny_model("llama"), tmp_path / "model")


@pytest.fixture
def nibbles(monkeypatch):
    """Layers, but not the head, are of nibbles."""
    plain = linear.choose_format

    def choose(place):
        def make(shard, *rest):
            return (Nibbles if "lm_head" not in shard.rows else plain(place))(shard, *rest)

        return make

    monkeypatch.setattr(linear, "choose_format", choose)


@pytest.mark.parametrize("slice_bytes", [100, 64 << 20])
@pytest.mark.parametrize("size", [1, 2])
def test_a_format_unpacks_while_it_loads_and_finishes_once(folder, nibbles, monkeypatch, slice_bytes, size):
    monkeypatch.setattr(weights, "SLICE_BYTES", slice_bytes)
    values = nibble_checkpoint(folder)
    models = [build_model(read_model_config(folder), torch.float32, Parallel(rank, size)) for rank in range(size)]
    for model in models:
        load_weights(model, folder, "cpu")
    mlps = [model.model.layers[1].mlp for model in models]
    down = torch.cat([mlp.down_proj.format.values for mlp in mlps], 1)
    assert torch.equal(down, values["model.layers.1.mlp.down_proj.weight"])
    halves = [mlp.gate_up_proj.format.values.chunk(2) for mlp in mlps]
    assert torch.equal(torch.cat([gate for gate, _ in halves]), values["model.layers.1.mlp.gate_proj.weight"])
    assert torch.equal(torch.cat([up for _, up in halves]), values["model.layers.1.mlp.up_proj.weight"])
    formats = [module for model in models for module in model.modules() if isinstance(module, Nibbles)]
    assert len(formats) == size * 3 * 4 and {f.finished for f in formats} == {1}


def test_what_such_a_format_does_not_take_is_named(folder, nibbles):
    nibble_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.qweight"] = tensors["model.layers.0.mlp.down_proj.qweight"].float()
    del tensors["model.layers.2.self_attn.o_proj.scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError) as error:
        load_weights(build_model(read_model_config(folder), torch.float32, Parallel()), folder, "cpu")
    assert "of an unsupported dtype: model.layers.0.mlp.down_proj.qweight is F32" in str(error.value)
    assert "missing: model.layers.2.self_attn.o_proj.scales" in str(error.value)


class Stacked(WeightOwner):
    """One parameter [3, rows, columns] of as many tensors of the checkpoint, each transposed; a scalar beside them."""

    def __init__(self):
        super().__init__()
        self.weight = new_parameter((3, 4, 6), torch.float32, torch.device("cpu"))
        self.scale = new_parameter((), torch.float32, torch.device("cpu"))
        self.seen = []

    def loaders(self, name):
        for i in range(3):
            parts = (slice(None), slice(None))
            yield f"{name}.experts.{i}.weight", WeightLoader((6, 4), parts, ("F32", "BF16"), partial(self.write, i))
        yield f"{name}.scale", WeightLoader((), (), ("F32",), lambda piece, row: self.scale.copy_(piece))

    def write(self, i, piece, row):
        self.weight[i, :, row : row + len(piece)] = piece.t()

    def finish(self):
        self.seen.append(self.weight.clone() * self.scale)


def test_several_tensors_are_stacked_in_one_parameter_which_is_finished_after_the_last(folder, monkeypatch):
    monkeypatch.setattr(weights, "SLICE_BYTES", 40)
    experts, tensors = torch.randn(3, 6, 4), load_file(folder / "model.safetensors")
    for i, expert in enumerate(experts):
        tensors[f"model.stacked.experts.{i}.weight"] = expert.clone()
    tensors["model.stacked.scale"] = torch.tensor(3.0)
    first = {name: tensors[name] for name in list(tensors)[::2]}
    save_file(first, folder / "a.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in first}, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    files = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(files))
    model = build_model(read_model_config(folder), torch.float32, Parallel())
    model.model.stacked = Stacked()
    load_weights(model, folder, "cpu")
    [finished] = model.model.stacked.seen
    assert torch.equal(finished, experts.transpose(1, 2) * 3)


def test_owners_finish_once_each_whether_loaded_or_made_up(folder, monkeypatch):
    finished = []
    for owner in (PackedCpu, Dense, RMSNorm):
        monkeypatch.setattr(owner, "finish", lambda self: finished.append(self))
    for name in ("llama", "llama-tied"):
        for fill in (
            partial(load_weights, model_dir=tiny_models.tiny_model(name), device="cpu"),
            partial(dummy_weights, seed=0),
        ):
            finished.clear()
            model = build_model(read_model_config(tiny_models.tiny_model(name)), torch.float32, Parallel())
            assert len(weight_loaders(model)) == 3 * 9 + 2 + (name == "llama")
            fill(model)
            assert len(finished) == len(set(map(id, finished))) == 3 * (4 + 2) + 1 + 1
            if name == "llama-tied":
                assert finished[-1] is model.lm_head.format
