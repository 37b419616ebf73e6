"""Tiny models with Mamba 2 layers, every quirk in one of them; see tiny_hybrids."""

from typing import Any

MAMBA, FULL = "linear_attention", "full_attention"
_NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": ...,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 2.5,
    "rescale_prenorm_residual": False,
}
_BAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "head_dim": ...,
}
_GRANITE: dict[str, Any] = {
    "shared_intermediate_size": 96,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}
_FALCON: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "head_dim": ...,
    "mamba_rms_norm": False,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "mlp_multipliers": [0.7, 0.6],
    "ssm_multipliers": [1.2, 0.8, 0.7, 1.1, 0.6],
}
_MAMBA2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_heads": 4,
    "head_dim": 32,
    "state_size": 16,
    "intermediate_size": ...,
    "num_attention_heads": ...,
    "num_key_value_heads": ...,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron-h": (
        "nemotron_h",
        {**_NEMOTRON, "layers_block_type": [MAMBA, "mlp", FULL, MAMBA, "moe"], "n_group": 4, "topk_group": 2},
    ),
    # experts in a latent width, one group of heads, steps that are clamped, biases, another window
    "nemotron-h-latent": (
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": [MAMBA, "moe", MAMBA, FULL, "mlp"],
            "moe_latent_size": 40,
            "norm_topk_prob": False,
            "n_groups": 1,
            "time_step_min": 0.4,
            "conv_kernel": 3,
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    # experts beside a shared MLP, attention without rotation, one group
    "granite-4": (
        "granitemoehybrid",
        {
            **_BAMBA,
            **_GRANITE,
            "layer_types": [MAMBA, FULL, MAMBA, MAMBA],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
        },
    ),
    # a shared MLP alone, attention with rotation, more groups, biases, tied
    "granite-4-dense": (
        "granitemoehybrid",
        {
            **_BAMBA,
            **_GRANITE,
            "layer_types": [MAMBA, MAMBA, FULL, FULL],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": ("bamba", {**_BAMBA, "mamba_n_groups": 2, "attn_layer_indices": [1]}),
    "bamba-clamped": (
        "bamba",
        {
            **_BAMBA,
            "attn_layer_indices": [3],
            "time_step_limit": (0.3, 1.2),
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1": ("falcon_h1", {**_FALCON, "mamba_n_groups": 2}),
    # a norm before the gate, one group, the size of mamba_expand, biases, tied
    "falcon-h1-norm": (
        "falcon_h1",
        {
            **_FALCON,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_d_ssm": None,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    # a norm after it
    "falcon-h1-norm-after": (
        "falcon_h1",
        {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    ),
    "mamba2": ("mamba2", {**_MAMBA2, "n_groups": 2}),
    "mamba2-clamped": (
        "mamba2",
        {
            **_MAMBA2,
            "n_groups": 1,
            "time_step_limit": (0.3, 1.2),
            "use_bias": True,
            "use_conv_bias": False,
        },
    ),
}
FIRST = tuple({family: name for name, (family, _) in reversed(MODELS.items())}.values())
WITHOUT_ATTENTION = ("mamba2", "mamba2-clamped")
# transformers clamps the steps of these in prefill alone, so that its tokens are not those of its own logits.
CLAMPED = ("nemotron-h-latent", "bamba-clamped", "mamba2-clamped")
CLASSES = {  # (config, model), of transformers
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "bamba": ("BambaConfig", "BambaForCausalLM"),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM"),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM"),
}


def vary(key: str, parameter: Any) -> bool:
    """As tiny_hybrids.vary."""
    if key.endswith("A_log"):
        parameter.uniform_(-5.0, 1.0)  # so that some heads remember hundreds of tokens
    elif key.endswith(("dt_bias", ".D")):
        parameter.normal_(0.0, 1.0)
    elif key.endswith("conv1d.weight"):
        parameter.normal_(0.0, 0.5)
    elif "norm" in key:
        parameter.normal_(1.0, 0.3)
    elif key.endswith("mixer.out_proj.weight") and parameter.std() < 0.1:  # Mamba 2's class draws it by its width
        parameter.normal_(0.0, 0.21)
    else:
        return False
    return True
