"""Tiny multimodal models as transformers saves them, and as the hub has them where that differs: what test_wrappers.py serves.

`wrapped(name)` gives the folder of one of `MODELS`, `reference(name)` the transformers model. Weights are drawn as in
tiny_models.py.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import tiny_models
from safetensors.torch import load_file, save_file
from tiny_families import MODELS as FAMILIES
from tiny_hybrids import _DELTA as DELTA
from tiny_hybrids import _EXPERTS as OF_EXPERTS
from tiny_moe import MODELS as MOE

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
OF_GLM = {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA4 = {
    "sliding_window": 12,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 24,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}

PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {"model_type": "pixtral", **PATCHES, "head_dim": 16}
VISUAL = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
DEEP = {**VISUAL, "deepstack_visual_indexes": [0]}


class Case(NamedTuple):
    """The names of its classes without their endings, and its two configs. architecture: as published, if it is another."""

    config: str
    text: dict[str, Any]
    vision: dict[str, Any] | None
    architecture: str = ""
    more: dict[str, Any] = {}  # noqa: RUF012  # fields of the config around both; never changed


MODELS: dict[str, Case] = {
    "qwen2-vl": Case("Qwen2VL", {**MROPE}, {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2.5-vl": Case("Qwen2_5_VL", {**MROPE, "tie_word_embeddings": True}, {**VISUAL, "fullatt_block_indexes": [0]}),
    "qwen3-vl": Case("Qwen3VL", {"rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}}, DEEP),
    "qwen3-vl-moe": Case("Qwen3VLMoe", {**MROPE, **EXPERTS, "num_experts": 8}, DEEP),
    "kimi-k2.5": Case(
        "Kimi_K25", {"model_type": "deepseek_v3", **MOE["deepseek-v3"][1]}, PATCHES, "KimiK25ForConditionalGeneration"
    ),
    "gemma4-unified": Case("Gemma4Unified", GEMMA4, None),
    "glm4.1v": Case("Glm4v", OF_GLM, VISUAL),
    "glm4.5v": Case("Glm4vMoe", {**OF_GLM, **EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}, VISUAL),
    "glm4.6v": Case("Glm46V", {"model_type": "glm4v_text", **OF_GLM}, {"model_type": "glm4v_vision", **VISUAL}),
    "internvl": Case("InternVL", {"model_type": "qwen3"}, {**PATCHES, "image_size": [28, 28], "patch_size": [14, 14]}),
    "internvl-moe": Case(
        "InternVL",
        {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 8},
        {**PATCHES, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "pixtral": Case("Llava", {"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "llava": Case("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", **PATCHES}),
    "llava-next": Case("LlavaNext", {"model_type": "mistral"}, {"model_type": "clip_vision_model", **PATCHES}),
    "mistral-small-3": Case("Mistral3", {"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "aya-vision": Case(
        "AyaVision",
        {"model_type": "cohere2", "sliding_window": 11, "head_dim": ...},
        {"model_type": "siglip_vision_model", **PATCHES},
    ),
    "idefics3": Case("Idefics3", {"model_type": "llama"}, PATCHES),
    "lfm2-vl": Case(
        "Lfm2Vl",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "head_dim": ...},
        {"model_type": "siglip2_vision_model", **{k: v for k, v in PATCHES.items() if k != "image_size"}, "num_patches": 4},
    ),
}

# Models that see: as above, but with ids of images within the vocabulary.
IDS = {"image_token_id": 500, "vision_start_token_id": 501, "vision_end_token_id": 502, "video_token_id": 503}
OF_QWEN35 = {
    "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "mrope_interleaved": True},
    "num_hidden_layers": 4,
}
SEEING = {
    **{f"{name}-seen": MODELS[name]._replace(more=IDS) for name in ("qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe")},
    "qwen3.5-seen": Case("Qwen3_5", {**DELTA, **OF_QWEN35}, VISUAL, more=IDS),
    "qwen3.5-moe-seen": Case("Qwen3_5Moe", {**DELTA, **OF_EXPERTS, **OF_QWEN35}, VISUAL, more=IDS),
}
OF_GLM_IDS = {**IDS, "image_start_token_id": 501, "image_end_token_id": 502}
SEEING |= {
    f"{name}-seen": MODELS[name]._replace(more=OF_GLM_IDS, vision={**MODELS[name].vision, "image_size": 56})
    for name in ("glm4.1v", "glm4.5v", "glm4.6v")
}
MINISTRAL3 = {"model_type": "ministral3", **FAMILIES["ministral3"][1]}
OF_PIXELS = {"image_token_id": 500}
SEEING |= {
    "mistral-small-3-seen": MODELS["mistral-small-3"]._replace(more={**OF_PIXELS, "spatial_merge_size": 2}),
    "ministral3-seen": Case("Mistral3", MINISTRAL3, PIXTRAL, more={**OF_PIXELS, "spatial_merge_size": 2}),
    "mistral4-seen": Case(
        "Mistral3", {"model_type": "mistral4", **MOE["mistral4"][1]}, PIXTRAL, more={**OF_PIXELS, "spatial_merge_size": 2}
    ),
    "internvl-seen": MODELS["internvl"]._replace(more={**OF_PIXELS, "image_seq_length": 1}),
}
# Tokens of an image see each other: in all layers, in those with a window, in none.
FULL, LOCAL = "full_attention", "sliding_attention"
OF_GEMMA = {**IDS, "boi_token_index": 501, "eoi_token_index": 502, "image_token_index": 500, "mm_tokens_per_image": 9}
GEMMA3_SEEN = {
    "num_hidden_layers": 4,
    "layer_types": [LOCAL, FULL, LOCAL, LOCAL],
    "sliding_window": 11,
    "query_pre_attn_scalar": 20,
    "pad_token_id": 0,
}
SIGLIP = {"model_type": "siglip_vision_model", **PATCHES, "image_size": 84, "num_hidden_layers": 2}
GEMMA4_SEEN = {
    **GEMMA4,
    "num_hidden_layers": 5,
    "layer_types": [LOCAL, FULL, LOCAL, LOCAL, FULL],
    "vocab_size_per_layer_input": tiny_models.VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 7,
    "use_bidirectional_attention": "vision",
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
    "standardize": True,
    "use_clipped_linears": True,
}
UNIFIED_VISION = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32}
OF_GEMMA4 = {**IDS, "boi_token_id": 501, "eoi_token_id": 502, "audio_config": None}
WITHOUT_INPUTS = {name: GEMMA4_SEEN[name] for name in GEMMA4_SEEN if not name.endswith("per_layer_input")}
SEEING |= {
    "gemma3-seen": Case("Gemma3", {**GEMMA3_SEEN}, SIGLIP, more=OF_GEMMA),
    "gemma3-narrow-seen": Case("Gemma3", {**GEMMA3_SEEN, "sliding_window": 5}, SIGLIP, more=OF_GEMMA),
    "gemma4-seen": Case("Gemma4", GEMMA4_SEEN, GEMMA4_VISION, more=OF_GEMMA4),
    "gemma4-shared-seen": Case(
        "Gemma4",
        {**GEMMA4_SEEN, "num_kv_shared_layers": 2, "sliding_window": 5, "attention_k_eq_v": False},
        {**GEMMA4_VISION, "standardize": False, "use_clipped_linears": False},
        more=OF_GEMMA4,
    ),
    "gemma4-causal-seen": Case("Gemma4", {**GEMMA4_SEEN, "use_bidirectional_attention": None}, GEMMA4_VISION, more=OF_GEMMA4),
    "gemma4-unified-seen": Case("Gemma4Unified", WITHOUT_INPUTS, UNIFIED_VISION, more=OF_GEMMA4),
}
# With heads of sizes that GPU kernels are built for.
SECTIONS = {"rope_parameters": {**ROPE, "mrope_section": [8, 12, 12]}, "head_dim": 64}
SEEING |= {
    "gpu-qwen2.5-vl-seen": SEEING["qwen2.5-vl-seen"]._replace(
        text={**SEEING["qwen2.5-vl-seen"].text, **SECTIONS, "hidden_size": 256, "head_dim": ...},
        vision={**VISUAL, "fullatt_block_indexes": [0], "out_hidden_size": 256, "hidden_size": 128},
    ),
    "gpu-qwen3-vl-seen": SEEING["qwen3-vl-seen"]._replace(
        text={**SEEING["qwen3-vl-seen"].text, **SECTIONS}, vision={**DEEP, "hidden_size": 144}
    ),
}


SEEING["gpu-gemma3-seen"] = SEEING["gemma3-seen"]._replace(text={**GEMMA3_SEEN, "head_dim": 64, "hidden_size": 128})
SEEING["gpu-gemma4-seen"] = SEEING["gemma4-seen"]._replace(
    text={**GEMMA4_SEEN, "head_dim": 64, "hidden_size": 128, "global_head_dim": 128}
)


@functools.cache
def reference(name: str) -> Any:
    """The transformers model, float32, eval mode, eager attention."""
    import torch
    import transformers

    case = (MODELS | SEEING)[name]
    fields = {
        key: value for key, value in {**tiny_models.BASE, "num_hidden_layers": 2, **case.text}.items() if value is not ...
    }
    tied = fields.pop("tie_word_embeddings", False)
    configs = {"text_config": fields, "tie_word_embeddings": tied, **case.more} | (
        {"vision_config": case.vision} if case.vision else {}
    )
    config_class, model_class = (
        getattr(transformers, f"{case.config}{ending}") for ending in ("Config", "ForConditionalGeneration")
    )
    config = config_class(**configs, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(sum(name.encode()))
        model = model_class(config).eval()
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in key:
                parameter.normal_(1.0, 0.2)
            elif key.endswith("gate.weight"):  # of experts: far apart, so that rounding chooses no other
                parameter.normal_(0.0, 0.4)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.21)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
            elif key.endswith(("layer_scalar", "std_scale")):
                buffer.uniform_(0.5, 1.2)
            elif key.endswith("std_bias"):
                buffer.normal_(0.0, 0.3)
            elif key.endswith(("input_max", "output_max")):
                buffer.fill_(2.0)
    return model


@functools.cache
def wrapped(name: str) -> Path:
    """The folder, with names of tensors and architectures as the hub has them."""
    case, folder = (MODELS | SEEING)[name], tiny_models.root() / f"wrapped-{name}"
    reference(name).save_pretrained(folder)
    if case.architecture:
        # transformers 5.23 calls the text's layers blocks when it saves Kimi K2.5
        renamed(folder, lambda key: key.replace("language_model.model.blocks.", "language_model.model.layers."))
        edit(folder, architectures=[case.architecture])
    tiny_models.write_tokenizer(folder)
    return folder


def renamed(folder: Path, name_of: Any) -> None:
    """Rename a checkpoint's tensors."""
    file = folder / "model.safetensors"
    save_file({name_of(key): tensor for key, tensor in load_file(file).items()}, file)


def edit(folder: Path, **fields: Any) -> None:
    """Replace fields of config.json; a value of ... removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_bytes()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
