"""Models equal transformers: logits and greedy output of every family and shape, a dense attention in the runner's place."""

import functools
import io
import math
import sys

import msgspec
import pytest
import tiny_families
import tiny_mambas
import tiny_models
import torch
import torch.nn.functional as F
from step_contexts import context_of

from quire.workers.attention.latent import Latents
from quire.workers.attention.rope import cos_sin_table, query_scales
from quire.workers.loading.weights import load_weights, weight_loaders
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError, RopeConfig
from quire.workers.models.decoder import two_of_each
from quire.workers.models.family_table import FAMILIES, read_model_config
from quire.workers.parallel import Parallel
from quire.workers.recurrent.state_cache import state_cache_of

PROMPT = torch.randint(4, tiny_models.VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(7), dtype=torch.int32)
NEW_TOKENS = 64
ROUNDING = 6e-5  # of logits up to 8: in float32 both lie up to 4e-5 from what float64 gives
SCALED = [name for name in tiny_models.MODELS if name.endswith(("-linear", "-llama3", "-yarn"))]
SLIDING = ["mistral-sliding", "mistral-linear", "qwen2-mixed", "qwen3-mixed"]


class DenseAttention:
    """What the runner passes to a model's forward, over one whole sequence: QK-norm, rotation, masked softmax; no cache.

    All that an AttentionSpec may say, written plainly.
    """

    def __init__(self, specs):
        self.specs = specs
        self.kept = {}  # keys and values by layer, for those that share them
        self.tables = [cos_sin_table(spec, tiny_models.MAX_POSITIONS) for spec in specs]

    def __call__(self, layer, qkv, q_norm, k_norm, sinks=None):
        c = self.specs[layer]
        if isinstance(qkv, Latents):
            return self.of_latents(layer, qkv.queries_and_keys())
        length = qkv.shape[0]
        if c.shares is not None:
            return self.attend(
                layer, self.prepared(layer, qkv.view(length, -1, c.head_dim), q_norm), *self.kept[c.shares], sinks
            )
        q, k, v = qkv.split([c.q_size, c.kv_size, c.kv_size], dim=-1)
        q, k, v = (x.view(length, -1, c.head_dim) for x in (q, k, v))
        self.kept[layer] = self.prepared(layer, k, k_norm), v
        return self.attend(layer, self.prepared(layer, q, q_norm), *self.kept[layer], sinks)

    def prepared(self, layer, x, weight):
        """Normed and rotated."""
        c = self.specs[layer]
        if weight is not None:
            x = F.rms_norm(x, (c.head_dim,), weight + (1.0 if c.qk_norm_weighs == "plus_one" else 0.0), c.qk_norm_eps)
        return self.rotate(layer, x)

    def attend(self, layer, q, k, v, sinks):
        c, length = self.specs[layer], q.shape[0]
        if c.temperature is not None:
            q = q * query_scales(c, length)[:, None, None]
        groups = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.scale
        distance = torch.arange(length)[:, None] - torch.arange(length)
        if c.softcap:
            scores = c.softcap * torch.tanh(scores / c.softcap)
        if c.alibi is not None:
            scores = scores + self.biases(c.alibi, length)
        hidden = (distance < 0) | ((distance >= c.window) if c.window and not c.is_chunked else False)
        if c.is_chunked:
            chunks = torch.arange(length) // c.window
            hidden |= chunks[:, None] != chunks
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v).reshape(length, -1)

    def of_latents(self, layer, lines):
        """Of queries and keys [T, (Hq + 1) D], values being the last of the keys."""
        c, length = self.specs[layer], len(lines)
        q, k = self.rotate(layer, lines.view(length, -1, c.head_dim)).split([c.num_heads, 1], 1)
        if c.temperature is not None:
            q = q * query_scales(c, length)[:, None, None]
        scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * c.scale
        scores = scores.masked_fill(torch.arange(length)[:, None] < torch.arange(length), float("-inf"))
        return torch.einsum("hqk,kd->qhd", scores.softmax(-1), k[:, 0, -c.latent_dim :])

    def rotate(self, layer, x):
        rope = self.specs[layer].rope
        if rope is None:
            return x
        cos, sin = self.tables[layer][: x.shape[0], None, :].chunk(2, dim=-1)
        rotated, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
        if rope.interleaved:
            x1, x2 = rotated[..., ::2], rotated[..., 1::2]
            rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
        else:
            x1, x2 = rotated.chunk(2, dim=-1)
            rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
        return torch.cat((rotated, rest), dim=-1)

    def biases(self, alibi, length):
        slopes, keys = torch.tensor(alibi.slopes)[:, None, None], torch.arange(length)
        if alibi.is_rounded:
            return (slopes.bfloat16() * keys).float() * alibi.scale
        return slopes * keys * alibi.scale


@functools.cache
def loaded(name):
    folder = tiny_models.tiny_model(name)
    config = read_model_config(folder)
    model = build_model(config, torch.float32, Parallel())
    load_weights(model, folder, "cpu")
    return model, DenseAttention(config.attention_specs(Parallel()))


def logits(name, ids):
    model, attention = loaded(name)
    with torch.inference_mode():
        states = state_cache_of(model.config, Parallel(), torch.float32)
        states.allocate(2, torch.device("cpu"))
        hidden = model.forward(ids, context_of(attention, torch.arange(len(ids), dtype=torch.int32), states))
        assert hidden.shape == (len(ids), model.config.hidden_size)
        return model.compute_logits(hidden)


@functools.cache
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


ONE_OF_EACH = [
    name if name in tiny_models.ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in tiny_models.ALL_MODELS
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_weights_are_large(name):
    """See tiny_models: under small ones the tests of equality would be blind."""
    named = tiny_models.reference(name).named_parameters()
    matrices = [(key, p) for key, p in named if p.dim() == 2 and "vision" not in key and "visual" not in key]
    with torch.inference_mode():  # another test may have made the model in it
        assert [key for key, p in matrices if p.std() < 0.19 and "projector" not in key] == []


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_family_has_models_of_every_shape(family):
    names = [name for name, (of, _) in tiny_models.MODELS.items() if of == family]
    configs = [read_model_config(tiny_models.tiny_model(name)) for name in names]
    assert {FAMILIES[c.architecture].name for c in configs} == {family}
    specs = [layer.attention for c in configs for layer in c.layers]
    assert {spec.num_kv_heads < spec.num_heads for spec in specs} == {True, False}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert {spec.rope.type for spec in specs} >= {"default", "yarn"}
    windows = {"llama": [{0}], "mistral": [{0}, {16}], "qwen2": [{0}, {0, 12}], "qwen3": [{0}, {0, 20}]}[family]
    assert all(some in [{layer.attention.window for layer in c.layers} for c in configs] for some in windows)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_logits_and_greedy_output_equal_transformers(name):
    sequence = greedy_reference(name)
    ours = logits(name, sequence)
    with torch.inference_mode():
        theirs = tiny_models.reference(name)(sequence.long()[None]).logits[0]
    scale = max(1.0, float(theirs.abs().max()) / 4)
    torch.testing.assert_close(ours, theirs, atol=ROUNDING * scale, rtol=1e-5)
    # One causal pass over the reference's output shows the same greedy choice at every step. Where steps are clamped,
    # transformers does so in passes over prompts alone, and generates other tokens: what its pass chooses counts.
    chosen = theirs[len(PROMPT) - 1 : -1].argmax(-1).int() if name in tiny_mambas.CLAMPED else sequence[len(PROMPT) :]
    assert torch.equal(ours[len(PROMPT) - 1 : -1].argmax(-1).int(), chosen)
    least = 1 if name in tiny_families.REPETITIVE else 16
    assert len(set(sequence[len(PROMPT) :].tolist())) >= least, "the model repeats itself: a test of it sees nothing"


def wrong_greedy_tokens(name, change):
    """How many greedy tokens change when the layers' attention specs are changed: would the test above see such a fault?"""
    sequence = greedy_reference(name)
    model, attention = loaded(name)
    with torch.inference_mode():
        hidden = model.forward(
            sequence, context_of(DenseAttention([change(s) for s in attention.specs]), torch.arange(len(sequence)))
        )
        choice = model.compute_logits(hidden)[len(PROMPT) - 1 : -1].argmax(-1)
    return (choice != sequence[len(PROMPT) :]).sum().item()


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("change", [lambda window: 0, lambda window: window + 1, lambda window: window - 1])
def test_a_wrong_window_would_be_seen(name, change):
    def changed(spec):
        return msgspec.structs.replace(spec, window=change(spec.window) if spec.window else 0)

    assert wrong_greedy_tokens(name, changed) > 4


@pytest.mark.parametrize("name", SCALED)
def test_a_forgotten_rope_scaling_would_be_seen(name):
    def changed(spec):
        return msgspec.structs.replace(spec, rope=RopeConfig(theta=spec.rope.theta))

    assert wrong_greedy_tokens(name, changed) > 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype):
    folder = tiny_models.tiny_model("qwen3")
    config = read_model_config(folder)
    model = build_model(config, dtype, Parallel())
    load_weights(model, folder, "cpu")
    dense = DenseAttention(config.attention_specs(Parallel()))

    def attention(layer, qkv, q_norm, k_norm):
        return dense(layer, qkv.float(), q_norm.float(), k_norm.float()).to(dtype)

    with torch.inference_mode():
        ours = model.compute_logits(model.forward(PROMPT, context_of(attention, torch.arange(len(PROMPT)))))
    assert ours.dtype == dtype
    assert F.cosine_similarity(ours.float(), logits("qwen3", PROMPT), dim=-1).min() > 0.995


def test_head_sizes_without_a_gpu_kernel_are_refused_on_a_gpu():
    config = read_model_config(tiny_models.tiny_model("llama"))
    with pytest.raises(ModelConfigError, match="head_dim 16 is not supported on a GPU"):
        build_model(config, torch.float32, Parallel(device="cuda"))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-mixed"])
def test_some_layers_alone_meet_all_that_is_to_be_compiled(name):
    """Of each kind of layer the first two: one adds to a residual, the first of all has none yet."""
    model, attention = loaded(name)
    kinds = model.config.layers
    seen = []

    def attend(layer, *args):
        seen.append(layer)
        return attention(layer, *args)

    ids = PROMPT[:5]
    whole = model(ids, context_of(attention, torch.arange(5)))
    with model.short():
        model(ids, context_of(attend, torch.arange(5)))
    assert seen[0] == 0 and {kinds[layer] for layer in seen} == set(kinds)
    assert all([kinds[layer] for layer in seen].count(kind) == min(2, kinds.count(kind)) for kind in set(kinds))
    assert torch.equal(model(ids, context_of(attention, torch.arange(5))), whole)  # all layers are back


def test_layers_of_one_window_and_two_sizes_are_of_two_kinds():
    layer = read_model_config(tiny_models.tiny_model("llama")).layers[0]
    wide = msgspec.structs.replace(layer, intermediate_size=2 * layer.intermediate_size)
    assert two_of_each([layer, layer, wide, layer, wide, wide]) == [0, 1, 2, 4]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-mixed"])
def test_the_tokens_of_logits_alone_are_what_they_are_among_all(name):
    """In any order, one twice; keys and values are there for all tokens."""
    model, attention = loaded(name)
    ids, logits_indices = PROMPT[:9], torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    attended = []

    def attend(layer, qkv, *norms):
        attended.append(len(qkv))
        return attention(layer, qkv, *norms)

    some = model(ids, context_of(attend, torch.arange(9)), logits_indices)
    torch.testing.assert_close(
        some, model(ids, context_of(attention, torch.arange(9)))[logits_indices.long()], rtol=1e-5, atol=1e-5
    )
    assert attended == [9] * len(model.model.layers)


def test_a_tied_head_owns_no_weight():
    model, _ = loaded("qwen2-tied")
    assert [name for name, _ in model.lm_head.format.loaders("lm_head.format")] == []
    assert model.lm_head.format.weight is model.model.embed_tokens.weight  # small, so that both are kept


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "wanted", "shown"), [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)]
)
def test_a_bar_over_bytes_is_shown_on_a_terminal_unless_it_is_not_wanted(monkeypatch, stream, wanted, shown):
    folder = tiny_models.tiny_model("llama")
    model = build_model(read_model_config(folder), torch.float32, Parallel())
    monkeypatch.setattr(sys, "stderr", stream())
    expected = sum(4 * math.prod(loader.shape) for loader in weight_loaders(model).values())
    num_bytes = load_weights(model, folder, "cpu", progress=wanted)
    text = sys.stderr.getvalue()
    assert num_bytes == expected
    if shown:
        assert "Loading weights: 100%" in text and f"{num_bytes / 1000:.0f}k/" in text
    else:
        assert text == ""
