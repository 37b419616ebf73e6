"""jina-embeddings-v5: Qwen3's or EuroBERT's layers with one task's adapter, as transformers' layers with the sum in place."""

import json

import numpy as np
import pytest
import torch
import transformers
from encoder_cases import HIDDEN, POSITIONS, SMALL, build, texts, their_hidden
from inline_engine import InlineEngine
from safetensors.torch import save_file

from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.config import ModelConfigError

F = torch.nn.functional
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
RANK, LAYERS = 4, ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


@pytest.fixture(scope="module", params=["small", "nano"])
def jina(request, tmp_path_factory):
    """(folder, transformers' model with the task's adapter added)."""
    folder, kv = tmp_path_factory.mktemp(request.param), {"num_key_value_heads": 2}
    if request.param == "small":
        config = transformers.Qwen3Config(**SMALL, **kv, **IDS, head_dim=8, tie_word_embeddings=True)
        theirs = build(transformers.Qwen3Model, config)
    else:
        theirs = build(transformers.EuroBertModel, transformers.EuroBertConfig(**SMALL, **kv, **IDS, mask_token_id=3))
    theirs.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5", "task_names": ["retrieval", "other"]}
    fields |= own | ({} if request.param == "small" else {"is_decoder": False})
    (folder / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(4)
    for task in ("retrieval", "other"):
        tensors, place = {}, folder / "adapters" / task
        for name, module in theirs.named_modules():
            if name.endswith(LAYERS):
                rows, columns = module.weight.shape
                a, b = (torch.randn(s, generator=generator) / 4 for s in ((RANK, columns), (rows, RANK)))
                tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
                if task == "other":
                    module.weight.data += (8 / RANK) * b @ a
        place.mkdir(parents=True)
        save_file(tensors, place / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
        (place / "adapter_config.json").write_text(json.dumps(config))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    st = "sentence_transformers.models."
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"{st}{kind}"} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder, theirs


def engine_of(folder, **overrides):
    return InlineEngine(folder, pooling={}, budget=POSITIONS, max_model_len=POSITIONS, model_options={"overrides": overrides})


def test_one_task_is_merged(jina):
    folder, theirs = jina
    rows = texts([1, 9, 30])
    found = engine_of(folder, jina_task="other").pool(rows)
    default = engine_of(folder).pool(rows)
    for row, got, other in zip(rows, found, default, strict=True):
        expected = F.normalize(their_hidden(theirs, row)[-1], dim=-1).numpy()
        assert np.abs(got - expected).max() < 1e-5 and np.abs(other - expected).max() > 1e-2
    assert found[0].shape == (HIDDEN,)


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
