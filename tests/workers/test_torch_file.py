"""Files of torch.save are read without unpickling: what torch wrote comes back, and anything else refuses the file."""

import collections
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from quire.workers.loading.torch_file import TorchFile
from quire.workers.loading.torch_pickle import PickleRefusedError, read_described
from quire.workers.loading.weight_loader import WeightsError


def saved(tmp_path: Path, value: object, **options) -> Path:
    path = tmp_path / "pytorch_model.bin"
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back(tmp_path, dtype):
    tensors = {
        "a.weight": (torch.randn(7, 5) * 9).to(dtype),
        "b": torch.ones((), dtype=dtype),
        "c": torch.zeros(0, 3, dtype=dtype),
    }
    file = TorchFile(saved(tmp_path, tensors))
    assert file.keys() == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(file.get_tensor(name), tensor) and file.get_slice(name).get_shape() == list(tensor.shape)


def test_views_share_a_storage_and_state_dicts_have_versions(tmp_path):
    table = torch.arange(24.0).view(4, 6)
    file = TorchFile(saved(tmp_path, {"whole": table, "turned": table.T, "part": table[1:3, 2:4]}))
    assert torch.equal(file.get_tensor("turned"), table.T) and torch.equal(file.get_tensor("part"), table[1:3, 2:4])
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    file = TorchFile(saved(tmp_path, model.state_dict()))
    assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118 - not a dict
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
    file = TorchFile(saved(tmp_path, dict(model.named_parameters())))
    assert torch.equal(file.get_tensor("0.weight"), model[0].weight)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_protocols(tmp_path, protocol):
    tensors = {f"layer.{i}": torch.full((2,), float(i)) for i in range(300)}
    file = TorchFile(saved(tmp_path, tensors, pickle_protocol=protocol))
    assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


class Call:
    """What a pickle may do: on loading, it would make a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", ["instead", "beside"])
def test_calls_are_refused_and_not_made(tmp_path, where, protocol):
    call = Call(tmp_path / "made")
    value = call if where == "instead" else {"a": torch.zeros(2), "b": call}
    with pytest.raises(WeightsError, match=r"names posix\.mkdir"):
        TorchFile(saved(tmp_path, value, pickle_protocol=protocol))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, "'a' is not a tensor"),
        ([torch.zeros(1)], "opcode"),
        ({1: torch.zeros(1)}, "by name"),
        ({"a": {"b": torch.zeros(1)}}, "'a' is not a tensor"),
        ({"a": collections.Counter()}, r"names collections\.Counter"),
        (torch.zeros(1), "by name"),
    ],
)
def test_other_values_are_refused(tmp_path, value, text):
    with pytest.raises(WeightsError, match=text):
        TorchFile(saved(tmp_path, value))


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02(((.",
        b"\x80\x02h\x05.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x02t.",
        b"\x80\x02}u.",
        b"\x80\x02cbuiltins\neval\nq\x00.",
        b"\x80\x02ccollections\nOrderedDict\n(X\x01\x00\x00\x00atR.",
        b"\x80\x02" + b"(" * 100 + b".",
        b"\x80\x09}.",
        b"\x80\x02}X\x01\x00\x00\x00aN\x81.",
        b"ios\nsystem\n.",
    ],
)
def test_damaged_programs_are_refused(program):
    with pytest.raises(PickleRefusedError):
        read_described(program)


def test_every_cut_and_changed_byte_is_refused_or_read(tmp_path):
    path = saved(tmp_path, {"a": torch.zeros(3), "b": torch.ones(2, 2)})
    with zipfile.ZipFile(path) as archive:
        program = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    for at in range(len(program)):
        with pytest.raises(PickleRefusedError):
            read_described(program[:at])
        for byte in (0, ord("R"), ord("c"), 255):
            try:
                read_described(program[:at] + bytes([byte]) + program[at + 1 :])
            except PickleRefusedError:
                continue


def changed(path: Path, change) -> Path:
    """The archive with its entries changed by `change(name, bytes) -> bytes or None`."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if (new := change(name, data)) is not None:
                archive.writestr(name, new)
    return path


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda name, data: data[:-4] if "/data/0" in name else data, "size"),
        (lambda name, data: None if "/data/0" in name else data, "lacks storage"),
        (lambda name, data: None if name.endswith("data.pkl") else data, "no data.pkl"),
        (lambda name, data: b"big" if name.endswith("byteorder") else data, "little-endian"),
    ],
)
def test_archives_that_do_not_fit_are_refused(tmp_path, change, text):
    with pytest.raises(WeightsError, match=text):
        TorchFile(changed(saved(tmp_path, {"a": torch.zeros(3)}), change))


def test_an_archive_of_another_writer_may_not_align(tmp_path):
    path = changed(saved(tmp_path, {"a": torch.arange(5.0)}), lambda name, data: data)
    assert TorchFile(path).get_tensor("a").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_old_files_and_others_are_refused(tmp_path):
    old = saved(tmp_path, {"a": torch.zeros(3)}, _use_new_zipfile_serialization=False)
    with pytest.raises(WeightsError, match="cannot be read"):
        TorchFile(old)
    old.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(WeightsError, match="cannot be read"):
        TorchFile(old)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    def grown(name, data):
        return data.replace(b"K\x03\x85", b"K\x04\x85") if name.endswith("data.pkl") else data

    with pytest.raises(WeightsError, match="larger than its storage"):
        TorchFile(changed(saved(tmp_path, {"a": torch.zeros(3)}), grown))
