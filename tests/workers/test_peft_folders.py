"""PEFT folders are read, or refused by the field or the tensor, before anything is loaded."""

import json
import os
import struct

import pytest
import torch
from peft_folders import write_folder

from quire.ipc.adapters import AdapterError, AdapterLimits
from quire.workers.adapters.peft import read_adapter
from quire.workers.adapters.peft_config import MAX_PATTERNS, REFUSED_UNLESS, USED, WITHOUT_EFFECT, parse_config

LIMITS = AdapterLimits(max_rank=16)
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def pair(layer=LAYER, rank=4, size=8, out=6):
    return {f"{layer}.lora_A.weight": torch.ones(rank, size), f"{layer}.lora_B.weight": torch.ones(out, rank)}


def read(folder, tensors=None, limits=LIMITS, **config):
    return read_adapter(write_folder(folder, tensors or pair(), **config), limits)


def refused(folder, tensors=None, limits=LIMITS, **config):
    with pytest.raises(AdapterError) as error:
        read(folder, tensors, limits, **config)
    return str(error.value)


def test_a_plan_says_where_the_tensors_lie(tmp_path):
    tensors = pair() | pair("base_model.model.lm_head", 4, 8, 20)
    tensors[f"{LAYER}.lora_A.weight"] = a = torch.randn(4, 8)
    plan = read(tmp_path / "a", tensors, base_model_name_or_path="org/base", alora_invocation_tokens=[5, 6])
    assert (plan.base_model, plan.invocation_tokens, plan.peft_version) == ("org/base", (5, 6), "0.21.2")
    parts = {part.layer: part for part in plan.parts}
    assert set(parts) == {"model.layers.0.self_attn.q_proj", "lm_head"}
    part = parts["model.layers.0.self_attn.q_proj"]
    assert (part.rank, part.scale, part.a.shape, part.b.shape) == (4, 2.0, (4, 8), (6, 4))
    data = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    assert plan.file.size == len(data)
    found = torch.frombuffer(bytearray(data[part.a.offset : part.a.offset + part.a.num_bytes]), dtype=torch.float32)
    assert torch.equal(found.view(4, 8), a)


def test_ranks_and_alphas_of_layers_as_peft_chooses_them(tmp_path):
    layers = [f"base_model.model.model.layers.{i}.self_attn.{name}" for i in (0, 10) for name in ("q_proj", "k_proj")]
    ranks = {layers[0]: 2, layers[1]: 4, layers[2]: 2, layers[3]: 8}
    tensors = {name: t for layer, rank in ranks.items() for name, t in pair(layer, rank).items()}
    config = {
        "rank_pattern": {r"layers\.10\.self_attn\.k_proj": 8, "q_proj": 2, "k_proj": 5, "proj": 1},
        "alpha_pattern": {"0.self_attn.q_proj": 3, "attn.k_proj": 99},
    }
    del config["rank_pattern"]["k_proj"]
    parts = {part.layer: part for part in read(tmp_path / "a", tensors, **config).parts}
    found = {name.removeprefix("model.layers."): (part.rank, part.scale) for name, part in parts.items()}
    assert found == {
        "0.self_attn.q_proj": (2, 1.5),
        "0.self_attn.k_proj": (4, 2.0),
        "10.self_attn.q_proj": (2, 4.0),  # a name's end begins after a dot
        "10.self_attn.k_proj": (8, 1.0),
    }
    [part] = read(tmp_path / "b", use_rslora=True).parts
    assert part.scale == 4.0


def test_the_bases_own_table_is_passed_over_if_it_has_its_shape(tmp_path):
    name = "base_model.model.model.embed_tokens"
    tensors = {f"{name}.lora_embedding_A": torch.ones(4, 30), f"{name}.lora_embedding_B": torch.ones(8, 4)}
    [part] = read(tmp_path / "a", tensors | {f"{name}.base_layer.weight": torch.ones(30, 8)}).parts
    assert part.layer == "model.embed_tokens" and part.a.shape == (4, 30)
    assert "extended vocabulary" in refused(tmp_path / "b", tensors | {f"{name}.base_layer.weight": torch.ones(31, 8)})
    head = pair("base_model.model.lm_head", 4, 8, 30)
    assert read(tmp_path / "c", head | {"base_model.model.lm_head.base_layer.weight": torch.ones(30, 8)})
    assert "modules_to_save" in refused(
        tmp_path / "d", pair() | {"base_model.model.lm_head.base_layer.weight": torch.ones(3, 8)}
    )


CHANGED = {
    "use_dora": True, "bias": "all", "lora_bias": True, "modules_to_save": ["lm_head"], "trainable_token_indices": [1],
    "layer_replication": [[0, 1]], "use_qalora": True, "use_bdlora": {"a": 1}, "arrow_config": {}, "kasa_config": {},
    "velora_config": {}, "monteclora_config": {}, "megatron_config": {}, "ensure_weight_tying": True,
}  # fmt: skip


def test_every_field_that_changes_the_result_is_refused_by_name(tmp_path):
    assert CHANGED.keys() == REFUSED_UNLESS.keys()
    for name, value in CHANGED.items():
        assert name in refused(tmp_path / name, **{name: value})
        read(tmp_path / f"default-{name}", **{name: REFUSED_UNLESS[name][0]})
    for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "unheard", 3):
        assert "init_lora_weights" in refused(tmp_path / f"init-{name}", init_lora_weights=name)
    for name in (True, False, "gaussian", "eva", "orthogonal", "lora_ga"):
        read(tmp_path / f"init-{name}", init_lora_weights=name)
    read(tmp_path / "old", **dict.fromkeys(["new_1", "new_2", "new_3"], None), new_4=False, new_5=[], new_6={}, new_7="")
    for value in (True, 1, "x", [0], {"a": None}, 0):
        assert "new_field" in refused(tmp_path / "new", new_field=value)


def test_fields_without_effect(tmp_path):
    plain = read(tmp_path / "a").parts
    read(tmp_path / "b", **{name: {"any": ["thing"]} for name in WITHOUT_EFFECT})
    assert [p.scale for p in plain] == [2.0] and not USED & WITHOUT_EFFECT


def test_every_field_that_peft_writes_is_in_the_table():
    peft = pytest.importorskip("peft")
    fields = peft.LoraConfig().to_dict()
    assert fields.keys() <= USED | WITHOUT_EFFECT | REFUSED_UNLESS.keys()
    parse_config(json.dumps(fields, default=list).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0), ("r", "4"), ("r", True), ("lora_alpha", "x"), ("lora_alpha", None), ("rank_pattern", [1]),
        ("rank_pattern", {"(": 4}), ("rank_pattern", {"q": 0}), ("rank_pattern", {"a" * 300: 4}), ("alpha_pattern", {"q": "x"}),
        ("rank_pattern", {str(i): 4 for i in range(MAX_PATTERNS + 1)}), ("use_rslora", "yes"), ("peft_type", "IA3"),
        ("alora_invocation_tokens", []), ("alora_invocation_tokens", [-1]), ("alora_invocation_tokens", "ab"),
        ("base_model_name_or_path", 3), ("peft_version", []),
    ],
)  # fmt: skip
def test_fields_of_a_wrong_kind(tmp_path, field, value):
    assert field in refused(tmp_path / "a", **{field: value})


def test_the_tensors_must_be_pairs_of_lora(tmp_path):
    a, b = pair().items()
    assert "lora_A" in refused(tmp_path / "1", dict([a]))
    assert "does not fit" in refused(tmp_path / "2", dict([a, (b[0], torch.ones(6, 5))]))
    assert "rank 4, but r" in refused(tmp_path / "3", r=8)
    assert "--max-lora-rank" in refused(tmp_path / "4", limits=AdapterLimits(max_rank=3))
    assert "convolution" in refused(tmp_path / "5", dict([(a[0], torch.ones(4, 8, 3)), b]))
    for name in ("lora_magnitude_vector", "lora_B.bias", "weight", "lora_A.default.weight", "modules_to_save.weight"):
        assert name in refused(tmp_path / name, pair() | {f"{LAYER}.{name}": torch.ones(4, 4)})
    assert "begin with" in refused(tmp_path / "6", pair("model.layers.0.q_proj"))
    assert "dtype" in refused(tmp_path / "7", {name: t.to(torch.int8) for name, t in pair().items()})
    assert "both" in refused(tmp_path / "8", pair() | {f"{LAYER}.lora_embedding_A": torch.ones(4, 4)})
    empty = tmp_path / "9"
    write_folder(empty, {})
    with pytest.raises(AdapterError, match="no tensors"):
        read_adapter(empty, LIMITS)


def edited(folder, edit):
    """A good folder; `edit` changes its header, or its whole bytes, if that returns bytes."""
    file = write_folder(folder, pair()) / "adapter_model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    changed = edit(header, data)
    if changed is None:
        text = json.dumps(header).encode()
        changed = struct.pack("<Q", len(text)) + text + data[8 + length :]
    file.write_bytes(changed)
    with pytest.raises(AdapterError) as error:
        read_adapter(folder, LIMITS)
    return str(error.value)


def set_of(field, value):
    return lambda header, data: header[f"{LAYER}.lora_A.weight"].__setitem__(field, value)


@pytest.mark.parametrize(
    "edit",
    [
        lambda header, data: b"",
        lambda header, data: data[:7],
        lambda header, data: data[:40],
        lambda header, data: data[:-1],
        lambda header, data: struct.pack("<Q", 1 << 62) + data[8:],
        lambda header, data: struct.pack("<Q", 20 << 20) + data[8:],
        lambda header, data: struct.pack("<Q", 5) + b"[1,2]",
        lambda header, data: struct.pack("<Q", 3) + b"\xff\xfe{",
        lambda header, data: struct.pack("<Q", 60000) + b"[" * 60000,
        lambda header, data: header.update({"x": 3}),
        set_of("shape", [4]), set_of("shape", [4, -8]), set_of("shape", "48"), set_of("shape", [1 << 50, 1 << 50]),
        set_of("shape", [4, 8.0]), set_of("shape", [True, 8]), set_of("dtype", "F64"), set_of("dtype", ["F32"]),
        set_of("data_offsets", [0, 127]), set_of("data_offsets", [4, 132]), set_of("data_offsets", [-128, 0]),
        set_of("data_offsets", [1 << 39, (1 << 39) + 128]), set_of("data_offsets", None),
    ],
)  # fmt: skip
def test_broken_files(tmp_path, edit):
    assert edited(tmp_path / "a", edit)


def test_what_is_not_a_file_of_the_folder(tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        for kind, make in {
            "fifo": os.mkfifo,
            "folder": os.mkdir,
            "nothing": lambda path: None,
            "loop": lambda path: os.symlink(path, path),
            "link out": lambda path: os.symlink("/etc/hostname", path),
        }.items():
            folder = write_folder(tmp_path / name / kind, pair())
            (folder / name).unlink()
            make(folder / name)
            with pytest.raises(AdapterError, match=name):
                read_adapter(folder, LIMITS)
    folder = write_folder(tmp_path / "bin", pair())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is not read"):
        read_adapter(folder, LIMITS)
    with pytest.raises(AdapterError, match="the folder has no"):
        read_adapter(tmp_path / "missing", LIMITS)
    (write_folder(tmp_path / "big", pair()) / "adapter_config.json").write_text(" " * (2 << 20))
    with pytest.raises(AdapterError, match="larger"):
        read_adapter(tmp_path / "big", LIMITS)


def test_links_within_the_folder_and_into_the_cache_of_the_hub(tmp_path):
    real = write_folder(tmp_path / "cache" / "blobs", pair())
    folder = tmp_path / "cache" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).symlink_to(f"../../blobs/{name}")
    assert read_adapter(folder, LIMITS).parts == read_adapter(real, LIMITS).parts
    other = tmp_path / "cache" / "other"
    other.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (other / name).symlink_to(f"../blobs/{name}")
    with pytest.raises(AdapterError, match="outside"):
        read_adapter(other, LIMITS)
