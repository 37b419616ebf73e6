"""Multimodal checkpoints of which the text model is served: the table `WRAPPERS` of the models around text models.

A wrapper's config.json nests the text model's fields in text_config (InternVL: llm_config) or, in older versions, has them
beside its own. Its checkpoint has the text model's tensors under prefixes, and tensors of other modules, which are skipped.
The table's key is config.json's architecture and text_config's model_type, "" if the config is not nested. Called by
family_table.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.ipc.text_config import NESTED_DEFAULTS, nested_text
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import ModelConfigError
from quire.workers.models.fields import ONLY, USED, Json, words
from quire.workers.models.spellings import plain_rotation

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class TensorNames(NamedTuple):
    """How a wrapper's checkpoints name tensors. strip: (prefix, the text model's). skip: prefixes of other modules' tensors."""

    strip: tuple[tuple[str, str], ...]
    skip: tuple[str, ...]


class Wrapper(NamedTuple):
    """A wrapper around one text model.

    text: the text model's architecture, a key of family_table.FAMILIES. defaults: of fields that the text model's config lacks.
    fixed: fields of the text model that the wrapper has decided.
    """

    text: str
    names: TensorNames
    defaults: Mapping[str, Any] = _NOTHING
    fixed: Mapping[str, Any] = _NOTHING


def _both(*modules: str) -> tuple[str, ...]:
    """Prefixes of modules, which versions of transformers before 4.52 have outside of `model.`."""
    return tuple(f"{prefix}{module}." for module in modules for prefix in ("", "model."))


# The last is Kimi K2.5's as NVIDIA publishes it: the text model without the head around it.
STRIP = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)
LLAVA = TensorNames(STRIP, (*_both("vision_tower", "multi_modal_projector"), "image_newline", "model.image_newline"))
QWEN_VL = TensorNames(STRIP, _both("visual"))
LLAMA4 = TensorNames(STRIP, _both("vision_model", "multi_modal_projector"))
GEMMA4 = TensorNames(STRIP, _both("vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio"))
KIMI = TensorNames(STRIP, _both("vision_tower", "mm_projector", "multi_modal_projector"))
INTERN = TensorNames(STRIP, _both("vision_tower", "vision_model", "multi_modal_projector", "mlp1"))
IDEFICS = TensorNames((("model.text_model.", "model."),), _both("vision_model", "connector"))

GEMMA3_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
UNIFIED_DEFAULTS = {"sliding_window": 1024, "hidden_size_per_layer_input": 0}
GLM_MOE_DEFAULTS = {"attention_bias": True}

# Text models by their model_type, for wrappers that are published around several.
TEXTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def _around(names: TensorNames, *kinds: str) -> dict[str, Wrapper]:
    return {kind: Wrapper(TEXTS[kind], names) for kind in kinds}


# By architecture and then by model_type; the first is the one that a text_config without model_type has.
_BY_ARCHITECTURE: dict[str, dict[str, Wrapper]] = {
    "AyaVisionForConditionalGeneration": _around(LLAVA, "cohere2"),
    "Cohere2VisionForConditionalGeneration": _around(LLAVA, "cohere2"),
    "Gemma3ForConditionalGeneration": {
        "gemma3_text": Wrapper("Gemma3ForCausalLM", LLAVA, GEMMA3_DEFAULTS, {"final_logit_softcapping": None}),
    },
    "Gemma4ForConditionalGeneration": {"gemma4_text": Wrapper("Gemma4ForCausalLM", GEMMA4)},
    "Gemma4UnifiedForConditionalGeneration": {
        "gemma4_unified_text": Wrapper("Gemma4ForCausalLM", GEMMA4, UNIFIED_DEFAULTS),
    },
    "Glm46VForConditionalGeneration": {
        "glm4v_text": Wrapper("Glm4ForCausalLM", QWEN_VL, {"partial_rotary_factor": 1.0}),
        "glm4v_moe_text": Wrapper("Glm4MoeForCausalLM", QWEN_VL, GLM_MOE_DEFAULTS),
    },
    "Glm4vForConditionalGeneration": dict.fromkeys(
        ("", "glm4v_text"), Wrapper("Glm4ForCausalLM", QWEN_VL, {"partial_rotary_factor": 1.0})
    ),
    "Glm4vMoeForConditionalGeneration": dict.fromkeys(
        ("", "glm4v_moe_text"), Wrapper("Glm4MoeForCausalLM", QWEN_VL, GLM_MOE_DEFAULTS)
    ),
    "Idefics3ForConditionalGeneration": _around(IDEFICS, "llama"),
    "InternVLChatModel": _around(INTERN, "llama", "phi3", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"),
    "InternVLForConditionalGeneration": _around(INTERN, "qwen2", "llama", "qwen3", "qwen3_moe", "gpt_oss"),
    "KimiK25ForConditionalGeneration": dict.fromkeys(("kimi_k2", "deepseek_v3"), Wrapper("DeepseekV3ForCausalLM", KIMI)),
    "KimiVLForConditionalGeneration": {"deepseek_v3": Wrapper("DeepseekV3ForCausalLM", KIMI)},
    "Lfm2VlForConditionalGeneration": {"lfm2": Wrapper("Lfm2ForCausalLM", LLAVA)},
    "Llama4ForConditionalGeneration": {"llama4_text": Wrapper("Llama4ForCausalLM", LLAMA4)},
    "LlavaForConditionalGeneration": _around(LLAVA, "llama", "mistral", "phi3", "gemma2", "qwen2", "qwen3"),
    "LlavaNextForConditionalGeneration": _around(LLAVA, "llama", "mistral", "qwen2"),
    "LlavaOnevisionForConditionalGeneration": _around(LLAVA, "qwen2", "qwen3"),
    "Mistral3ForConditionalGeneration": _around(LLAVA, "mistral", "ministral3", "mistral4"),
    "Qwen2VLForConditionalGeneration": dict.fromkeys(("", "qwen2_vl_text"), Wrapper("Qwen2ForCausalLM", QWEN_VL)),
    "Qwen2_5_VLForConditionalGeneration": dict.fromkeys(("", "qwen2_5_vl_text"), Wrapper("Qwen2ForCausalLM", QWEN_VL)),
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": Wrapper("Qwen3ForCausalLM", QWEN_VL)},
    "Qwen3VLMoeForConditionalGeneration": {
        "qwen3_vl_moe_text": Wrapper("Qwen3VLMoeTextModel", QWEN_VL, fixed={"norm_topk_prob": True}),
    },
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": Wrapper("Qwen3_5ForCausalLM", QWEN_VL)},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": Wrapper("Qwen3_5MoeForCausalLM", QWEN_VL)},
    "SmolVLMForConditionalGeneration": _around(IDEFICS, "llama"),
    "VipLlavaForConditionalGeneration": _around(LLAVA, "llama"),
}
_BY_ARCHITECTURE["Kimi_K25ForConditionalGeneration"] = _BY_ARCHITECTURE["KimiK25ForConditionalGeneration"]  # transformers' name

# (architecture, text_config's model_type) -> the wrapper
WRAPPERS: dict[tuple[str, str], Wrapper] = {
    (architecture, kind): wrapper for architecture, kinds in _BY_ARCHITECTURE.items() for kind, wrapper in kinds.items()
}

WRAPPED = frozenset(_BY_ARCHITECTURE)

# Fields that concern images, audio and video, which some configs have beside the text model's own.
OF_MEDIA = words(
    "vision_config audio_config image_token_id video_token_id image_start_token_id image_end_token_id video_start_token_id",
    "video_end_token_id vision_start_token_id vision_end_token_id vision_token_id",
)


def wrapper_of(fields: Json, architecture: str) -> Wrapper | None:
    """The wrapper that config.json describes; None: there is none. Raises ModelConfigError for a text model without a row."""
    kinds = _BY_ARCHITECTURE.get(architecture)
    if kinds is None:
        return None
    text = nested_text(fields)
    kind = "" if text is None else str(text.get("model_type") or next(iter(kinds)))
    if kind in kinds:
        return kinds[kind]
    if text is None:
        raise ModelConfigError("config.json lacks text_config, or it is not an object")
    known = ", ".join(name for name in kinds if name)
    raise ModelConfigError(
        f"architecture {architecture} with a text_config of model_type {kind!r:.40} is not supported; supported are {known}"
    )


def text_fields(fields: Json, wrapper: Wrapper, known: frozenset[str]) -> Json:
    """The text model's fields. known: those of its family besides fields.USED.

    A wrapper builds its text model from text_config alone. Fields around it count only if a text model has them, too
    (dtype, tie_word_embeddings), if text_config lacks them.
    """
    text = nested_text(fields)
    if text is None:
        found = {name: value for name, value in fields.items() if name not in OF_MEDIA}
    else:
        around = {name: value for name, value in fields.items() if name in USED | ONLY.keys() | known}
        own = {name: value for name, value in text.items() if name not in OF_MEDIA}
        found = {**NESTED_DEFAULTS.get(str(text.get("model_type")), {}), **around, **own}
    return plain_rotation({**wrapper.defaults, **found, **wrapper.fixed, "architectures": fields.get("architectures")})


def wrapped_names(names: CheckpointNames, wrapper: Wrapper) -> CheckpointNames:
    """The names of the text model's tensors, and those of others to ignore, in the wrapper's checkpoints."""
    return names._replace(prefixes=(*wrapper.names.strip, *names.prefixes), ignored=(*wrapper.names.skip, *names.ignored))
