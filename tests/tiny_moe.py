"""Tiny models of the families with experts, every quirk in one of them: name -> (family, what its config differs in).

tiny_models.py makes them. The first of each family runs always, the others where there is time.
"""

from typing import Any

from tiny_families import LLAMA3, YARN

_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_QWEN2_MOE: dict[str, Any] = {**_MOE, "shared_expert_intermediate_size": 80}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20,
    "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "head_dim": ...,
}  # fmt: skip
_MSCALE = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}),
    "mixtral-sliding-tied": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 16, "tie_word_embeddings": True},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {**_DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1, "rope_parameters": _MSCALE},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "num_experts_per_tok": 3,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 40,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_MSCALE, "mscale": 1.0},
        },
    ),
    "deepseek-v3-plain": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-moe": (
        "gemma4",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
            "tie_word_embeddings": False,
        },
    ),
    "glm4-moe": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 32,
        },
    ),
    "glm4-moe-plain": (
        "glm4_moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {
            **_DEEPSEEK,
            "q_lora_rank": 40,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": _MSCALE,
        },
    ),
    "glm4-moe-lite-plain": (
        "glm4_moe_lite",
        {**_DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False, "tie_word_embeddings": True},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 96,
            "sliding_window": 12,
            "swiglu_limit": 1.5,
            "num_hidden_layers": 4,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "gpt-oss-plain": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "layer_types": ["full_attention"] * 3,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "hy-v3": (
        "hy_v3",
        {
            **_MOE,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
    ),
    "hy-v3-bias": (
        "hy_v3",
        {**_MOE, "attention_bias": True, "router_scaling_factor": 1.5, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "llama4": (
        "llama4",
        {
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 24,
            "floor_scale": 3,
            "attn_scale": 0.7,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 96,
            "intermediate_size_mlp": 80,
        },
    ),
    "llama4-top3": (
        "llama4",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 1],
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention", "chunked_attention"],
            "attention_chunk_size": 7,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "attention_bias": True,
            "moe_layers": [1, 2],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 64,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama4-images": (
        "llama4-images",
        {
            "attention_chunk_size": 16,
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
        },
    ),
    "mimo-v2": (
        "mimo_v2_flash",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "v_head_dim": 20,
            "attention_value_scale": 0.6,
            "sliding_window": 12,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "mimo-v2-bias": (
        "mimo_v2_flash",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "head_dim": 24,
            "v_head_dim": 24,
            "attention_value_scale": None,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 80,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "mistral4": (
        "mistral4",
        {
            **_DEEPSEEK,
            "q_lora_rank": 40,
            "n_routed_experts": 24,
            "n_group": 3,
            "topk_group": 1,
            "num_experts_per_tok": 5,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                **_MSCALE,
                "mscale": 1.2,
                "original_max_position_embeddings": 20,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "mistral4-plain": (
        "mistral4",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2},
        },
    ),
    "mistral4-images": ("mistral4-images", {**_DEEPSEEK, "q_lora_rank": 24, "tie_word_embeddings": False}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "norm_topk_prob": False}),
    "qwen2-moe": ("qwen2_moe", {**_QWEN2_MOE, "norm_topk_prob": False}),
    "qwen2-moe-mixed": (
        "qwen2_moe",
        {
            **_QWEN2_MOE,
            "norm_topk_prob": True,
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 4,
            "qkv_bias": False,
        },
    ),
    "qwen3-moe": ("qwen3_moe", {**_MOE, "moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 32}),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {
            **_MOE,
            "num_experts": 6,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
        },
    ),
}

# One of each family, in every run.
FIRST = tuple({family: name for name, (family, _) in reversed(MODELS.items())}.values())

# Wide enough for groups and blocks of quantized experts, two ranks' parts of them, too.
_WIDE: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2,
}  # fmt: skip
WIDE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wide-gpt-oss": ("gpt_oss", {**MODELS["gpt-oss"][1], **_WIDE, "intermediate_size": 192, "swiglu_limit": 7.0}),
    "wide-qwen3-moe": ("qwen3_moe", {**MODELS["qwen3-moe"][1], **_WIDE, "moe_intermediate_size": 256}),
    "wide-deepseek-v3": (
        "deepseek_v3",
        {**MODELS["deepseek-v3"][1], "hidden_size": 256, "moe_intermediate_size": 256},
    ),
}
