"""Tiny models of the families beyond Llama's kin, every quirk in one of them: name -> (family, what its config differs in).

tiny_models.py makes them. The first of each family runs always, the others where there is time.
"""

from typing import Any

BOS = 0
LOCAL, FULL = "sliding_attention", "full_attention"
THREE = [LOCAL, LOCAL, FULL]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 2.0 * i for i in range(8)], "original_max_position_embeddings": 512,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

# Their configs know no other sizes than these: KV heads and MLP follow from them.
_OLD = {"num_key_value_heads": ..., "intermediate_size": ..., "head_dim": ...}
_LONG = {"original_max_position_embeddings": 512, "max_position_embeddings": 2048}
_GEMMA = {"sliding_window": 12, "num_hidden_layers": 4, "initializer_range": 0.25, "tie_word_embeddings": False}
_GEMMA4 = {
    "sliding_window": 12, "num_hidden_layers": 4, "initializer_range": 0.25, "global_head_dim": 24,
    "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16,
}  # fmt: skip
_OLMO3_ROPE = {FULL: {**YARN, "rope_theta": 5000.0}, LOCAL: {"rope_type": "default", "rope_theta": 5000.0}}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {**_GEMMA, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "head_dim": 32}),
    "gemma2-uncapped": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True},
    ),
    "gemma3": ("gemma3", {**_GEMMA, "num_hidden_layers": 3, "layer_types": THREE, "query_pre_attn_scalar": 20}),
    "gemma3-scaled": (
        "gemma3",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "attn_logit_softcapping": 3.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
                LOCAL: {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gemma3-images": ("gemma3-images", {**_GEMMA, "layer_types": [*THREE, LOCAL], "tie_word_embeddings": True}),
    "gemma4": (
        "gemma4",
        {**_GEMMA4, "num_hidden_layers": 6, "layer_types": [LOCAL, FULL] * 3, "num_kv_shared_layers": 2, "head_dim": 32,
         "final_logit_softcapping": 8.0, "use_double_wide_mlp": True, "tie_word_embeddings": False},
    ),
    "gemma4-joint": (
        "gemma4",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 48,
         "tie_word_embeddings": False, "hidden_size_per_layer_input": 0, "layer_types": THREE,
         "num_hidden_layers": 3, "attention_bias": True,
         "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            LOCAL: {"rope_type": "default", "rope_theta": 500.0},
        }},
    ),
    "gemma4-images": (
        "gemma4-images",
        {**_GEMMA4, "num_kv_shared_layers": 1, "layer_types": [LOCAL, FULL, LOCAL, FULL], "pad_token_id": BOS},
    ),
    "phi3": ("phi3", {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 2}),
    "phi3-sliding": ("phi3", {"sliding_window": 14, "num_key_value_heads": 4, "head_dim": ...}),
    "phi3-longrope": ("phi3", {**_LONG, "rope_parameters": LONGROPE, "head_dim": ...}),
    "phi4-mini": (
        "phi3",
        {
            **_LONG,
            "num_attention_heads": 6,
            "hidden_size": 192,
            "head_dim": ...,
            "tie_word_embeddings": True,
            "rope_parameters": {
                **LONGROPE, "short_factor": [1.1] * 12, "long_factor": [3.0] * 12, "partial_rotary_factor": 0.75
            },
        },
    ),
    "olmo2": ("olmo2", {"head_dim": ...}),
    "olmo2-mha-bias": ("olmo2", {"head_dim": ..., "num_key_value_heads": 4, "attention_bias": True}),
    "olmo3": ("olmo3", {"head_dim": ..., "num_hidden_layers": 4, "sliding_window": 13, "rope_parameters": _OLMO3_ROPE}),
    "granite": (
        "granite",
        {
            "head_dim": ..., "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3,
            "logits_scaling": 0.5, "tie_word_embeddings": True,
        },
    ),
    "granite-bias": ("granite", {"head_dim": ..., "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.1}),
    "cohere2": ("cohere2", {"head_dim": ..., "num_hidden_layers": 4, "sliding_window": 11, "logit_scale": 0.25}),
    "cohere": ("cohere", {"head_dim": ..., "logit_scale": 0.125, "attention_bias": True}),
    "cohere-qk-norm": ("cohere", {"head_dim": ..., "use_qk_norm": True, "tie_word_embeddings": False}),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": ..., "head_dim": ...}),
    "gpt-neox-sequential": (
        "gpt_neox",
        {
            "num_key_value_heads": ..., "head_dim": ..., "use_parallel_residual": False, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "falcon-40b": ("falcon", {**_OLD, "new_decoder_architecture": True, "num_attention_heads": 6, "num_kv_heads": 2,
                              "hidden_size": 96}),
    "falcon-7b": ("falcon", {**_OLD, "num_attention_heads": 7, "hidden_size": 112}),
    "falcon-rw": (
        "falcon",
        {**_OLD, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True, "num_attention_heads": 12,
         "hidden_size": 192, "tie_word_embeddings": False},
    ),
    "falcon-11b": (
        "falcon",
        {**_OLD, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96,
         "tie_word_embeddings": False},
    ),
    "phi": ("phi", {"head_dim": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                         "partial_rotary_factor": 0.5}}),
    "smollm3": ("smollm3", {"head_dim": ..., "num_hidden_layers": 4}),
    "smollm3-sliding": (
        "smollm3",
        {"head_dim": ..., "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 10,
         "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "glm4": ("glm4", {}),
    "glm": ("glm", {"head_dim": 32, "attention_bias": False}),
    "seed-oss": ("seed_oss", {}),
    "seed-oss-bias": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4-full": (
        "exaone4",
        {"sliding_window": None, "layer_types": [FULL] * 3, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 20, "llama_4_scaling_beta": 0.3, "mscale": 1.0,
                             "mscale_all_dim": 1.0}},
    ),
    "ministral3-images": ("ministral3-images", {"tie_word_embeddings": False}),
    "bloom": ("bloom", {**_OLD, "num_attention_heads": 12, "hidden_size": 192, "tie_word_embeddings": False}),
    "bloom-tied": ("bloom", {**_OLD, "num_attention_heads": 16, "hidden_size": 256}),
    "gptj": ("gptj", {**_OLD, "rotary_dim": 8}),
    "gptj-tied": ("gptj", {**_OLD, "rotary_dim": 8, "tie_word_embeddings": True}),
    "gptj-inner": ("gptj", {**_OLD, "rotary_dim": 16, "n_inner": 80}),
}  # fmt: skip

CLASSES = {  # (config, model), of transformers
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "hy_v3": ("HYV3Config", "HYV3ForCausalLM"),
    "mimo_v2_flash": ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM"),
    "mistral4-images": ("Mistral3Config", "Mistral3ForConditionalGeneration"),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "llama4-images": ("Llama4Config", "Llama4ForConditionalGeneration"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4-images": ("Gemma4Config", "Gemma4ForConditionalGeneration"),
    "gemma3-images": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "cohere": ("CohereConfig", "CohereForCausalLM"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "falcon": ("FalconConfig", "FalconForCausalLM"),
    "phi": ("PhiConfig", "PhiForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "glm": ("GlmConfig", "GlmForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "ministral3-images": ("Mistral3Config", "Mistral3ForConditionalGeneration"),
    "bloom": ("BloomConfig", "BloomForCausalLM"),
    "gptj": ("GPTJConfig", "GPTJForCausalLM"),
}

# Without rotation, and with the steep slopes of few heads, a random model runs into cycles of few tokens.
REPETITIVE = ("bloom", "bloom-tied", "falcon-rw")
# One of each family, in every run.
FIRST = tuple({family: name for name, (family, _) in reversed(MODELS.items())}.values())


def for_gpu(changes: dict[str, Any]) -> dict[str, Any]:
    """With heads of a size that GPU kernels are built for."""
    if changes.get("head_dim", 16) is ...:
        heads = min(changes.get("num_attention_heads", 4), 7)  # wider models round so much that near-ties decide
        return {**changes, "num_attention_heads": heads, "hidden_size": 64 * heads}
    return with_heads(changes, 256 if "attn_logit_softcapping" in changes else 64)


def with_heads(changes: dict[str, Any], head_dim: Any) -> dict[str, Any]:
    """Of this size; Gemma 4's second kind has its own."""
    return {**changes, "head_dim": head_dim, **({"global_head_dim": 512} if "global_head_dim" in changes else {})}


GPU_MODELS = {f"gpu-{name}": (MODELS[name][0], for_gpu(MODELS[name][1])) for name in (*FIRST, "falcon-rw", "falcon-7b")}

# Of norms' weights, where layers must speak louder than a tied embedding for a test to see them.
_LOUD = {
    "gemma2-uncapped": 3.5, "olmo2": 2.5, "falcon-7b": 2.0, "exaone4": 2.5, "exaone4-full": 3.0, "gemma3-images": 7.0,
    "granite": 4.0, "gptj": 2.0, "olmo2-mha-bias": 3.0, "gpt-neox-sequential": 3.0, "gpt-neox": 2.0, "phi": 1.5,
    "gemma4-images": 3.5, "gptj-tied": 3.0, "split-phi": 1.5,
}  # fmt: skip


def norm_mean(name: str, family: str, key: str = "") -> float:
    """Of Gemma up to 3 they are less 1. Gemma 4 scales scores by those of queries and keys alone."""
    if family.startswith("gemma4") and key.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.0
    return _LOUD.get(name.removeprefix("gpu-"), 1.0) - family.startswith(("gemma2", "gemma3"))


def make(family: str, fields: dict[str, Any]) -> Any:
    """The transformers model, its weights as transformers draws them. A field of `...` is left out."""
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in CLASSES[family])
    fields = {name: value for name, value in fields.items() if value is not ...}
    if family == "gemma3-images":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "image_size": 28, "patch_size": 14}  # fmt: skip
        config = config_class(text_config=fields, vision_config=vision, mm_tokens_per_image=4)
    elif family == "gemma4-images":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}  # fmt: skip
        config = config_class(text_config=fields, vision_config=vision, audio_config=None)
    elif family == "llama4-images":
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16,
                  "projector_output_dim": 16}  # fmt: skip
        config = config_class(text_config=fields, vision_config=vision)
    elif family in ("ministral3-images", "mistral4-images"):
        vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 16}  # fmt: skip
        text = {"model_type": family.removesuffix("-images"), **fields}
        config = config_class(text_config=text, vision_config=vision, tie_word_embeddings=False)
    else:
        config = config_class(**fields)
    # transformers 5.23 adds Falcon's ALiBi twice in eager attention, once in what it takes by default
    config._attn_implementation = "sdpa" if family == "falcon" else "eager"
    return model_class(config).eval()
