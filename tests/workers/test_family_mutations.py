"""The tests of equality see each family's quirks: a model that has one of them wrong gives other logits, and other tokens.

Not a test of the engine but of the tiny models: a quirk that changes nothing in them could be lost unseen.
"""

import functools

import msgspec
import pytest
import tiny_models
import tiny_moe
import torch
from workers.test_models import ROUNDING, DenseAttention, greedy_reference

from quire.workers.layers.norm import RMSNorm
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import RopeConfig
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

replace = msgspec.structs.replace


def attention(**changes):
    """Of all layers; a value may be a function of the attention's spec."""

    def changed(layer):
        spec = layer.attention
        values = {key: value(spec) if callable(value) else value for key, value in changes.items()}
        return replace(layer, attention=replace(spec, **values))

    return lambda config: replace(config, layers=tuple(map(changed, config.layers)))


def layers(**changes):
    return lambda config: replace(config, layers=tuple(replace(layer, **changes) for layer in config.layers))


def around(**changes):
    """Of the model's spec."""
    return lambda config: replace(config, model=replace(config.model, **changes))


def norms(**changes):
    return lambda config: replace(config, model=replace(config.model, norm=replace(config.model.norm, **changes)))


def rope(**changes):
    return attention(rope=lambda spec: spec.rope and replace(spec.rope, **changes))


def alibi(**changes):
    return attention(alibi=lambda spec: replace(spec.alibi, **changes))


def window(by):
    return attention(window=lambda spec: spec.window and spec.window + by)


def swapped_bases(config):
    """Each kind of layer has the other's rotary table."""
    ropes = {layer.attention.window > 0: layer.attention.rope for layer in config.layers}
    return attention(rope=lambda spec: ropes[spec.window == 0])(config)


def rotates_everywhere(config):
    rope = next(layer.attention.rope for layer in config.layers if layer.attention.rope is not None)
    return attention(rope=rope)(config)


def without(*names):
    """A fault in the model: these attributes, set to what turns them off, wherever a module has them."""

    def change(model):
        for module in model.modules():
            for name, value in names:
                if hasattr(module, name):
                    module.__dict__[name] = value

    return change


def ones(*ends):
    """Parameters of these names' ends, as if they had been forgotten."""

    def change(model):
        found = [p for name, p in model.named_parameters() if name.endswith(ends)]
        assert found
        for parameter in found:
            parameter.fill_(0.0 if ends[0].endswith("bias") else 1.0)

    return change


def reordered(name, rows_of):
    """Rows of each layer of this name in another order, as if the checkpoint's had been taken for another one."""

    def change(model):
        for module in model.modules():
            if (layer := getattr(module, "_modules", {}).get(name)) is not None:
                rows = rows_of(model.config.layers[0].attention, len(layer.format.weight))
                layer.format.weight = torch.nn.Parameter(layer.format.weight[rows].contiguous(), requires_grad=False)
                if layer.format.bias is not None:
                    layer.format.bias.copy_(layer.format.bias[rows])
                layer.format.finish()

    return change


def group_by_group(spec, count):
    """Of q|k|v, where each group's queries lie before its key and value."""
    group = spec.num_heads // spec.num_kv_heads
    heads = [h for g in range(spec.num_kv_heads) for h in (*range(g * group, (g + 1) * group), -1, -2)]
    k, v = spec.num_heads, spec.num_heads + spec.num_kv_heads
    found = [h if h >= 0 else (k if h == -1 else v) + i // (group + 2) for i, h in enumerate(heads)]
    return torch.arange(count).view(-1, spec.head_dim)[found].flatten()


def halves_swapped(spec, count):
    return torch.arange(count).roll(count // 2)


BY_GROUP, SWAPPED = reordered("qkv_proj", group_by_group), reordered("gate_up_proj", halves_swapped)
NOT_PARALLEL = without(("_is_parallel", False))
# (model, what is wrong): a change of its config, or, as a second, of the model that is made; True: no token shows it, logits do
MUTATIONS = {
    ("gemma2", "window + 1"): window(1),
    ("gemma2", "window - 1"): window(-1),
    ("gemma2", "softcap dropped"): attention(softcap=0.0),
    ("gemma2", "scale of the head size"): attention(scale=lambda spec: spec.head_dim**-0.5),
    ("gemma2", "w for 1 + w"): norms(weighs="wide"),
    ("gemma2", "embedding not scaled"): around(embedding_scale=1.0),
    ("gemma2", "logits not capped"): (around(logit_softcap=0.0), None, True),
    ("gemma2", "SiLU"): layers(activation="silu"),
    ("gemma2", "exact GELU"): (layers(activation="gelu"), None, True),
    ("gemma3", "exact GELU"): (layers(activation="gelu"), None, True),
    ("gemma4", "exact GELU"): (layers(activation="gelu"), None, True),
    ("phi", "exact GELU"): (layers(activation="gelu"), None, True),
    ("bloom", "exact GELU"): (layers(activation="gelu"), None, True),
    ("gptj", "exact GELU"): (layers(activation="gelu"), None, True),
    ("gpt-neox", "GELU by tanh"): (layers(activation="gelu_tanh"), None, True),
    ("falcon-7b", "GELU by tanh"): (layers(activation="gelu_tanh"), None, True),
    ("gemma2", "windows everywhere"): attention(window=12),
    ("gemma2", "weights of the norms behind dropped"): (None, ones("post_feedforward_layernorm.weight")),
    ("gemma3", "bases swapped"): swapped_bases,
    ("gemma3", "w for 1 + w in QK-norm"): attention(qk_norm_weighs="wide"),
    ("gemma3", "window + 1"): window(1),
    ("gemma3", "windows everywhere"): attention(window=12),
    ("gemma3-scaled", "scaling dropped"): rope(factor=1.0),
    ("gemma4", "window + 1"): window(1),
    ("gemma4", "window - 1"): window(-1),
    ("gemma4", "bases swapped"): swapped_bases,
    ("gemma4", "all of a head's pairs rotated"): rope(proportion=1.0),
    ("gemma4", "frequencies of a smaller head"): rope(type="default", rotary_dim=6),
    ("gemma4", "scale of the head size"): attention(scale=lambda spec: spec.head_dim**-0.5),
    ("gemma4", "1 + w for w"): norms(weighs="plus_one"),
    ("gemma4", "1 + w for w in QK-norm"): attention(qk_norm_weighs="plus_one"),
    ("gemma4", "norm of values dropped"): (None, without(("_norms_values", False))),
    ("gemma4", "keys and values of another layer"): attention(shares=lambda spec: spec.shares and spec.shares - 2),
    ("gemma4", "embedding not scaled"): around(embedding_scale=1.0),
    ("gemma4", "logits not capped"): (around(logit_softcap=0.0), None, True),
    ("gemma4", "layers' inputs dropped"): (None, without(("_has_input", False))),
    ("gemma4", "layers' inputs of the first"): (None, without(("_layer", 0))),
    ("gemma4", "layers' scalars dropped"): (None, ones("layer_scalar.weight")),
    ("gemma4", "SiLU"): layers(activation="silu"),
    ("gemma4-joint", "scaling dropped"): rope(factor=1.0),
    ("gemma4-joint", "norm of values dropped"): (None, without(("_norms_values", False))),
    ("phi3-longrope", "long factors"): rope(original_max_position_embeddings=16),
    ("phi3-longrope", "attention factor dropped"): (rope(attention_factor=1.0), None, True),
    ("phi4-mini", "whole heads rotated"): attention(rope=RopeConfig()),
    ("phi3-sliding", "window - 1"): window(-1),
    ("phi3", "rows group by group"): (None, BY_GROUP),
    ("phi3", "gate and up swapped"): (None, SWAPPED),
    ("olmo2", "QK-norm dropped"): (None, without(("_norms_all", False))),
    ("olmo2", "QK-norm's weights dropped"): (None, ones("q_norm.weight", "k_norm.weight")),
    ("olmo3", "bases swapped"): swapped_bases,
    ("olmo3", "window + 1"): window(1),
    ("granite", "embedding not scaled"): around(embedding_scale=1.0),
    ("granite", "residual not scaled"): norms(residual_scale=1.0),
    ("granite", "scale of the head size"): attention(scale=0.25),
    ("granite", "logits not scaled"): (around(logit_scale=1.0), None, True),
    ("cohere2", "rotation not interleaved"): rope(interleaved=False),
    ("cohere2", "all layers rotate"): rotates_everywhere,
    ("cohere2", "window + 1"): window(1),
    ("cohere2", "logits not scaled"): (around(logit_scale=1.0), None, True),
    ("cohere", "rotation not interleaved"): rope(interleaved=False),
    ("cohere-qk-norm", "QK-norm dropped"): (None, without(("_norms_all", False))),
    ("cohere-qk-norm", "QK-norm's weights dropped"): (None, ones("q_norm.weight", "k_norm.weight")),
    ("gpt-neox", "one after the other"): (None, NOT_PARALLEL),
    ("gpt-neox", "whole heads rotated"): rope(rotary_dim=0),
    ("gpt-neox", "rows not by head"): (None, BY_GROUP),
    ("gpt-neox", "biases dropped"): (None, ones("bias")),
    ("gpt-neox-sequential", "side by side"): (None, without(("_is_parallel", True), ("_feeds_add_norm", False))),
    ("falcon-40b", "one norm for both"): (None, without(("_mlp_norm", None))),
    ("falcon-40b", "rows not by group"): (None, BY_GROUP),
    ("falcon-11b", "rows not by group"): (None, BY_GROUP),
    ("falcon-rw", "side by side"): (None, without(("_is_parallel", True), ("_feeds_add_norm", False))),
    ("falcon-rw", "biases dropped"): (None, ones("format.bias")),
    ("falcon-7b", "SiLU"): layers(activation="silu"),
    ("falcon-rw", "ALiBi dropped"): attention(alibi=None),
    ("falcon-rw", "ALiBi not rounded"): (alibi(is_rounded=False), None, True),
    ("falcon-rw", "ALiBi added after scaling"): alibi(scale=1.0),
    ("phi", "whole heads rotated"): rope(rotary_dim=0),
    ("phi", "head's bias dropped"): (None, ones("lm_head.format.bias")),
    ("smollm3", "all layers rotate"): rotates_everywhere,
    ("smollm3-sliding", "window + 1"): window(1),
    ("glm4", "rotation not interleaved"): rope(interleaved=False),
    ("glm4", "whole heads rotated"): rope(rotary_dim=0),
    ("glm4", "weights of the norm after attention dropped"): (None, ones("post_self_attn_layernorm.weight")),
    ("glm", "rotation not interleaved"): rope(interleaved=False),
    ("glm", "whole heads rotated"): rope(rotary_dim=0),
    ("seed-oss", "biases of q, k and v dropped"): (None, ones("qkv_proj.format.bias")),
    ("seed-oss-bias", "the MLP's biases dropped"): (None, ones("gate_up_proj.format.bias")),
    ("seed-oss-bias", "output's bias dropped"): (None, ones("o_proj.format.bias")),
    ("exaone4", "all layers rotate"): rotates_everywhere,
    ("exaone4", "QK-norm's weights dropped"): (None, ones("q_norm.weight", "k_norm.weight")),
    ("exaone4", "window - 1"): window(-1),
    ("ministral3", "temperature dropped"): attention(temperature=None),
    ("ministral3", "yarn dropped"): rope(type="default"),
    ("bloom", "ALiBi dropped"): attention(alibi=None),
    ("bloom", "ALiBi rounded"): (alibi(is_rounded=True), None, True),
    ("bloom", "rows not by head"): (None, BY_GROUP),
    ("bloom", "the embedding's norm dropped"): (None, without(("_has_embed_norm", False))),
    ("gptj", "rotation not interleaved"): rope(interleaved=False),
    ("gptj", "whole heads rotated"): rope(rotary_dim=0),
    ("gptj", "head's bias dropped"): (None, ones("lm_head.format.bias")),
}
ALWAYS = ("gemma2", "gemma3", "olmo2", "falcon-rw")


@functools.cache
def expected(name):
    sequence = greedy_reference(name)
    with torch.inference_mode():
        return sequence, tiny_models.reference(name)(sequence.long()[None]).logits[0]


CASES = [pytest.param(*key, marks=() if key[0] in ALWAYS else pytest.mark.slow) for key in MUTATIONS]


@pytest.mark.parametrize(("name", "wrong"), CASES)
def test_what_is_wrong_is_seen(name, wrong):
    assert_seen(name, MUTATIONS[name, wrong])


def assert_seen(name, entry):
    """That the model with a mutation gives other logits than transformers', and other tokens."""
    of_config, of_model, is_silent = (*entry, False)[:3] if isinstance(entry, tuple) else (entry, None, False)
    sequence, logits = expected(name)
    config = read_model_config(tiny_models.tiny_model(name))
    changed = config if of_config is None else of_config(config)
    assert (changed != config) == (of_config is not None)
    model = build_model(changed, torch.float32, Parallel())
    load_weights(model, tiny_models.tiny_model(name), "cpu", progress=False)
    if of_model is not None:
        of_model(model)
    with torch.inference_mode():
        hidden = model(sequence, torch.arange(len(sequence)), DenseAttention(changed.attention_specs(Parallel())))
        got = model.compute_logits(hidden)
    assert (got - logits).abs().max() > 5 * ROUNDING * max(1.0, float(logits.abs().max()) / 4)  # test_models allows a fifth
    if not is_silent:
        assert (got.argmax(-1) != logits.argmax(-1)).sum() > 4


def test_every_family_has_a_mutation():
    families = {tiny_models.ALL_MODELS[name][0] for name, _ in MUTATIONS}
    plain = {"llama", "mistral", "qwen2", "qwen3", "gemma3-images", "gemma4-images", "ministral3-images"}
    others = {family for name, (family, _) in tiny_models.ALL_MODELS.items() if name not in tiny_moe.MODELS}
    assert families | plain == others
    assert RMSNorm.is_plain is False  # a norm says so itself, or kernels take it for Llama's
