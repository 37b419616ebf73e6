"""Attention of layers that differ: one object a spec, KV groups by window and cache shape, launches a step as few as can be."""

import functools
import types

import inline_engine
import msgspec
import pytest
import torch
from kv_kinds import kinds_of
from step_contexts import context_of
from tiny_models import tiny_model
from workers.test_models import PROMPT, DenseAttention

from quire.ipc.sampling import SamplingParams
from quire.workers.attention.kv_cache import KVCache, Place
from quire.workers.models.config import NO_ATTENTION, AlibiConfig, CacheSpec, RopeConfig
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel


def changed(config, *changes):
    """A layer for each change of the first layer's attention."""
    replace = msgspec.structs.replace
    first = config.layers[0]
    layers = tuple(replace(first, attention=replace(first.attention, **change)) for change in changes)
    return replace(config, layers=layers)


DIFFERENT = (
    {},
    {"window": 10},
    {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "scale": 0.3},
    {"window": 10, "rope": RopeConfig(theta=500.0)},
    {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "qk_norm_eps": 1e-3},
    {"scale": 0.5},
)


SHAPED = (
    {"softcap": 2.0},
    {"has_sinks": True, "window": 10, "rope": RopeConfig(rotary_dim=8, interleaved=True)},
    {"alibi": AlibiConfig(slopes=(0.5, 0.1, 0.25, 0.01)), "rope": None},
    {"alibi": AlibiConfig(slopes=(0.5, 0.1, 0.3, 0.01), scale=0.5, is_rounded=True), "rope": None, "softcap": 5.0},
    {"qk_norm_eps": 1e-3, "qk_norm_weighs": "plus_one", "rope": RopeConfig(interleaved=True)},
    {"qk_norm_eps": 1e-3, "qk_norm_weighs": "wide", "rope": RopeConfig(rotary_dim=4)},
    {"window": 10, "is_chunked": True},
    {"rope": RopeConfig(type="proportional", proportion=0.25)},
)


def specs_of(*changes):
    return changed(read_model_config(tiny_model("llama")), *changes).attention_specs(Parallel())


def test_layers_share_a_block_table_if_window_and_cache_shape_are_equal():
    cache = KVCache(specs_of(*DIFFERENT), 16, torch.float32)
    assert [(group.spec, group.layers) for group in cache.groups] == [
        (CacheSpec(0, 2, 16), [0, 5]),
        (CacheSpec(0, 4, 8), [2, 4]),
        (CacheSpec(10, 2, 16), [1, 3]),
    ]
    # of one shape, the i-th layers of all groups share a tensor: a block is one group's at a time
    assert cache.places == [Place(0, 0), Place(2, 0), Place(1, 2), Place(2, 1), Place(1, 3), Place(0, 1)]
    cache.allocate(3, torch.device("cpu"))
    assert [tuple(k.shape) for k in cache.k] == [(3, 2, 16, 16)] * 2 + [(3, 4, 16, 8)] * 2
    assert cache.block_bytes == sum(x[0].nbytes for x in (*cache.k, *cache.v)) and cache.kinds == kinds_of((0, 0, 10))


def test_a_layer_without_attention_has_no_place_in_the_cache():
    (spec,) = specs_of({})
    cache = KVCache([NO_ATTENTION, spec, NO_ATTENTION, spec], 16, torch.float32)
    assert [group.layers for group in cache.groups] == [[1, 3]] and cache.own_specs == [spec]
    assert cache.block_bytes == KVCache([spec, spec], 16, torch.float32).block_bytes
    assert NO_ATTENTION.on_rank(Parallel(0, 2)) == NO_ATTENTION


def test_a_model_without_attention_has_no_group_and_blocks_of_no_bytes():
    cache = KVCache([NO_ATTENTION] * 3, 16, torch.float32)
    cache.allocate(1, torch.device("cpu"))
    assert (cache.groups, cache.kinds, cache.block_bytes, cache.k) == ([], (), 0, [])


def test_a_layer_that_reads_anothers_keys_and_values_has_its_place_and_no_memory():
    specs = specs_of({}, {"window": 10}, {"window": 10, "shares": 1}, {"window": 10, "is_chunked": True}, {"shares": 0})
    cache = KVCache(specs, 16, torch.float32)
    assert [(group.spec, group.layers) for group in cache.groups] == [
        (CacheSpec(0, 2, 16), [0]),
        (CacheSpec(10, 2, 16), [1]),
        (CacheSpec(10, 2, 16, True), [3]),
    ]
    assert cache.places == [Place(0, 0), Place(1, 0), Place(1, 0), Place(2, 0), Place(0, 0)]
    assert cache.block_bytes == KVCache(specs[:1], 16, torch.float32).block_bytes


@pytest.mark.parametrize("changes", [DIFFERENT, SHAPED], ids=["different", "shaped"])
@pytest.mark.parametrize("scheduling", [{}, {"budget": 9}, {"num_blocks": 40, "look_ahead": False}])
def test_a_model_of_layers_that_differ_equals_a_dense_pass(scheduling, changes, monkeypatch):
    config = changed(read_model_config(tiny_model("llama")), *changes)
    monkeypatch.setattr(inline_engine, "read_model_config", lambda folder: config)
    engine = inline_engine.InlineEngine("", dummy=True, **scheduling)
    prompts = [PROMPT.tolist(), PROMPT.tolist()[5:12], [7]]
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    dense = DenseAttention(config.attention_specs(Parallel()))
    for prompt, out in zip(prompts, outputs, strict=True):
        ids = torch.tensor(prompt + out[:-1], dtype=torch.int32)
        with torch.inference_mode():
            logits = engine.model.compute_logits(engine.model(ids, context_of(dense, torch.arange(len(ids)))))[
                len(prompt) - 1 :
            ]
        chosen = logits.gather(1, torch.tensor(out)[:, None])[:, 0]
        assert (chosen >= logits.max(-1).values - 1e-4).all() and len(set(out)) > 5


# ------------------------------------------------------------------------------------------- on a GPU, its kernels recorded
@pytest.fixture
def cuda(monkeypatch):
    """workers.attention.cuda without a GPU: `calls` has (kernel, what matters of its arguments)."""
    pytest.importorskip("triton")
    from quire.workers.attention import cuda

    calls, limits = [], []  # limits: of the rows that prefill attention is given
    ahead = []  # the last keys that prefill attention is told that its queries see
    space = types.SimpleNamespace

    def record(name, *keep):
        def call(*args, **kwargs):
            calls.append((name, *(kwargs[key] if isinstance(key, str) else args[key] for key in keep)))
            if name == "prefill_schedule":
                limits.append(args[-1])
            if name == "prefill":
                ahead.append(kwargs["last_visible"])

        return call

    decode = functools.partial(
        space, new_schedule=lambda window, is_chunked: ("schedule", window), launch=lambda rows: rows > 4
    )
    monkeypatch.setattr(cuda, "DecodeWorkspace", space(allocate=lambda rows, *shape, cache_dtype: decode(shape=shape[:4])))
    monkeypatch.setattr(
        cuda, "PrefillWorkspace", space(allocate=lambda rows, tokens, *shape, cache_dtype: space(shape=shape[:3]))
    )
    monkeypatch.setattr(cuda, "decode_schedule", record("decode_schedule", 1))
    monkeypatch.setattr(cuda, "prefill_schedule", record("prefill_schedule", "window"))
    monkeypatch.setattr(cuda, "decode_attention", record("decode", "schedule", "scale"))
    monkeypatch.setattr(cuda, "prefill_attention", record("prefill", "window", "scale"))
    monkeypatch.setattr(cuda, "rope_kv", record("rope_kv", 9))
    monkeypatch.setattr(cuda, "can_fuse", lambda workspace, *rest: workspace.shape[3] == 1)
    monkeypatch.setattr(cuda, "mode_for", lambda tokens: 0)
    return space(module=cuda, calls=calls, limits=limits, ahead=ahead)


def cuda_attention(cuda, specs, cache=None, max_samples=0, dtype=torch.float32):
    cache = cache or KVCache(specs, 16, dtype)
    cache.allocate(2, torch.device("cpu"))
    sizes = {"max_blocks": 4, "max_model_len": 64, "max_rows": 8, "max_tokens": 32, "max_samples": max_samples}
    ctx = types.SimpleNamespace(cache=cache, **sizes, device=torch.device("cpu"), dtype=dtype)
    return cuda.module.CudaModelAttention(ctx)


def run_step(attention, specs, tokens, rows, decode_rows, sees_ahead=False, **more):
    zeros = torch.zeros(64, dtype=torch.int32)
    step = types.SimpleNamespace(
        num_decode_rows=zeros[:1], query_start=zeros, seq_lens=zeros, row_slots=zeros, positions=zeros,
        slot_mapping=torch.zeros(3, 64, dtype=torch.int64), last_visible=zeros, sees_ahead=sees_ahead,
    )  # fmt: skip
    tables = types.SimpleNamespace(block_table=torch.zeros(3, 9, 4, dtype=torch.int32))
    attention.begin(tables, step, tokens, rows, decode_rows, **more)
    for layer, spec in enumerate(specs):
        norm = None if spec.qk_norm_eps is None else torch.ones(spec.head_dim)
        out = attention.attend(layer, torch.zeros(tokens, spec.q_size + 2 * spec.kv_size), norm, norm)
        assert out.shape == (tokens, spec.q_size)
    assert not step.sees_ahead  # the next step says so itself


WINDOWED = ({}, {"window": 10}, {}, {"window": 10})  # as Qwen2 with two KV groups


@pytest.mark.parametrize(
    ("step", "launched"),
    [
        ((4, 4, 4), ["decode_schedule"] * 2 + ["decode"] * 4),
        ((1, 1, 1), ["decode_schedule"] * 2 + ["rope_kv", "decode"] * 4),
        ((9, 2, 0), ["prefill_schedule"] + ["rope_kv", "prefill"] * 4),
        ((9, 4, 2), ["decode_schedule"] * 2 + ["prefill_schedule"] + ["rope_kv", "decode", "prefill"] * 4),
        ((16, 4, None), ["decode_schedule"] * 2 + ["prefill_schedule"] + ["rope_kv", "decode", "prefill"] * 4),
    ],
)
def test_a_step_launches_one_schedule_for_each_window_and_one_for_prefill(cuda, step, launched):
    specs = specs_of(*WINDOWED)
    run_step(cuda_attention(cuda, specs), specs, *step)
    assert [name for name, *_ in cuda.calls] == launched
    schedules = [call[1] for call in cuda.calls if call[0] == "decode_schedule"]
    assert schedules in ([], [("schedule", 0), ("schedule", 10)])
    assert [call[1:] for call in cuda.calls if call[0] == "decode"] in ([], [(("schedule", w), 0.25) for w in (0, 10, 0, 10)])
    assert [call[1] for call in cuda.calls if call[0] == "prefill"] in ([], [0, 10, 0, 10])


@pytest.mark.parametrize(
    ("dtype", "heads", "step", "launched"),
    [
        (torch.float16, 4, (9, 9, 9), ["decode_schedule", "rope_kv", "decode"]),
        (torch.float16, 4, (16, 9, None), ["decode_schedule", "prefill_schedule", "rope_kv", "decode", "prefill"]),
        (torch.float16, 32, (9, 9, 9), ["prefill_schedule", "rope_kv", "prefill"]),  # 16 heads, 16 tokens: 256 rows of a tile
        (torch.float32, 4, (9, 9, 9), ["prefill_schedule", "rope_kv", "prefill"]),
        (torch.float32, 4, (16, 9, None), ["prefill_schedule", "rope_kv", "prefill"]),
    ],
)
def test_rows_with_drafts_have_a_workspace_or_are_prefill_rows(cuda, dtype, heads, step, launched):
    specs = specs_of({"num_heads": heads})
    attention = cuda_attention(cuda, specs, max_samples=16, dtype=dtype)
    run_step(attention, specs, *step, windows=True)
    assert [name for name, *_ in cuda.calls] == launched
    takes_all = [launched[0] == "prefill_schedule"] * len(cuda.limits)
    assert [limit is None for limit in cuda.limits] == takes_all
    cuda.calls.clear()
    run_step(attention, specs, 4, 4, 4)  # a step without drafts is what it was
    assert [name for name, *_ in cuda.calls] == ["decode_schedule", "decode"]


def test_what_layers_have_in_common_they_share(cuda):
    specs = specs_of(*DIFFERENT)
    attention = cuda_attention(cuda, specs)
    run_step(attention, specs, 9, 4, 2)
    count = [name for name, *_ in cuda.calls].count
    assert (count("decode_schedule"), count("prefill_schedule")) == (3, 2)  # by shape and window, by shape
    assert [call[2] for call in cuda.calls if call[0] == "decode"] == [0.25, 0.25, 0.3, 0.25, 0.25, 0.5]
    assert [call[1] for call in cuda.calls if call[0] == "rope_kv"] == [0.0, 0.0, 0.0, 0.0, 1e-3, 0.0]
    assert len(set(map(id, attention._layers))) == 6 and len(attention.workspaces) == 2


def test_kernels_get_the_scales_of_layers_whose_cache_has_8_bits(cuda, monkeypatch):
    """Each dtype has its workspace, all share the tables; the rotation of decode steps is fused."""
    specs, scaled = specs_of({}, {"cache_dtype": "fp8_e4m3"}, {"cache_dtype": "fp8_e4m3"}), types.SimpleNamespace(k=0.5, v=None)
    cache = KVCache(specs, 16, torch.float32, {1: scaled, 2: types.SimpleNamespace(k=None, v=None)})
    assert len(cache.groups) == 1 and cache.places == [Place(0, 0), Place(0, 1), Place(0, 2)]
    calls = []

    def scales(name):
        return lambda *args, k_scale=None, v_scale=None, **kwargs: calls.append((name, k_scale, v_scale))

    for name in ("decode_attention", "prefill_attention"):
        monkeypatch.setattr(cuda.module, name, scales(name))
    monkeypatch.setattr(cuda.module, "rope_kv", lambda *args, **kwargs: calls.append(("rope_kv", *args[10:])))
    monkeypatch.setattr(cuda.module, "can_fuse", lambda *args: True)
    attention = cuda_attention(cuda, specs, cache)
    run_step(attention, specs, 9, 4, 2)
    run_step(attention, specs, 4, 4, 4)
    assert len(attention.workspaces) == 2
    numbers = [(name, *(x if x is None else float(x) for x in rest)) for name, *rest in calls]
    of_layers = [(None, None), (0.5, 1.0), (1.0, 1.0)]
    mixed = [(name, *s) for s in of_layers for name in ("rope_kv", "decode_attention", "prefill_attention")]
    assert numbers == mixed + [("decode_attention", *s) for s in of_layers]


def test_with_windows_alone_prefill_need_not_look_further_than_the_widest(cuda):
    specs = specs_of({"window": 10}, {"window": 20})
    run_step(cuda_attention(cuda, specs), specs, 9, 2, 0)
    assert ("prefill_schedule", 20) in cuda.calls


def test_layers_are_told_of_keys_behind_their_queries_in_steps_that_have_some(cuda):
    specs = specs_of({"window": 10, "sees_ahead": True}, {"window": 10}, {"sees_ahead": True})
    attention = cuda_attention(cuda, specs)
    run_step(attention, specs, 9, 2, 0, sees_ahead=True)
    assert [None if last is None else len(last) for last in cuda.ahead] == [9, None, 9]
    cuda.ahead.clear()
    run_step(attention, specs, 9, 2, 0)
    assert cuda.ahead == [None] * 3
