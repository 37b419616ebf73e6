"""Weights: what fits is loaded bit for bit, whatever its files and dtype; what does not fit is named, all of it at once."""

import json
import shutil
import weakref
from pathlib import Path
from threading import Event

import pytest
import tiny_models
import torch
from deadlines import DEADLINE_S
from safetensors.torch import load_file, save_file

from quire.workers.layers import linear
from quire.workers.layers.formats import packed_cpu
from quire.workers.layers.formats.packed_cpu import PackedCpu
from quire.workers.layers.norm import RMSNorm
from quire.workers.loading import files, weights
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import dummy_weights, load_weights, weight_loaders
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel


def load(folder, dtype=torch.float32, parallel=None):
    """Tensors by their names in the checkpoint, as they are in the model before formats finish."""
    model = build_model(read_model_config(folder), dtype, parallel or Parallel())
    tensors = tensors_of(model)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))  # what is not loaded shows
    load_weights(model, folder, "cpu")
    return tensors


def tensors_of(model):
    return {name: loader.write.args[0] for name, loader in weight_loaders(model).items()}


@pytest.fixture
def folder(tmp_path):
    """A copy of the plain Llama that a test may spoil."""
    return shutil.copytree(tiny_models.tiny_model("llama"), tmp_path / "model")


def change(folder, drop=(), **add):
    """Rewrite model.safetensors without the tensors `drop` and with the tensors `add` (dots in names written as __)."""
    tensors = load_file(folder / "model.safetensors")
    for name in drop:
        del tensors[name]
    tensors.update({name.replace("__", "."): tensor for name, tensor in add.items()})
    save_file(tensors, folder / "model.safetensors")


def assert_equals_file(ours, tensors):
    assert ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(ours[name], tensor.to(ours[name].dtype)), name


@pytest.mark.parametrize("name", ["llama-mqa-bias", "llama-tied", "qwen2", "qwen3-bias"])
def test_every_tensor_lands_in_its_place(name):
    folder = tiny_models.tiny_model(name)
    assert_equals_file(load(folder), load_file(folder / "model.safetensors"))


def test_shards_give_the_same_model_as_one_file():
    folder = tiny_models.tiny_model("llama", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_equals_file(load(folder), load_file(tiny_models.tiny_model("llama") / "model.safetensors"))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_converted_while_loading(folder, stored, wanted):
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    assert_equals_file(load(folder, wanted), tensors)


def test_large_tensors_travel_in_slices(folder, monkeypatch):
    monkeypatch.setattr(weights, "SLICE_BYTES", 1000)
    assert_equals_file(load(folder), load_file(folder / "model.safetensors"))


def test_tensor_is_a_view_of_the_file_and_not_a_copy(tmp_path):
    def anonymous_kib():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    size_kib = 64 << 10
    save_file({"x": torch.ones(size_kib << 8)}, tmp_path / "model.safetensors")
    before = anonymous_kib()
    with files.open_file(tmp_path / "model.safetensors") as tensors:
        x = tensors.get_tensor("x")
        assert x.max() == 1.0  # every page is touched
        assert anonymous_kib() - before < size_kib // 4


def test_ranks_hold_the_parts_of_the_whole():
    folder = tiny_models.tiny_model("split-llama")
    tensors = load_file(folder / "model.safetensors")
    parts = [load(folder, parallel=Parallel(rank, 2)) for rank in range(2)]
    for name, whole in tensors.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        split = dim or any(part in name for part in (".q_proj", ".gate", ".up", "lm_head"))  # one KV head: both have it
        joined = torch.cat([part[name] for part in parts], dim) if split else parts[0][name]
        assert torch.equal(joined, whole), name
        if name.endswith(("o_proj.bias", "down_proj.bias")):  # of results that are summed one rank's has the bias
            assert not parts[1][name].any(), name
        elif not split:
            assert torch.equal(parts[1][name], whole), name


def test_missing_surplus_and_misshapen_tensors_are_named_together(folder):
    change(
        folder,
        drop=["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"],
        model__layers__0__mlp__down_proj__weight=torch.zeros(64, 64),
        model__layers__3__mlp__down_proj__weight=torch.zeros(2, 2),
    )
    with pytest.raises(WeightsError) as error:
        load(folder)
    text = str(error.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight" in text
    assert "surplus: model.layers.3.mlp.down_proj.weight" in text
    assert "misshapen: model.layers.0.mlp.down_proj.weight is [64, 64], expected [64, 128]" in text


def test_an_unknown_tensor_is_named_as_unknown_and_not_as_quantized(folder):
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.0.self_attn.temperature", "model.layers.0.gate_up_proj", "visual.blocks.0.scale"):
        save_file(tensors | {name: torch.ones(3)}, folder / "model.safetensors")
        with pytest.raises(WeightsError) as error:
            load(folder)
        said = "the checkpoint does not fit the model that config.json describes. Tensors surplus: "
        assert str(error.value) == f"{said}{name} (unknown to the model)"


def test_a_bias_that_the_config_does_not_know_is_surplus(folder):
    change(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(WeightsError, match=r"surplus: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_long_lists_of_names_are_cut(folder):
    save_file({"other": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"and \d+ more; surplus: other"):
        load(folder)


def test_buffers_of_old_checkpoints_are_ignored(folder):
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load(folder)


def test_quantised_tensors_are_refused(folder):
    change(folder, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(WeightsError, match=r"unsupported dtype: model\.norm\.weight is I8"):
        load(folder)


def tied_folder(tmp_path, embed, head):
    folder = shutil.copytree(tiny_models.tiny_model("llama-tied"), tmp_path / "tied")
    names = {"model__embed_tokens__weight": embed, "lm_head__weight": head}
    change(folder, ["model.embed_tokens.weight"], **{name: tensor for name, tensor in names.items() if tensor is not None})
    return folder


def test_tied_checkpoint_may_hold_either_name_or_both(tmp_path):
    weight = torch.randn(tiny_models.VOCAB_SIZE, 64)
    for i, (embed, head) in enumerate([(weight, None), (None, weight), (weight, weight.clone())]):
        [loaded] = [
            t for name, t in load(tied_folder(tmp_path / str(i), embed, head)).items() if "embed" in name or "head" in name
        ]
        assert torch.equal(loaded, weight)


def test_tied_checkpoint_without_either_or_with_two_different_ones_is_refused(tmp_path):
    weight = torch.randn(tiny_models.VOCAB_SIZE, 64)
    with pytest.raises(WeightsError, match="tie_word_embeddings to false"):
        load(tied_folder(tmp_path / "a", weight, weight + 1))
    with pytest.raises(WeightsError, match=r"missing: model\.embed_tokens\.weight"):
        load(tied_folder(tmp_path / "b", None, None))
    with pytest.raises(WeightsError, match=r"misshapen: lm_head\.weight is \[3, 64\]"):
        load(tied_folder(tmp_path / "c", None, weight[:3].clone()))


def test_pickled_weights_are_refused_and_never_read(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(WeightsError, match="pickled"):
        load(folder)


def test_damaged_file_is_named(folder):
    data = (folder / "model.safetensors").read_bytes()
    for damaged in (b"", b"\xff" * 100, data[: len(data) // 2]):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
            load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", 3, ""])
def test_index_may_name_only_safetensors_of_its_own_folder(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightsError):
        load(folder)


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "[" * 100_000])
def test_broken_index_is_refused(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="is not a safetensors index"):
        load(folder)


@pytest.mark.parametrize("name", ["model-1-of-2.safetensors", f"{'x' * 5000}.safetensors", "\0.safetensors"])
def test_index_that_names_an_absent_file_is_an_incomplete_download(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match="incomplete"):
        load(folder)


def test_tensor_in_two_files_is_refused(folder):
    save_file({"model.norm.weight": torch.ones(64)}, folder / "more.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is in model\.safetensors and in more\.safetensors"):
        load(folder)


def test_what_fails_while_reading_is_raised(folder, monkeypatch):
    def broken(tensors, name, *more):
        raise OSError(f"the disk is gone at {name}")

    monkeypatch.setattr(weights, "_copy", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        load(folder)


def test_dummy_weights_depend_on_the_seed_alone():
    config = read_model_config(tiny_models.tiny_model("qwen3-bias"))

    def made(seed):
        model = build_model(config, torch.float32, Parallel())
        tensors = tensors_of(model)
        dummy_weights(model, seed)
        return tensors, model

    (one, model), (again, _), (other, _) = made(1), made(1), made(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one[weights.HEAD], other[weights.HEAD])
    assert one[weights.HEAD].std().item() == pytest.approx(config.initializer_range, rel=0.05)
    first, second = (one[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(2))
    assert not torch.equal(first, second)
    norms = [module.weight for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 4 * 3 + 1 and all(torch.equal(w, torch.ones_like(w)) for w in norms)


def test_a_tied_head_with_a_bias_is_finished_behind_the_embedding(monkeypatch):
    """Its bias is read first, by another thread: the table that it shares has no values yet."""
    bias_is_there, copy, arrived = Event(), weights._copy, weights._Loading.arrived

    def late(tensors, name, *more):
        if "wte" in name:
            assert bias_is_there.wait(DEADLINE_S)
        return copy(tensors, name, *more)

    def seen(self, owner, copied):
        arrived(self, owner, copied)
        if owner is model.lm_head.format:
            bias_is_there.set()

    monkeypatch.setattr(weights, "_copy", late)
    monkeypatch.setattr(weights._Loading, "arrived", seen)
    folder = tiny_models.tiny_model("gptj-tied")
    model = build_model(read_model_config(folder), torch.float32, Parallel())
    load_weights(model, folder, "cpu", progress=False)
    x = torch.randn(3, 64)
    head = tiny_models.reference("gptj-tied").lm_head
    torch.testing.assert_close(model.compute_logits(x), torch.nn.functional.linear(x, head.weight, head.bias))


def test_weights_that_a_cpu_packs_are_let_go_while_others_are_loaded(monkeypatch):
    """Else the host holds the model twice before it holds it once. A copy stands for the layout that not all CPUs have."""
    monkeypatch.setattr(linear, "can_pack", lambda weight: True)
    monkeypatch.setattr(packed_cpu, "pack", torch.clone)
    model = build_model(read_model_config(tiny_models.tiny_model("llama")), torch.bfloat16, Parallel())
    finish, finished, held = PackedCpu.finish, [], []

    def watched(self):
        held.append(sum(weight() is not None for weight in finished))
        finished.append(weakref.ref(self.weight))
        finish(self)

    monkeypatch.setattr(PackedCpu, "finish", watched)
    load_weights(model, tiny_models.tiny_model("llama"), "cpu", progress=False)
    assert len(held) > 8 and held[-1] < 4  # readers may be about to let go theirs
