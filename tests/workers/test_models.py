"""Models equal transformers: logits and greedy output of every family and shape, a dense attention in the runner's place."""

import functools
import io
import sys
import types

import msgspec
import pytest
import tiny_models
import torch
import torch.nn.functional as F

from quire.workers.attention.kv_cache import KVCache
from quire.workers.attention.rope import cos_sin_table
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError, RopeConfig, read_model_config
from quire.workers.runner import ModelRunner

PROMPT = torch.randint(4, tiny_models.VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(7), dtype=torch.int32)
NEW_TOKENS = 64
ROUNDING = 6e-5  # of logits up to 8: in float32 both lie up to 4e-5 from what float64 gives
SCALED = [name for name in tiny_models.MODELS if name.endswith(("-linear", "-llama3", "-yarn"))]
SLIDING = ["mistral-sliding", "mistral-linear", "qwen2-mixed", "qwen3-mixed"]


class DenseAttention:
    """What the runner passes to a model's forward, over one whole sequence: QK-norm, rotation, masked softmax; no cache."""

    def __init__(self, config):
        self.config = config
        self.table = cos_sin_table(config, tiny_models.MAX_POSITIONS)

    def __call__(self, layer, qkv, q_norm, k_norm):
        c, length = self.config, qkv.shape[0]
        q, k, v = qkv.split([c.q_size, c.kv_size, c.kv_size], dim=-1)
        q, k, v = (x.view(length, -1, c.head_dim) for x in (q, k, v))
        if q_norm is not None:
            q = F.rms_norm(q, (c.head_dim,), q_norm, c.rms_norm_eps)
            k = F.rms_norm(k, (c.head_dim,), k_norm, c.rms_norm_eps)
        q, k = self.rotate(q), self.rotate(k)
        groups = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | ((distance >= c.windows[layer]) if c.windows[layer] else False)
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, -1)

    def rotate(self, x):
        cos, sin = self.table[: x.shape[0], None, :].chunk(2, dim=-1)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


@functools.cache
def loaded(name):
    folder = tiny_models.tiny_model(name)
    config = read_model_config(folder)
    model = build_model(config, torch.float32, "cpu")
    load_weights(model, folder, "cpu")
    return model, DenseAttention(config)


def logits(name, ids):
    model, attention = loaded(name)
    with torch.inference_mode():
        hidden = model.forward(ids, torch.arange(len(ids), dtype=torch.int32), attention)
        assert hidden.shape == (len(ids), model.config.hidden_size)
        return model.compute_logits(hidden)


def greedy_reference(name):
    with torch.inference_mode():
        out = tiny_models.reference(name).generate(
            PROMPT.long()[None],
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0].int()


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_the_weights_are_large(name):
    """See tiny_models: under small ones the tests of equality would be blind."""
    small = [key for key, p in tiny_models.reference(name).named_parameters() if p.dim() == 2 and p.std() < 0.2]
    assert small == []


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_family_has_models_of_every_shape(family):
    names = [name for name, (of, _) in tiny_models.MODELS.items() if of == family]
    configs = [read_model_config(tiny_models.tiny_model(name)) for name in names]
    assert {c.family for c in configs} == {family}
    assert {c.num_kv_heads < c.num_heads for c in configs} == {True, False}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert {c.rope.type for c in configs} >= {"default", "yarn"}
    windows = {"llama": [{0}], "mistral": [{0}, {16}], "qwen2": [{0}, {0, 12}], "qwen3": [{0}, {0, 20}]}[family]
    assert all(wanted in [set(c.windows) for c in configs] for wanted in windows)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_logits_and_greedy_output_equal_transformers(name):
    sequence = greedy_reference(name)
    ours = logits(name, sequence)
    with torch.inference_mode():
        theirs = tiny_models.reference(name)(sequence.long()[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=1e-5)
    # One causal pass over the reference's output shows the same greedy choice at every step.
    assert torch.equal(ours[len(PROMPT) - 1 : -1].argmax(-1).int(), sequence[len(PROMPT) :])
    assert len(set(sequence[len(PROMPT) :].tolist())) >= 16, "the model repeats itself: a test of it sees nothing"


def wrong_greedy_tokens(name, config):
    """How many greedy tokens change when the attention follows another config: would the test above see such a fault?"""
    sequence = greedy_reference(name)
    model, _ = loaded(name)
    with torch.inference_mode():
        hidden = model.forward(sequence, torch.arange(len(sequence)), DenseAttention(config))
        choice = model.compute_logits(hidden)[len(PROMPT) - 1 : -1].argmax(-1)
    return (choice != sequence[len(PROMPT) :]).sum().item()


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("change", [lambda window: 0, lambda window: window + 1, lambda window: window - 1])
def test_a_wrong_window_would_be_seen(name, change):
    config = loaded(name)[0].config
    windows = tuple(change(window) if window else 0 for window in config.windows)
    assert wrong_greedy_tokens(name, msgspec.structs.replace(config, windows=windows)) > 4


@pytest.mark.parametrize("name", SCALED)
def test_a_forgotten_rope_scaling_would_be_seen(name):
    config = loaded(name)[0].config
    assert wrong_greedy_tokens(name, msgspec.structs.replace(config, rope=RopeConfig(theta=config.rope.theta))) > 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype):
    folder = tiny_models.tiny_model("qwen3")
    config = read_model_config(folder)
    model = build_model(config, dtype, "cpu")
    load_weights(model, folder, "cpu")
    dense = DenseAttention(config)

    def attention(layer, qkv, q_norm, k_norm):
        return dense(layer, qkv.float(), q_norm.float(), k_norm.float()).to(dtype)

    with torch.inference_mode():
        ours = model.compute_logits(model.forward(PROMPT, torch.arange(len(PROMPT)), attention))
    assert ours.dtype == dtype
    assert F.cosine_similarity(ours.float(), logits("qwen3", PROMPT), dim=-1).min() > 0.995


def test_head_sizes_without_a_gpu_kernel_are_refused_on_a_gpu():
    config = read_model_config(tiny_models.tiny_model("llama"))
    with pytest.raises(ModelConfigError, match="head_dim 16 is not supported on a GPU"):
        build_model(config, torch.float32, "cuda")


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-mixed"])
def test_some_layers_alone_meet_all_that_is_to_be_compiled(name):
    """Of each group of the KV cache the first two: one adds to a residual, the first of all has none yet."""
    model, attention = loaded(name)
    cache = KVCache(model.config, 16, torch.float32)
    runner = types.SimpleNamespace(ctx=types.SimpleNamespace(cache=cache), model=model)
    groups = [place.group for place in cache.places]
    seen = []

    def attend(layer, *args):
        seen.append(layer)
        return attention(layer, *args)

    ids = PROMPT[:5]
    whole = model(ids, torch.arange(5), attention)
    with ModelRunner.short_model(runner):
        model(ids, torch.arange(5), attend)
    assert seen[0] == 0 and {groups[layer] for layer in seen} == set(groups)
    assert all([groups[layer] for layer in seen].count(g) == min(2, groups.count(g)) for g in set(groups))
    assert torch.equal(model(ids, torch.arange(5), attention), whole)  # all layers are back


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-mixed"])
def test_the_wanted_tokens_alone_are_what_they_are_among_all(name):
    """In any order, one twice; keys and values are there for all tokens."""
    model, attention = loaded(name)
    ids, wanted = PROMPT[:9], torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    attended = []

    def attend(layer, qkv, *norms):
        attended.append(len(qkv))
        return attention(layer, qkv, *norms)

    some = model(ids, torch.arange(9), attend, wanted)
    torch.testing.assert_close(some, model(ids, torch.arange(9), attention)[wanted.long()], rtol=1e-5, atol=1e-5)
    assert attended == [9] * len(model.model.layers)


def test_a_tied_head_owns_no_weight():
    model, _ = loaded("qwen2-tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "wanted", "shown"), [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)]
)
def test_a_bar_over_bytes_is_shown_on_a_terminal_unless_it_is_not_wanted(monkeypatch, stream, wanted, shown):
    folder = tiny_models.tiny_model("llama")
    model = build_model(read_model_config(folder), torch.float32, "cpu")
    monkeypatch.setattr(sys, "stderr", stream())
    num_bytes = load_weights(model, folder, "cpu", progress=wanted)
    text = sys.stderr.getvalue()
    assert num_bytes == sum(p.numel() * 4 for p in model.parameters())
    if shown:
        assert "Loading weights: 100%" in text and f"{num_bytes / 1000:.0f}k/" in text
    else:
        assert text == ""
