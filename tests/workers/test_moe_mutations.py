"""The tests of equality see the quirks of families with experts, as test_family_mutations.py shows it of the others."""

import msgspec
import pytest
import tiny_models
import tiny_moe
import torch
from workers.test_family_mutations import assert_seen, attention, layers, ones, rope, rotates_everywhere, window, without

from quire.kernels.experts import routing_reference
from quire.kernels.experts.experts_reference import SwiGLU
from quire.workers.layers.experts import Experts, Router
from quire.workers.models.blocks import SelfAttention, Sinks
from quire.workers.models.config import ValueHeads
from quire.workers.models.moe import MoE
from quire.workers.models.qk_norms import AllHeadsNorm

replace = msgspec.structs.replace


def experts(**changes):
    def changed(layer):
        return replace(layer, experts=layer.experts and replace(layer.experts, **changes))

    return lambda config: replace(config, layers=tuple(map(changed, config.layers)))


def routing(**changes):
    def changed(layer):
        e = layer.experts
        return replace(layer, experts=e and replace(e, routing=replace(e.routing, **changes)))

    return lambda config: replace(config, layers=tuple(map(changed, config.layers)))


def each(kind, change):
    """A change of all modules of a kind."""

    def of_model(model):
        for module in model.modules():
            if isinstance(module, kind):
                change(module)

    return None, of_model


def weighed_by_correction(moe):
    router = moe._router

    def routed(h):
        logits = torch.nn.functional.linear(h, router.weight, router.bias)
        ids, _ = routing_reference.route(logits, router.routing, router.correction)
        weights = (logits.sigmoid() + router.correction).gather(1, ids.long())
        r = router.routing
        return ids, weights / (weights.sum(-1, keepdim=True) if r.is_normalized else 1) * r.scale

    moe.__dict__["_router"] = routed


def without_shared(moe):
    moe.__dict__.update(_shared=None)


def without_shared_gate(moe):
    moe.__dict__.update(_shared_gate=None)


def swapped_halves(module):
    gate, up = module.gate_up.data.chunk(2, 1)
    module.gate_up.data = torch.cat((up, gate), 1)


def in_turn(module):
    """As if gate and up had not been taken apart."""
    gate, up = module.gate_up.data.chunk(2, 1)
    module.gate_up.data = torch.stack((gate, up), 2).flatten(1, 2)


def drop(*names):
    def change(module):
        for name in names:
            getattr(module, name).data.zero_()

    return change


def without_attention_bias(module):
    for linear in (module.qkv_proj, module.o_proj):
        linear.format.bias.data.zero_()


def windows_behind(config):
    """Qwen2's: those that have a window are the last layers."""
    windows = sorted(layer.attention.window for layer in config.layers)
    pairs = zip(config.layers, windows, strict=True)
    return replace(config, layers=tuple(replace(x, attention=replace(x.attention, window=w)) for x, w in pairs))


def one_rotation(config):
    """The first layer's, in all layers."""
    rope = config.layers[0].attention.rope
    return replace(config, layers=tuple(replace(x, attention=replace(x.attention, rope=rope)) for x in config.layers))


def without_sinks(module):
    module.weight.data.fill_(-1e9)


def by_head(model):
    """The norm over all heads as if each had its own."""
    for module in list(model.modules()):
        for name in ("q_norm", "k_norm"):
            if isinstance(module._modules.get(name), AllHeadsNorm):
                norm, size = module._modules.pop(name), model.config.layers[0].attention.head_dim

                def normed(x, norm=norm, size=size):
                    heads = x.unflatten(1, (-1, size))
                    return x.copy_(torch.nn.functional.rms_norm(heads, (size,), None, norm.eps).flatten(1) * norm.weight)

                module.__dict__[name] = normed


MUTATIONS = {
    ("mixtral", "weights not normalized"): routing(is_normalized=False),
    ("mixtral", "one expert too few"): routing(top_k=1),
    ("mixtral", "w1 and w3 swapped"): each(Experts, swapped_halves),
    ("mixtral-sliding-tied", "window + 1"): window(1),
    ("qwen2-moe", "weights normalized"): routing(is_normalized=True),
    ("qwen2-moe", "shared expert dropped"): each(MoE, without_shared),
    ("qwen2-moe", "shared expert's gate dropped"): each(MoE, without_shared_gate),
    ("qwen2-moe-mixed", "weights not normalized"): routing(is_normalized=False),
    ("qwen2-moe-mixed", "window - 1"): window(-1),
    ("qwen2-moe-mixed", "windows everywhere"): attention(window=12),
    ("qwen2-moe-mixed", "Qwen2's windows"): windows_behind,
    ("qwen3-moe", "weights not normalized"): routing(is_normalized=False),
    ("qwen3-moe", "QK-norm's eps"): attention(qk_norm_eps=1.0),
    ("qwen3-moe-mixed", "weights normalized"): routing(is_normalized=True),
    ("gpt-oss", "sinks dropped"): each(Sinks, without_sinks),
    ("gpt-oss", "softmax over all"): routing(is_normalized=False),
    ("gpt-oss", "no clamp"): experts(act=SwiGLU(alpha=1.702, offset=1.0)),
    ("gpt-oss", "alpha of SiLU"): experts(act=SwiGLU(limit=1.5, offset=1.0)),
    ("gpt-oss", "up without 1"): experts(act=SwiGLU(limit=1.5, alpha=1.702)),
    ("gpt-oss", "gate and up not in turn"): each(Experts, in_turn),
    ("gpt-oss", "window + 1"): window(1),
    ("gpt-oss", "window everywhere"): attention(window=12),
    ("gpt-oss", "yarn truncated"): (rope(truncate=True), None, True),
    ("gpt-oss", "experts' biases dropped"): each(Experts, drop("gate_up_bias", "down_bias")),
    ("gpt-oss", "router's bias dropped"): each(Router, drop("bias")),
    ("gemma4-moe", "one expert too few"): routing(top_k=2),
    ("gemma4-moe", "SiLU"): experts(act=SwiGLU()),
    ("gemma4-moe", "router's scale dropped"): (None, ones("scales.scale")),
    ("gemma4-moe", "experts' scales dropped"): (None, ones("scales.per_expert")),
    ("gemma4-moe", "experts dropped"): (None, without(("_has_experts", False))),
    ("gpt-oss", "attention's biases dropped"): each(SelfAttention, without_attention_bias),
    ("glm4-moe", "correction weighs"): each(MoE, weighed_by_correction),
    ("glm4-moe", "correction dropped"): each(Router, drop("correction")),
    ("glm4-moe", "groups ignored"): routing(top_groups=4),
    ("glm4-moe", "groups ranked by their best"): routing(group_top=1),
    ("glm4-moe", "QK-norm's eps"): attention(qk_norm_eps=1.0),
    ("glm4-moe", "whole heads rotated"): rope(rotary_dim=0),
    ("glm4-moe", "scale dropped"): routing(scale=1.0),
    ("glm4-moe", "shared expert dropped"): each(MoE, without_shared),
    ("glm4-moe-plain", "weights normalized"): routing(is_normalized=True),
    ("deepseek-v2-lite", "mscale left out"): attention(scale=40**-0.5),
    ("deepseek-v2-lite", "rotation not interleaved"): rope(interleaved=False),
    ("deepseek-v2-lite", "weights normalized"): routing(is_normalized=True),
    ("deepseek-v2-lite", "shared experts dropped"): each(MoE, without_shared),
    ("deepseek-v2", "groups ignored"): routing(top_groups=4),
    ("deepseek-v2", "scale dropped"): routing(scale=1.0),
    ("deepseek-v3", "mscale left out"): attention(scale=40**-0.5),
    ("deepseek-v3", "correction weighs"): each(MoE, weighed_by_correction),
    ("deepseek-v3", "correction dropped"): each(Router, drop("correction")),
    ("deepseek-v3", "scale dropped"): routing(scale=1.0),
    ("deepseek-v3", "groups ignored"): routing(top_groups=4),
    ("deepseek-v3", "shared experts dropped"): each(MoE, without_shared),
    ("deepseek-v3", "groups ranked by their best"): routing(group_top=1),
    ("deepseek-v3", "weights not normalized"): routing(is_normalized=False),
    ("deepseek-v3-plain", "rotation interleaved"): rope(interleaved=True),
    ("deepseek-v3-plain", "weights normalized"): routing(is_normalized=True),
    ("glm4-moe-lite", "mscale left out"): attention(scale=40**-0.5),
    ("glm4-moe-lite", "rotation not interleaved"): rope(interleaved=False),
    ("glm4-moe-lite", "correction weighs"): each(MoE, weighed_by_correction),
    ("glm4-moe-lite", "groups ignored"): routing(top_groups=4),
    ("glm4-moe-lite", "scale dropped"): routing(scale=1.0),
    ("glm4-moe-lite", "shared experts dropped"): each(MoE, without_shared),
    ("glm4-moe-lite-plain", "weights normalized"): routing(is_normalized=True),
    ("hy-v3", "correction weighs"): each(MoE, weighed_by_correction),
    ("hy-v3", "correction dropped"): each(Router, drop("correction")),
    ("hy-v3", "weights not normalized"): routing(is_normalized=False),
    ("hy-v3", "scale dropped"): routing(scale=1.0),
    ("hy-v3", "QK-norm's eps"): attention(qk_norm_eps=1.0),
    ("hy-v3", "shared experts dropped"): each(MoE, without_shared),
    ("hy-v3-bias", "attention's biases dropped"): each(SelfAttention, without_attention_bias),
    ("mimo-v2", "values not scaled"): layers(values=ValueHeads(20)),
    ("mimo-v2", "sinks dropped"): each(Sinks, without_sinks),
    ("mimo-v2", "window + 1"): window(1),
    ("mimo-v2", "one rotation for all"): one_rotation,
    ("mimo-v2", "whole heads rotated"): rope(rotary_dim=0),
    ("mimo-v2", "correction weighs"): each(MoE, weighed_by_correction),
    ("mimo-v2", "groups ignored"): routing(top_groups=4),
    ("mimo-v2", "scale dropped"): routing(scale=1.0),
    ("mimo-v2-bias", "weights normalized"): routing(is_normalized=True),
    ("llama4", "chunk + 1"): window(1),
    ("llama4", "windows for chunks"): attention(is_chunked=False),
    ("llama4", "everything seen everywhere"): attention(window=0, is_chunked=False),
    ("llama4", "all layers rotate"): rotates_everywhere,
    ("llama4", "rotation not interleaved"): rope(interleaved=False),
    ("llama4", "temperature dropped"): attention(temperature=None),
    ("llama4", "positions counted from 0"): (
        attention(temperature=lambda spec: spec.temperature and replace(spec.temperature, first=0)),
        None,
        True,
    ),
    ("llama4", "QK-norm dropped"): attention(qk_norm_eps=None),
    ("llama4", "QK-norm everywhere"): attention(qk_norm_eps=1e-5, has_qk_weights=False),
    ("llama4", "experts' outputs weighed"): experts(weighs_input=False),
    ("llama4", "softmax for sigmoids"): routing(scores="softmax"),
    ("llama4", "shared expert dropped"): each(MoE, without_shared),
    ("llama4-top3", "experts' outputs weighed"): experts(weighs_input=False),
    ("llama4-top3", "one expert too few"): routing(top_k=2),
    ("minimax-m2", "correction weighs"): each(MoE, weighed_by_correction),
    ("minimax-m2", "correction dropped"): each(Router, drop("correction")),
    ("minimax-m2", "weights not normalized"): routing(is_normalized=False),
    ("minimax-m2", "whole heads rotated"): rope(rotary_dim=0),
    ("minimax-m2", "QK-norm of each head"): (None, by_head),
    ("mistral4", "mscale left out"): attention(scale=40**-0.5),
    ("mistral4", "temperature dropped"): attention(temperature=None),
    ("mistral4", "rotation not interleaved"): rope(interleaved=False),
    ("mistral4", "groups ignored"): routing(top_groups=3),
    ("mistral4", "groups ranked by their best"): routing(group_top=1),
    ("mistral4", "weights not normalized"): routing(is_normalized=False),
    ("mistral4", "scale dropped"): routing(scale=1.0),
    ("mistral4", "shared expert dropped"): each(MoE, without_shared),
    ("mistral4-plain", "rotation interleaved"): rope(interleaved=True),
    ("mistral4-plain", "weights normalized"): routing(is_normalized=True),
    ("olmoe", "weights normalized"): routing(is_normalized=True),
    ("olmoe", "QK-norm of each head"): (None, by_head),
}
ALWAYS = ("gpt-oss", "deepseek-v3")
CASES = [pytest.param(*key, marks=() if key[0] in ALWAYS else pytest.mark.slow) for key in MUTATIONS]


@pytest.mark.parametrize(("name", "wrong"), CASES)
def test_what_is_wrong_is_seen(name, wrong):
    assert_seen(name, MUTATIONS[name, wrong])


def test_every_family_has_a_mutation():
    families = {tiny_models.ALL_MODELS[name][0] for name, _ in MUTATIONS}
    assert families | {"llama4-images", "mistral4-images"} == {family for family, _ in tiny_moe.MODELS.values()}


def test_what_is_as_it_was_is_not_seen():
    with pytest.raises(AssertionError):
        assert_seen("deepseek-v3", layers())
