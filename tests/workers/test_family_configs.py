"""config.json of published checkpoints of the dense families, as their folders have it: read, with what is odd in each."""

from pathlib import Path

import pytest

from quire.ipc.text_config import is_stretched, text_fields
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import FAMILIES, parse_model_config

LOCAL, FULL = "sliding_attention", "full_attention"
COMMON = {"transformers_version": "4.50.0", "torch_dtype": "bfloat16", "use_cache": True, "attention_dropout": 0.0}

GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0, "bos_token_id": 2,
    "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
    "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "sliding_window_size": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None, "bos_token_id": 2,
    "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
PHI3_MINI_128K = {
    "_name_or_path": "Phi-3-mini-128k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1, "embd_pdrop": 0.0,
    "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "su"},
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip
PHI4_MINI = {
    **PHI3_MINI_128K, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}, "vocab_size": 200064,
}  # fmt: skip
OLMO2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
    "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip
OLMO3_7B = {
    **OLMO2_7B, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "max_position_embeddings": 65536,
    "layer_types": [LOCAL, LOCAL, LOCAL, FULL] * 8, "sliding_window": 4096,
    "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                     "original_max_position_embeddings": 8192, "rope_type": "yarn"},
}  # fmt: skip
GRANITE_33_8B = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125, "bos_token_id": 0,
    "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12800, "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
    "tie_word_embeddings": True, "vocab_size": 49159,
}  # fmt: skip
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "bos_token_id": 5, "cache_implementation": "hybrid",
    "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
    "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
    "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip
COMMAND_R = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "bos_token_id": 5, "eos_token_id": 255001,
    "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02, "intermediate_size": 22528,
    "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192, "model_max_length": 131072,
    "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64,
    "pad_token_id": 0, "pretraining_tp": 1, "rope_theta": 8000000.0, "use_qk_norm": False, "vocab_size": 256000,
}  # fmt: skip
PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
    "model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12, "rotary_emb_base": 10000,
    "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
FALCON_7B = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "auto_map": {}, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True,
    "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
    "vocab_size": 65024,
}  # fmt: skip
FALCON_40B = {**FALCON_7B, "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128,
              "num_hidden_layers": 60, "num_kv_heads": 8}  # fmt: skip
FALCON_RW_1B = {
    **FALCON_7B, "alibi": True, "bias": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2048,
    "multi_query": False, "num_attention_heads": 32, "num_hidden_layers": 24, "parallel_attn": False, "vocab_size": 50304,
}  # fmt: skip
FALCON_11B = {
    **FALCON_40B, "activation": "gelu", "ff_factor": 4, "ffn_hidden_size": 16384, "hidden_size": 4096,
    "max_position_embeddings": 8192, "num_attention_heads": 32, "num_ln_in_parallel_attn": 1, "rope_scaling": None,
    "rope_theta": 500042.0, "tie_word_embeddings": False,
}  # fmt: skip
PHI_2 = {
    "architectures": ["PhiForCausalLM"], "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256,
    "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 10240,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False,
    "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 51200,
}  # fmt: skip
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "bos_token_id": None, "eos_token_id": 128012,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": [FULL] * 36, "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
    "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
GLM4_9B = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696,
    "max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552,
}  # fmt: skip
SEED_OSS_36B = {
    "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False, "bos_token_id": 0,
    "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss",
    "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1,
    "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
    "tie_word_embeddings": False, "vocab_size": 155136,
}  # fmt: skip
EXAONE4_32B = {
    "architectures": ["Exaone4ForCausalLM"], "bos_token_id": 1, "eos_token_id": 361, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27392,
    "layer_types": [LOCAL, LOCAL, LOCAL, FULL] * 16, "max_position_embeddings": 131072, "model_type": "exaone4",
    "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 1000000, "vocab_size": 102400,
}  # fmt: skip
MINISTRAL3_8B = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
        "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
BLOOM_560M = {
    "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
    "architectures": ["BloomForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom",
    "n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pad_token_id": 3,
    "pretraining_tp": 1, "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False,
    "unk_token_id": 0, "vocab_size": 250880,
}  # fmt: skip
GPTJ_6B = {
    "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "bos_token_id": 50256,
    "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28,
    "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True}},
    "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "vocab_size": 50400,
}  # fmt: skip

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "vocab_size": 49152,
}  # fmt: skip
QWEN3_CODER_480B = {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 262144, "max_window_layers": 62, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 2560, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts": 160,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "output_router_logits": False,
    "qkv_bias": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False, "use_qk_norm": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

# what each is to be: (layers, heads, KV heads, head size, windows, tied, positions), and more of the first layer's attention
KNOWN = {
    "gemma2": (GEMMA2_9B, (42, 16, 8, 256, {0, 4096}, True, 8192), {"softcap": 50.0, "scale": 256**-0.5}),
    "gemma3-4b": (GEMMA3_4B, (34, 8, 4, 256, {0, 1024}, True, 131072), {"qk_norm_eps": 1e-6, "softcap": 0.0}),
    "gemma3-1b": (GEMMA3_1B, (26, 4, 1, 256, {0, 512}, True, 32768), {"qk_norm_weighs": "plus_one"}),
    "phi3": (PHI3_MINI_128K, (32, 32, 32, 96, {262144}, False, 131072), {}),
    "phi4-mini": (PHI4_MINI, (32, 24, 8, 128, {262144}, True, 131072), {}),
    "olmo2": (OLMO2_7B, (32, 32, 32, 128, {0}, False, 4096), {}),
    "olmo3": (OLMO3_7B, (32, 32, 32, 128, {0, 4096}, False, 65536), {}),
    "granite": (GRANITE_33_8B, (40, 32, 8, 128, {0}, True, 131072), {"scale": 0.0078125}),
    "cohere2": (COMMAND_R7B, (32, 32, 8, 128, {0, 4096}, True, 8192), {}),
    "cohere": (COMMAND_R, (40, 64, 64, 128, {0}, True, 8192), {}),
    "pythia": (PYTHIA, (12, 12, 12, 64, {0}, False, 2048), {}),
    "falcon-7b": (FALCON_7B, (32, 71, 1, 64, {0}, True, 2048), {"alibi": None}),
    "falcon-40b": (FALCON_40B, (60, 128, 8, 64, {0}, True, 2048), {}),
    "falcon-rw": (FALCON_RW_1B, (24, 32, 32, 64, {0}, True, 2048), {"rope": None}),
    "falcon-11b": (FALCON_11B, (60, 32, 8, 128, {0}, False, 8192), {}),
    "phi-2": (PHI_2, (32, 32, 32, 80, {0}, False, 2048), {}),
    "smollm3": (SMOLLM3, (36, 16, 4, 128, {0}, True, 65536), {}),
    "glm4": (GLM4_9B, (40, 32, 2, 128, {0}, False, 32768), {}),
    "seed-oss": (SEED_OSS_36B, (64, 80, 8, 128, {0}, False, 524288), {}),
    "exaone4": (EXAONE4_32B, (64, 40, 8, 128, {0, 4096}, False, 131072), {"qk_norm_eps": 1e-5}),
    "ministral3": (MINISTRAL3_8B, (34, 32, 8, 128, {0}, False, 262144), {}),
    "bloom": (BLOOM_560M, (24, 16, 16, 64, {0}, True, 2048), {"rope": None}),
    "gptj": (GPTJ_6B, (28, 16, 16, 256, {0}, False, 2048), {}),
    "smollm2": (SMOLLM2_135M, (30, 9, 3, 64, {0}, True, 8192), {}),
    "falcon3": ({**SMOLLM2_135M, "activation": "swiglu"}, (30, 9, 3, 64, {0}, True, 8192), {}),
    "qwen3-coder": (QWEN3_CODER_480B, (62, 96, 8, 128, {0}, False, 262144), {}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_published_configs_are_read(name):
    fields, expected, of_attention = KNOWN[name]
    config = parse_model_config({**COMMON, **fields})
    spec = config.layers[0].attention
    windows = {layer.attention.window for layer in config.layers}
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    found = (len(config.layers), *heads, windows, config.tie_word_embeddings, config.max_position_embeddings)
    assert found == expected
    assert {key: getattr(spec, key) for key in of_attention} == of_attention
    core = text_fields({**COMMON, **fields})
    assert (core["max_position_embeddings"], core["vocab_size"]) == (config.max_position_embeddings, config.vocab_size)


def test_the_docs_name_every_architecture():
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []


def test_rotary_embeddings_by_layer():
    def ropes(fields):
        return {layer.attention.window > 0: layer.attention.rope for layer in parse_model_config(fields).layers}

    gemma = ropes(GEMMA3_4B)
    assert (gemma[True].theta, gemma[True].type) == (10000.0, "default")
    assert (gemma[False].theta, gemma[False].type, gemma[False].factor) == (1000000.0, "linear", 8.0)
    assert not is_stretched(text_fields(GEMMA3_4B)) and is_stretched(text_fields(OLMO3_7B))
    olmo = ropes(OLMO3_7B)
    assert (olmo[True].type, olmo[False].type, olmo[False].attention_factor) == ("default", "yarn", 1.2079441541679836)
    assert olmo[True].theta == olmo[False].theta == 500000.0
    exaone, cohere = ropes(EXAONE4_32B), ropes(COMMAND_R7B)
    assert exaone[False] is None and exaone[True].type == "llama3"
    assert cohere[False] is None and cohere[True].interleaved
    patterned = {name: value for name, value in EXAONE4_32B.items() if name != "layer_types"}
    assert parse_model_config(patterned) == parse_model_config(EXAONE4_32B)
    assert {layer.attention.rope.rotary_dim for layer in parse_model_config(PHI4_MINI).layers} == {96}
    assert parse_model_config(PHI3_MINI_128K).layers[0].attention.rope.type == "longrope"
    smol = [layer.attention.rope is not None for layer in parse_model_config(SMOLLM3).layers]
    assert smol == [True, True, True, False] * 9
    ministral = parse_model_config(MINISTRAL3_8B).layers[0].attention
    assert (ministral.temperature.beta, ministral.temperature.original_max_position_embeddings) == (0.1, 16384)
    assert (ministral.rope.type, ministral.rope.theta) == ("yarn", 1e6)


def test_absent_key_value_heads_are_a_constant_of_the_class_or_the_query_heads():
    def without(fields):
        layers = parse_model_config({n: v for n, v in fields.items() if n != "num_key_value_heads"}).layers
        return layers[0].attention.num_kv_heads

    found = {name: without(fields) for name, fields in (("smollm3", SMOLLM3), ("seed-oss", SEED_OSS_36B), ("glm4", GLM4_9B))}
    assert found == {"smollm3": 4, "seed-oss": 8, "glm4": 2}
    assert (without(GRANITE_33_8B), without(PHI_2), without(QWEN3_CODER_480B)) == (32, 32, 4)
    with pytest.raises(ModelConfigError, match="40 is not a multiple of the default of an absent num_key_value_heads, 32"):
        without(EXAONE4_32B)


def test_a_mistral_within_mistral_3_has_mistrals_defaults():
    """Not Ministral's heads of 128 elements that see everything."""
    text = {n: v for n, v in MINISTRAL3_8B["text_config"].items() if n not in ("head_dim", "sliding_window", "rope_parameters")}
    attention = {
        kind: parse_model_config({**MINISTRAL3_8B, "text_config": {**text, "model_type": kind, "num_attention_heads": 64}})
        .layers[0]
        .attention
        for kind in ("mistral", "ministral3")
    }
    found = {kind: (a.head_dim, a.window, a.rope.type) for kind, a in attention.items()}
    assert found == {"mistral": (64, 4096, "default"), "ministral3": (128, 0, "yarn")}


def test_gpt_neox_reads_its_own_names_of_the_rotation():
    """transformers does not read these; its version 4 wrote them beside."""
    others = {**PYTHIA, "rope_theta": 7.0, "partial_rotary_factor": 1.0}
    assert parse_model_config(others) == parse_model_config(PYTHIA)
    rope = parse_model_config({**others, "rotary_pct": 0.5, "rotary_emb_base": 99}).layers[0].attention.rope
    assert (rope.rotary_dim, rope.theta) == (32, 99.0)


def test_multimodal_gemma_3_does_not_cap_its_logits():
    """As transformers' does not, unlike that of text alone."""
    capped = {"final_logit_softcapping": 20.0}
    assert parse_model_config({**GEMMA3_1B, **capped}).model.logit_softcap == 20.0
    assert parse_model_config({**GEMMA3_4B, "text_config": {**GEMMA3_4B["text_config"], **capped}}).model.logit_softcap == 0.0


@pytest.mark.parametrize(
    ("fields", "changes", "said"),
    [
        (GEMMA2_9B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA2_9B, {"hidden_activation": "mish"}, 'sets hidden_activation to "mish"'),
        (FALCON_7B, {"activation": "xielu"}, 'sets activation to "xielu"'),
        (GPTJ_6B, {"activation_function": "prelu"}, 'sets activation_function to "prelu"'),
        (QWEN3_CODER_480B, {"hidden_act": "relu"}, 'sets hidden_act to "relu": only .silu. or .swish. is'),
        (GEMMA2_9B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (GEMMA3_4B, {"text_config": 3}, "text_config"),
        (GEMMA3_4B, {"use_mrope": True}, "use_mrope"),
        (GEMMA3_1B, {"rope_parameters": {"full_attention": {}, "x": {}}}, "outside of full_attention"),
        (PHI3_MINI_128K, {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0] * 48}}, "long_factor"),
        (PHI3_MINI_128K, {"mlp_bias": True}, "mlp_bias"),
        (PHI3_MINI_128K, {"num_experts": 4}, "num_experts"),
        (COMMAND_R7B, {"use_parallel_block": False}, "use_parallel_block"),
        (FALCON_7B, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (FALCON_7B, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        (FALCON_40B, {"parallel_attn": False}, "parallel_attn"),
        (PHI_2, {"qk_layernorm": True}, "qk_layernorm"),
        (QWEN3_CODER_480B, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (SMOLLM2_135M, {"activation": "gelu"}, "activation"),
        (EXAONE4_32B, {"attention_bias": True}, "attention_bias to true: only False"),
        (EXAONE4_32B, {"num_dreams": 3}, """--hf-overrides '{"num_dreams": null}'"""),
        (PHI_2, {"partial_rotary_factor": 0.01}, "must be even"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers"),
        (EXAONE4_32B, {"layer_types": None, "sliding_window_pattern": "LX"}, "sliding_window_pattern"),
        (MINISTRAL3_8B, {"text_config": {**MINISTRAL3_8B["text_config"], "model_type": "mistral9"}}, "mistral9"),
        (BLOOM_560M, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (GPTJ_6B, {"rotary_dim": 63}, "rotary_dim 63"),
        (GPTJ_6B, {"scale_attn_weights": False}, "scale_attn_weights"),
        (GLM4_9B, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (GLM4_9B, {"rope_scaling": {"rope_type": []}}, "rope type"),
        (GLM4_9B, {"num_hidden_layers": 1 << 29}, "num_hidden_layers is 536870912: at most"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(fields, changes, said):
    with pytest.raises(ModelConfigError, match=said):
        parse_model_config({**fields, **changes})


@pytest.mark.parametrize(
    "name",
    ["MambaForCausalLM", "JambaForCausalLM", "FalconMambaForCausalLM", "RecurrentGemmaForCausalLM"],
)  # fmt: skip
def test_recurrent_and_hybrid_families_are_refused_by_name(name):
    with pytest.raises(ModelConfigError, match=f"{name} .*recurrent"):
        parse_model_config({"architectures": [name]})


@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_sparse_attention_is_refused_by_name(name):
    with pytest.raises(ModelConfigError, match=f"{name} is not supported: its attention is sparse"):
        parse_model_config({"architectures": [name]})
