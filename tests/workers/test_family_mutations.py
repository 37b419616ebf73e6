"""The tests of equality see each family's quirks: a model that has one of them wrong gives other logits, and other tokens.

Not a test of the engine but of the tiny models: a quirk that changes nothing in them could be lost unseen.
"""

import functools

import msgspec
import pytest
import tiny_hybrids
import tiny_mambas
import tiny_models
import tiny_moe
import torch
from mutations import (
    alibi,
    around,
    attention,
    constant_gate,
    decay_of_heads,
    factors,
    group_by_group,
    halves_swapped,
    layers,
    mamba,
    norms,
    ones,
    reordered,
    rope,
    rotates_everywhere,
    swapped_bases,
    ungated,
    window,
    without,
    without_decay,
    without_first_tap,
    without_norms,
    zeros,
)
from recurrent_states import poisoned_states
from step_contexts import context_of
from workers.test_models import ROUNDING, DenseAttention, greedy_reference

from quire.workers.layers.norm import RMSNorm
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import RopeConfig
from quire.workers.models.families.falcon_h1 import Multipliers
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

replace = msgspec.structs.replace
INFINITY = float("inf")


BY_GROUP, SWAPPED = reordered("qkv_proj", group_by_group), reordered("gate_up_proj", halves_swapped)
NOT_PARALLEL = without(("_is_parallel", False))
# (model, what is wrong): a change of its config, or, as a second, of the model that is made; True: no token shows it, logits do
MUTATIONS = {
    ("gemma2", "window + 1"): window(1),
    ("gemma2", "window - 1"): window(-1),
    ("gemma2", "softcap dropped"): attention(softcap=0.0),
    ("gemma2", "scale of the head size"): attention(scale=lambda spec: spec.head_dim**-0.5),
    ("gemma2", "w for 1 + w"): norms(weighs="wide"),
    **{(name, "w for 1 + w"): norms(weighs="wide") for name in tiny_hybrids.FIRST if name.startswith("qwen")},
    **{(name, "1 + w for w"): norms(weighs="plus_one") for name in tiny_mambas.FIRST},
    **{(name, "D dropped"): (None, zeros("per_head.D")) for name in tiny_mambas.FIRST},
    **{(name, "the convolution's bias dropped"): (None, zeros("conv1d.bias")) for name in tiny_mambas.FIRST},
    **{(name, "the norm before the gate"): mamba(norms_first=True) for name in tiny_mambas.FIRST if name != "falcon-h1"},
    **{
        (name, "all channels normed together"): (None, without(("group_size", 96)))
        for name in ("nemotron-h", "falcon-h1-norm-after")
    },
    **{(name, "steps not clamped"): mamba(dt_min=0.0, dt_max=INFINITY) for name in tiny_hybrids.CLAMPED_IN_PREFILL},
    ("bamba-clamped", "steps without a greatest"): mamba(dt_max=INFINITY),
    ("falcon-h1-norm", "no norm"): (None, without_norms),
    ("falcon-h1-norm", "the norm after the gate"): mamba(norms_first=False),
    ("falcon-h1", "in_proj's output not scaled"): mamba(multipliers=None),
    ("falcon-h1", "dt not scaled"): mamba(multipliers=(1.2, 0.8, 0.7, 1.1, 1.0)),
    **{("falcon-h1", f"{name} not scaled"): factors(**{name: 1.0}) for name in Multipliers.__struct_fields__},
    ("falcon-h1", "attention_out not scaled"): (factors(attention_out=1.0), None, True),
    ("falcon-h1", "scale of the head size"): (attention(scale=0.25), None, True),
    ("falcon-h1", "embedding not scaled"): (around(embedding_scale=1.0), None, True),
    ("falcon-h1", "logits not scaled"): (around(logit_scale=1.0), None, True),
    ("granite-4", "embedding not scaled"): around(embedding_scale=1.0),
    ("granite-4", "residual not scaled"): norms(residual_scale=1.0),
    ("granite-4", "scale of the head size"): attention(scale=0.25),
    ("granite-4", "logits not scaled"): (around(logit_scale=1.0), None, True),
    ("granite-4", "attention rotates"): attention(rope=RopeConfig()),
    ("granite-4-dense", "attention does not rotate"): attention(rope=None),
    ("nemotron-h", "attention rotates"): attention(rope=RopeConfig()),
    ("nemotron-h", "relu for its square"): layers(activation="relu"),
    ("nemotron-h", "the router's correction dropped"): (None, zeros("gate.correction")),
    ("bamba", "whole heads rotated"): rope(rotary_dim=0),
    **{(name, "no decay"): (None, without_decay) for name in tiny_hybrids.FIRST if not name.startswith("lfm2")},
    **{(name, "a convolution over fewer tokens"): (None, without_first_tap) for name in tiny_hybrids.FIRST},
    ("kimi-linear", "decay by head"): (None, decay_of_heads),
    ("kimi-linear", "gate dropped"): (None, constant_gate),
    ("kimi-linear", "rotation"): attention(rope=lambda spec: RopeConfig(rotary_dim=8) if spec.is_there else None),
    ("lfm2", "the first gate dropped"): (None, ungated("before")),
    ("lfm2", "the second gate dropped"): (None, ungated("after")),
    ("lfm2", "QK-norm's weights dropped"): (None, ones("q_norm.weight", "k_norm.weight")),
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
ALWAYS = ("gemma2", "gemma3", "olmo2", "falcon-rw", "kimi-linear", "lfm2")


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
    states = poisoned_states(changed, Parallel()) if changed.state_tensors(Parallel()) else None
    attend = DenseAttention(changed.attention_specs(Parallel()))
    with torch.inference_mode():
        hidden = model(sequence, context_of(attend, torch.arange(len(sequence)).int(), states))
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
