"""Tiny models with recurrent layers, every quirk in one of them: name -> (family, what its config differs in).

tiny_models.py makes them. The first of each family runs always, the others where there is time.
"""

from typing import Any

import tiny_families
import tiny_mambas

LINEAR, FULL = "linear_attention", "full_attention"
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 32,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
_LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL, "conv", "conv"],
    "head_dim": ...,
    "tie_word_embeddings": False,
    "intermediate_size": 192,
    "block_multiple_of": 40,  # 2 / 3 · 192 is 128, and 160 the next multiple
}
_KIMI: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "linear_num_heads": 4,
    "linear_head_dim": 24,
    "head_dim": ...,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    **_EXPERTS,
    "num_experts": ...,
    "num_local_experts": 8,
    "shared_expert_intermediate_size": ...,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5", _DELTA),
    # the last layer has attention, as many key heads as value heads, biases, another window, a tied head
    "qwen3.5-tied": (
        "qwen3_5",
        {
            **_DELTA,
            "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-images": ("qwen3_5-images", _DELTA),
    "qwen3.5-moe": ("qwen3_5_moe", {**_DELTA, **_EXPERTS, "layer_types": [FULL, LINEAR, LINEAR, FULL]}),
    "qwen3.5-moe-images": ("qwen3_5_moe-images", {**_DELTA, **_EXPERTS}),
    "qwen3-next": ("qwen3_next", {**_DELTA, **_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3-next-plain": (
        "qwen3_next",
        {
            **_DELTA,
            **_EXPERTS,
            "layer_types": ...,
            "linear_num_value_heads": 6,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "num_key_value_heads": 1,
        },
    ),
    "lfm2": ("lfm2", _LFM2),
    # the last layer has attention, and layers are listed by number; biases, another window, a tied head, a width as it is
    "lfm2-tied": (
        "lfm2",
        {
            **_LFM2,
            "layer_types": ...,
            "full_attn_idxs": [1, 3],
            "conv_L_cache": 4,
            "conv_bias": True,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": False,
            "num_key_value_heads": 1,
        },
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {**_LFM2, "block_multiple_of": ..., "num_dense_layers": 1, **_EXPERTS, "shared_expert_intermediate_size": ...},
    ),
    # routed by its scores alone, all layers with experts
    "lfm2-moe-plain": (
        "lfm2_moe",
        {
            **_LFM2,
            "block_multiple_of": ...,
            "layer_types": ["conv", "conv", FULL],
            "num_hidden_layers": 3,
            "num_dense_layers": 0,
            **_EXPERTS,
            "shared_expert_intermediate_size": ...,
            "use_expert_bias": False,
        },
    ),
    "kimi-linear": ("kimi_linear", _KIMI),
    # the last layer has attention, queries are made of a latent; groups of experts, weights as they are, two shared experts
    "kimi-linear-groups": (
        "kimi_linear",
        {
            **_KIMI,
            "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
            "mlp_layer_types": ...,
            "linear_conv_kernel_dim": 3,
            "linear_num_heads": 8,
            "linear_head_dim": 12,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    ),
}
MODELS |= tiny_mambas.MODELS
WITHOUT_KV_CACHE = tiny_mambas.WITHOUT_ATTENTION
CLAMPED_IN_PREFILL = tiny_mambas.CLAMPED  # by transformers, whose tokens are not those of its own logits
CLASSES = {  # (config, model), of transformers
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5-images": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_5_moe-images": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    **tiny_mambas.CLASSES,
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
}
FIRST = tuple({family: name for name, (family, _) in reversed(MODELS.items())}.values())
# One of each family, with attention heads of sizes that GPU kernels are built for; latent attention has its own.
GPU_MODELS = {
    f"gpu-{name}": (family, changes if family in ("kimi_linear", "mamba2") else tiny_families.for_gpu(changes))
    for name, (family, changes) in MODELS.items()
    if name in FIRST
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def assert_scarce(name: str, counters: Any) -> None:
    """That sequences were preempted, if there is a KV cache, and prefixes hit; recurrent layers keep those of 64 tokens."""
    assert counters.preemptions > 0 or name in WITHOUT_KV_CACHE
    assert counters.cached_tokens > 0 or name in MODELS


def make(family: str, fields: dict[str, Any]) -> Any:
    """The transformers model, its weights as transformers draws them, but those that it sets. A field of `...` is left out."""
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in CLASSES[family])
    fields = {name: value for name, value in fields.items() if value is not ...}
    config = config_class(text_config=fields, vision_config=VISION) if family.endswith("-images") else config_class(**fields)
    config._attn_implementation = "eager"
    return model_class(config).eval()


def vary(family: str, key: str, parameter: Any) -> bool:
    """Draw what transformers sets to constants, so that a model that forgot it would differ; False: it is drawn already."""
    if family in tiny_mambas.CLASSES:
        return tiny_mambas.vary(key, parameter)
    if key.endswith("linear_attn.norm.weight"):
        parameter.normal_(1.0, 0.3)
    elif "norm" in key and "visual" not in key and family.startswith("qwen"):  # less 1
        parameter.normal_(0.0, 0.3)
    elif key.endswith("A_log"):
        parameter.uniform_(-5.0, 1.0)  # so that some heads remember hundreds of tokens
    elif key.endswith("dt_bias"):
        parameter.normal_(0.0, 1.0)
    elif key.endswith(("conv1d.weight", "conv.conv.weight")):
        parameter.normal_(0.0, 0.5)
    elif key.endswith(("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight", "b_proj.weight")):
        parameter.normal_(0.0, 0.25)
    elif key.endswith(("gate.weight", "experts.gate_up_proj", "experts.down_proj")):
        parameter.normal_(0.0, 0.4 if key.endswith("gate.weight") else 0.21)
    else:
        return False
    return True
