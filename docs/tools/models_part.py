"""The table of docs/models.md of multimodal models of which the text is served: the wrappers that the worker knows."""

from markdown import code, table

from quire.workers.models.wrappers import WRAPPERS

# As which models the wrappers are published; one without a line here is an error.
PUBLISHED = {
    "AyaVisionForConditionalGeneration": "Aya Vision",
    "Cohere2VisionForConditionalGeneration": "Command A Vision",
    "Gemma3ForConditionalGeneration": "Gemma 3 (4B and larger)",
    "Gemma4ForConditionalGeneration": "Gemma 4",
    "Gemma4UnifiedForConditionalGeneration": "Gemma 4 12B",
    "Glm46VForConditionalGeneration": "GLM-4.6V, 4.6V-Flash",
    "Glm4vForConditionalGeneration": "GLM-4.1V",
    "Glm4vMoeForConditionalGeneration": "GLM-4.5V, 4.6V",
    "Idefics3ForConditionalGeneration": "Idefics3",
    "InternVLChatModel": "InternVL 2 to 3.5, in their own form",
    "InternVLForConditionalGeneration": "InternVL 3 and 3.5, in transformers' form",
    "KimiK25ForConditionalGeneration": "Kimi K2.5, K2.6, K2.7",
    "KimiVLForConditionalGeneration": "Kimi-VL",
    "Kimi_K25ForConditionalGeneration": "Kimi K2.5 to K2.7, saved by transformers",
    "Lfm2VlForConditionalGeneration": "LFM2-VL",
    "Llama4ForConditionalGeneration": "Llama 4",
    "LlavaForConditionalGeneration": "LLaVA 1.5, Pixtral 12B",
    "LlavaNextForConditionalGeneration": "LLaVA 1.6",
    "LlavaOnevisionForConditionalGeneration": "LLaVA-OneVision",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1 and later, Ministral 3, Mistral Small 4",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL, mixtures of experts",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5, 3.6, 3.8",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5, 3.6, 3.8 with experts",
    "SmolVLMForConditionalGeneration": "SmolVLM",
    "VipLlavaForConditionalGeneration": "ViP-LLaVA",
}


def wrappers() -> str:
    texts: dict[str, dict[str, None]] = {}
    for (architecture, _), wrapper in WRAPPERS.items():
        texts.setdefault(architecture, {})[wrapper.text] = None
    rows = ((PUBLISHED[name], code(name), ", ".join(map(code, found))) for name, found in sorted(texts.items()))
    return table(("published as", "`architectures`", "its text model"), rows)
