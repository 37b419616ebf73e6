"""jina-embeddings-v3 with an adapter for each task: rows of one batch are as if their task were merged into the weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from encoder_cases import POSITIONS, texts
from inline_engine import InlineEngine
from jina_checkpoints import V3_TASKS, write_jina_v3
from safetensors.torch import load_file, save_file

from quire.enginecore.adapters.start import read_modules
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.jina_v3_adapters import MARK, read_adapters
from quire.enginecore.loading.task_adapters import with_task_adapters
from quire.ipc.config import EngineConfig
from quire.ipc.lora_flags import parse_module

CONFIG = EngineConfig(enable_lora=True)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(made))
        yield made / "quire" / "tasks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made, _ = write_jina_v3(tmp_path_factory.mktemp("v3"))
    return made


def engine_of(folder, adapters=None, **overrides):
    sizes = {"budget": POSITIONS, "max_model_len": POSITIONS, "enable_prefix_caching": adapters is None}
    return InlineEngine(folder, pooling={}, **sizes, model_options={"overrides": overrides}, adapters=adapters)


def test_each_row_has_its_own_task(folder):
    config, tasks = with_task_adapters(CONFIG, folder)
    limits, start = read_modules(config, tasks)
    assert list(start.plans) == V3_TASKS == list(limits.tasks) and limits.default is None and limits.has_embedding
    rows, engine = texts([1, 9, 30]), engine_of(folder, limits)
    for slot, plan in enumerate(start.plans.values()):
        engine.load_adapter(plan.file.folder, slot)
    names = [engine.add_pool(rows, adapter=slot) for slot in (2, -1, 0, 1)]
    engine.run()
    found = [[np.concatenate(engine.pooled[name << 8 | i]) for i in range(3)] for name in names]
    for ours, task in zip(found, (V3_TASKS[2], None, *V3_TASKS[:2]), strict=True):
        for got, want in zip(ours, engine_of(folder, **({} if task is None else {"jina_task": task})).pool(rows), strict=True):
            assert np.abs(got - want).max() < 1e-5, task
    assert min(np.abs(one[1] - other[1]).max() for one in found for other in found if one is not other) > 1e-2


def test_what_cannot_be_served_is_said(folder, tmp_path):
    merged, none = with_task_adapters(EngineConfig(enable_lora=True, hf_overrides={"jina_task": "separation"}), folder)
    assert not none.names and not merged.lora_modules, "one task is merged"
    fields, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def refused(said, changed=fields, without="", half="none"):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        kept = {name: tensor for name, tensor in tensors.items() if not without or without not in name}
        kept = {name: tensor.half() if half in name else tensor for name, tensor in kept.items()}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ModelFilesError, match=said):
            with_task_adapters(CONFIG, tmp_path)

    refused("no adapters of tasks", without="lora_")
    refused(r"mlp\.fc1 lacks adapters of 3 tasks", without="0.mlp.fc1.parametrizations.weight.0.lora_B")
    refused("lacks adapters of 4 tasks", {**fields, "lora_adaptations": [*V3_TASKS, "more"]})
    refused("have several types: F16, F32", half="token_type_embeddings")
    refused("no name of a task", {**fields, "lora_adaptations": [*V3_TASKS[:2], "../x"]})


@pytest.mark.parametrize(
    ("offsets", "length", "said"),
    [
        ([0, 24], None, "lies at 0 to 24 of 16 bytes"),
        ([8, 0], None, "lies at 8 to 0 of 16 bytes"),
        ([-8, 0], None, "lies at -8 to 0 of 16 bytes"),
        ([0, 16], 1 << 63, "its header has 9223372036854775808 bytes; at most 16777216 are read"),
        ([0, "x"], None, "cannot be read"),
    ],
)
def test_a_file_that_lies_about_its_bytes_is_refused(tmp_path, offsets, length, said):
    header = json.dumps({f"x{MARK}A": {"dtype": "F32", "shape": [1, 2, 2], "data_offsets": offsets}}).encode()
    file = (length or len(header)).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(file)
    with pytest.raises(ModelFilesError, match=said):
        read_adapters(tmp_path, ["task"])


def placed(folder):
    """The folder with the tasks' adapters, and of each file its bytes and its inode."""
    config, _ = with_task_adapters(CONFIG, folder)
    place = Path(parse_module(config.lora_modules[0]).path).parent
    files = sorted(path for path in place.rglob("*") if path.is_file())
    return place, {str(path.relative_to(place)): path.read_bytes() for path in files}, [path.stat().st_ino for path in files]


def test_all_engines_find_the_same_files_and_mend_what_is_missing(folder, cache, tmp_path, monkeypatch):
    place, files, inodes = placed(folder)
    assert place.parent == cache and len(files) == 6 and placed(folder) == (place, files, inodes)
    left = place.with_suffix(".part")
    for harm in (lambda path: path.unlink(), lambda path: path.write_bytes(b"")):
        harm(place / V3_TASKS[1] / "adapter_model.safetensors")
        (left / "x").mkdir(parents=True)  # of an engine that was killed
        assert placed(folder)[:2] == (place, files) and not left.exists()
    fields = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"lora_alpha": 2}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    other, changed, _ = placed(tmp_path)
    assert other.parent == cache and other != place and changed != files
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "config.json"))
    refused, again, _ = placed(folder)
    assert refused.name.startswith("quire-tasks-") and again == files
