"""jina-embeddings-v3 with an adapter for each task: rows of one batch are as if their task were merged into the weights."""

import json

import numpy as np
import pytest
from encoder_cases import POSITIONS, texts
from inline_engine import InlineEngine
from jina_checkpoints import V3_TASKS, write_jina_v3
from safetensors.torch import load_file, save_file

from quire.enginecore.adapters.start import read_modules
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.task_adapters import with_task_adapters
from quire.ipc.config import EngineConfig

CONFIG = EngineConfig(enable_lora=True)


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

    def refused(said, changed=fields, without=""):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        kept = {name: tensor for name, tensor in tensors.items() if not without or without not in name}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ModelFilesError, match=said):
            with_task_adapters(CONFIG, tmp_path)

    refused("no adapters of tasks", without="lora_")
    refused(r"mlp\.fc1 lacks adapters of 3 tasks", without="0.mlp.fc1.parametrizations.weight.0.lora_B")
    refused("lacks adapters of 4 tasks", {**fields, "lora_adaptations": [*V3_TASKS, "more"]})
    refused("no name of a task", {**fields, "lora_adaptations": [*V3_TASKS[:2], "../x"]})
