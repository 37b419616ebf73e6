"""A GPU's attention beneath whole models, in Triton's interpreter: shared keys and values, chunks, drafts, temperatures.

Kernels are tested beside; here is what workers/attention/cuda.py makes of a family's specs. Products are the CPU's.
"""

import types

import pytest
import tiny_models
import torch
from step_contexts import context_of

from quire.workers.attention.kv_cache import KVCache
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

# a prompt in two chunks, then token by token, then rows with drafts
SPANS = [(0, 9), (9, 17), *((i, i + 1) for i in range(17, 20)), (20, 24), (24, 26)]
PROMPT, FIRST_WINDOW = 17, 20
BLOCK_SIZE, MAX_BLOCKS = 16, 4
OTHERS = (
    "gemma4",
    "mistral4",
    "gemma4-joint",
    "gemma4-moe",
    "gemma3",
    "gpt-oss",
    "llama4",
    "deepseek-v3",
    "glm4-moe-lite",
    "mimo-v2",
    "ministral3",
    "falcon-rw",
)
NAMES = ["llama4-top3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def cache_of(specs):
    """What nobody has written is NaN."""
    cache = KVCache(specs, BLOCK_SIZE, torch.float32)
    cache.allocate(1 + MAX_BLOCKS * len(cache.groups), torch.device("cpu"))
    for tensor in (*cache.k, *cache.v):
        tensor[1:].fill_(float("nan"))
    table = torch.zeros(len(cache.groups), 3, MAX_BLOCKS, dtype=torch.int32)
    for group in range(len(cache.groups)):
        table[group, 1] = torch.arange(MAX_BLOCKS) + 1 + group * MAX_BLOCKS
    return cache, table


@pytest.mark.interpret
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_transformers(name, monkeypatch):
    from interpreted_engine import emulate_gpu

    from quire.workers.attention.cuda import CudaModelAttention

    emulate_gpu(monkeypatch)
    config = read_model_config(tiny_models.tiny_model(name))
    model = build_model(config, torch.float32, Parallel())
    load_weights(model, tiny_models.tiny_model(name), "cpu", progress=False)
    cache, table = cache_of(config.attention_specs(Parallel()))
    shape = {"max_blocks": MAX_BLOCKS, "max_model_len": 64, "max_rows": 2, "max_tokens": 32, "max_samples": 16}
    attention = CudaModelAttention(types.SimpleNamespace(cache=cache, device=torch.device("cpu"), dtype=torch.float32, **shape))
    ids = torch.randint(4, 500, (SPANS[-1][1],), generator=torch.Generator().manual_seed(3)).int()
    found = []
    for begin, end in SPANS:
        at = torch.arange(begin, end)
        padding, windows = (end - begin - 1 if begin >= FIRST_WINDOW else 0), begin >= FIRST_WINDOW  # rows as many as samples
        step = types.SimpleNamespace(
            positions=at.int(),
            slot_mapping=table[:, 1, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE,
            row_slots=torch.tensor([1] + [2] * padding, dtype=torch.int32),
            query_start=torch.tensor([0] + [end - begin] * (1 + padding), dtype=torch.int32),
            seq_lens=torch.tensor([end] + [0] * padding, dtype=torch.int32),
            num_decode_rows=torch.zeros(1, dtype=torch.int32),
            sees_ahead=False,
        )
        decode_rows = 1 + padding if begin >= PROMPT else 0
        tables = types.SimpleNamespace(block_table=table)
        attention.begin(tables, step, end - begin, 1 + padding, decode_rows, windows)
        with torch.inference_mode():
            found.append(model.compute_logits(model(ids[begin:end], context_of(attention.attend, at))))
    with torch.inference_mode():
        want = tiny_models.reference(name)(ids.long()[None]).logits[0]
    torch.testing.assert_close(torch.cat(found), want, atol=1e-4 * max(1.0, float(want.abs().max()) / 4), rtol=1e-5)
