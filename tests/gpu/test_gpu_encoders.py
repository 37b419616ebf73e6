"""On a GPU: vectors of encoders are the CPU's, alone and in company, in float32 and nearly so in bfloat16."""

import numpy as np
import pytest
import torch
import transformers
from encoder_cases import SMALL, build, texts
from inline_engine import InlineEngine

pytestmark = pytest.mark.gpu

WIDE = {**SMALL, "hidden_size": 256, "intermediate_size": 320, "max_position_embeddings": 600}  # heads of 64
LENGTHS = [3, 20, 512, 1, 40, 511, 7, 64, 65, 130]
MODELS = {
    "bert": (transformers.BertModel, transformers.BertConfig, {}),
    "mpnet": (transformers.MPNetModel, transformers.MPNetConfig, {}),
    "xlm-roberta": (transformers.XLMRobertaModel, transformers.XLMRobertaConfig, {"pad_token_id": 1}),
    "modernbert": (
        transformers.ModernBertModel,
        transformers.ModernBertConfig,
        {"local_attention": 32, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    ),
}


def engine_of(folder, device, dtype=torch.float32):
    return InlineEngine(folder, device=device, dtype=dtype, pooling={}, budget=600, max_model_len=512)


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_the_cpus(name, tmp_path):
    model, config, more = MODELS[name]
    build(model, config(**{**WIDE, **more})).save_pretrained(tmp_path)
    rows = texts(LENGTHS)
    want = np.stack(engine_of(tmp_path, "cpu").pool(rows))
    on_gpu = engine_of(tmp_path, "cuda")
    assert np.abs(np.stack(on_gpu.pool(rows)) - want).max() < 1e-4
    assert max(np.abs(on_gpu.pool([row])[0] - one).max() for row, one in zip(rows, want, strict=True)) < 1e-4
    rounded = np.stack(engine_of(tmp_path, "cuda", torch.bfloat16).pool(rows))
    assert np.median((rounded * want).sum(1)) > 0.95  # weights this large pass small differences on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_are_equal_and_near_eager_ones(name, dtype, tmp_path):
    model, config, more = MODELS[name]
    build(model, config(**{**WIDE, **more})).save_pretrained(tmp_path)
    rows, eager = texts(LENGTHS), engine_of(tmp_path, "cuda", dtype)
    graphed = InlineEngine(tmp_path, device="cuda", dtype=dtype, pooling={}, budget=600, max_model_len=512, graphs=True)
    first, second, third = (np.stack(graphed.pool(rows)) for _ in range(3))  # captured, then replayed
    assert np.array_equal(first, second) and np.array_equal(second, third)
    assert (first * np.stack(eager.pool(rows))).sum(1).min() > (0.999999 if dtype == torch.float32 else 0.999)
    assert graphed.model.graphs is not None and graphed.model.graphs._graphs
