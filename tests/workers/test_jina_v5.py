"""jina-embeddings-v5: Qwen3's or EuroBERT's layers with one task's adapter, as transformers' layers with the sum in place."""

import json

import numpy as np
import pytest
import torch
from encoder_cases import HIDDEN, POSITIONS, texts, their_hidden
from inline_engine import InlineEngine
from jina_checkpoints import write_jina_v5

from quire.ipc.adapters import AdapterLimits
from quire.ipc.encoders import BY_REQUEST
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.config import ModelConfigError

F = torch.nn.functional


@pytest.fixture(scope="module", params=["small", "nano"])
def jina(request, tmp_path_factory):
    """(folder, transformers' model with the task's adapter added)."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_jina_v5(folder, request.param)


def engine_of(folder, adapters=None, **overrides):
    sizes = {"budget": POSITIONS, "max_model_len": POSITIONS, "enable_prefix_caching": adapters is None}
    return InlineEngine(folder, pooling={}, **sizes, model_options={"overrides": overrides}, adapters=adapters)


def test_one_task_is_merged(jina):
    folder, theirs = jina
    rows = texts([1, 9, 30])
    found = engine_of(folder, jina_task="other").pool(rows)
    default = engine_of(folder).pool(rows)
    for row, got, other in zip(rows, found, default, strict=True):
        expected = F.normalize(their_hidden(theirs, row)[-1], dim=-1).numpy()
        assert np.abs(got - expected).max() < 1e-5 and np.abs(other - expected).max() > 1e-2
    assert found[0].shape == (HIDDEN,)


def test_tasks_of_one_batch_are_those_that_requests_choose(jina):
    """Mixed in a batch, each is as if it were merged; without one the base answers."""
    folder, _ = jina
    rows = texts([1, 9, 30])
    engine = engine_of(folder, adapters=AdapterLimits(max_loras=3), jina_task=BY_REQUEST)
    for slot, task in enumerate(("other", "retrieval")):
        engine.load_adapter(folder / "adapters" / task, slot)
    names = [engine.add_pool(rows, adapter=slot) for slot in (1, -1, 0)]
    engine.run()
    base, other, retrieval = (
        [np.concatenate(engine.pooled[name << 8 | i]) for i in range(3)] for name in (names[1], names[2], names[0])
    )
    for ours, task in ((other, "other"), (retrieval, "retrieval")):
        for got, want, without in zip(ours, engine_of(folder, jina_task=task).pool(rows), base, strict=True):
            assert np.abs(got - want).max() < 1e-5 and np.abs(got - without).max() > 1e-2


def test_what_cannot_be_merged_is_refused(jina):
    folder, _ = jina
    with pytest.raises(ModelConfigError, match="retrieval, other"):
        engine_of(folder, jina_task="third")
    path = folder / "adapters" / "other" / "adapter_config.json"
    given = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(given), "use_dora": True}))
        with pytest.raises(WeightsError, match="use_dora"):
            engine_of(folder, jina_task="other")
    finally:
        path.write_text(given)
