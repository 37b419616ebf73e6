"""Broken folders of adapters: each is refused with an error that names what is wrong, by the process that reads folders or by
the worker that has the model."""

import os

import msgspec
import pytest
from broken_adapters import WEIGHTS, broken_folders, shapes_of, tensors_of, write_adapter
from inline_engine import InlineEngine

from quire.enginecore.adapters.folders import Folders
from quire.ipc.adapters import AdapterError, AdapterLimits
from quire.ipc.bundled import CHAT_MODEL
from quire.workers.adapters.peft import identity_of, read_adapter

LIMITS = AdapterLimits(max_loras=2)
SHAPES = shapes_of(CHAT_MODEL.folder)


@pytest.fixture
def outside(tmp_path):
    file = tmp_path / "outside"
    file.write_text("{}")
    return file


@pytest.fixture
def folders(tmp_path):
    made = Folders(LIMITS, lambda call: None)
    yield made
    made.close()


def test_each_is_refused_by_name_and_the_reader_lives_on(tmp_path, outside, folders, caplog):
    write_adapter(tmp_path / "good", tensors_of(SHAPES))
    count = 0
    for number, broken in enumerate(broken_folders(SHAPES, outside)):
        folder = tmp_path / "d" / str(number)
        broken.write(folder)
        if broken.is_late:
            assert folders.read_now(str(folder)).parts
            continue
        with pytest.raises(AdapterError) as error:
            folders.read_now(str(folder))
        said, count = str(error.value), count + 1
        assert broken.says in said and len(said) < 1000 and said.isprintable(), (broken.name, said)
        assert "another one is asked" not in caplog.text, (broken.name, "the reader has died")
    assert count > 800
    assert folders.read_now(str(tmp_path / "good")).parts


def test_what_only_the_model_or_the_values_tell_is_refused_by_the_worker(tmp_path, outside):
    engine, count = InlineEngine(CHAT_MODEL.folder, adapters=LIMITS), 0
    for number, broken in enumerate(broken_folders(SHAPES, outside)):
        if not broken.is_late:
            continue
        folder = tmp_path / str(number)
        broken.write(folder)
        with pytest.raises(AdapterError) as error:
            engine.load_adapter(folder, 0)
        assert broken.says in str(error.value), (broken.name, error.value)
        count += 1
    assert count > 400 and not engine.adapters.host_numbers
    engine.load_adapter(write_adapter(tmp_path / "good", tensors_of(SHAPES)), 0)


@pytest.mark.parametrize("lacks", [1, 100, 1 << 20])
def test_a_file_that_shrinks_while_a_worker_reads_it(tmp_path, lacks):
    """The version is right when it is compared, but the tensors' bytes are not there any more."""
    engine = InlineEngine(CHAT_MODEL.folder, adapters=LIMITS)
    folder = write_adapter(tmp_path / "a", tensors_of(SHAPES))
    plan, file = read_adapter(folder, LIMITS), folder / WEIGHTS
    os.truncate(file, max(file.stat().st_size - lacks, 0))
    descriptor = os.open(file, os.O_RDONLY)
    plan = msgspec.structs.replace(plan, file=identity_of(descriptor, str(folder)))
    os.close(descriptor)
    with pytest.raises(AdapterError, match="file has changed: it is shorter"):
        engine.adapters.load(1, 0, plan)
    assert not engine.adapters.host_numbers
