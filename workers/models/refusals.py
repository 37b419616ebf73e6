"""Why an architecture is not served: recurrent layers of other kinds, sparse attention, models that write no text.

Called by family_table.py for what it does not know, before transformers' own model is tried.
"""

from quire.workers.models.fields import Json, words

# Families with recurrent layers of kinds that are not served, by kind.
KINDS: dict[str, frozenset[str]] = {
    "Mamba 1": words("MambaForCausalLM FalconMambaForCausalLM JambaForCausalLM ZambaForCausalLM Phi4FlashForCausalLM"),
    "Mamba 2 with attention that layers share": words("Zamba2ForCausalLM"),
    "PLaMo 2's Mamba": words("Plamo2ForCausalLM"),
    "RWKV": words(
        "RwkvForCausalLM Rwkv5ForCausalLM Rwkv6ForCausalLM RWKV6Qwen2ForCausalLM Rwkv7ForCausalLM RWKV7ForCausalLM",
        "RwkvHybridForCausalLM",
    ),
    "xLSTM": words("xLSTMForCausalLM"),
    "RecurrentGemma's RG-LRU": words("RecurrentGemmaForCausalLM"),
    "lightning attention": words(
        "MiniMaxForCausalLM MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM BailingMoeLinearForCausalLM",
        "BailingMoeLinearV2ForCausalLM BailingMoeV2_5ForCausalLM",
    ),
    "a Gated DeltaNet with negative eigenvalues": words("OlmoHybridForCausalLM"),
    "Kimi Delta Attention with other gates": words("BailingHybridForCausalLM"),
    "Kimi K3's, between residuals of its own": words("KimiK3ForCausalLM KimiK3ForConditionalGeneration"),
    "convolutions within attention": words("ZayaForCausalLM"),
    "Inkling's convolutions": words(
        "InklingForCausalLM InklingForConditionalGeneration Inkling2ForCausalLM Inkling2ForConditionalGeneration",
    ),
    "LFM3's convolutions": words("Lfm3ForCausalLM Lfm3VlForConditionalGeneration"),
}
RECURRENT: frozenset[str] = frozenset().union(*KINDS.values())

# Families with sparse attention: their layers choose, by a small model of their own, which tokens they see.
SPARSE = words(
    "DeepseekV32ForCausalLM DeepseekV4ForCausalLM GlmMoeDsaForCausalLM MiniMaxM3ForCausalLM MiniMaxM3VLForCausalLM",
    "MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration HYV4ForCausalLM AXK2ForCausalLM",
    "Dots3NoteForCausalLM Dots3NoteForConditionalGeneration MistralLarge4ForConditionalGeneration",
)

# Families with both.
BOTH = words("Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration Glm5NextForConditionalGeneration")

# Endings of the names of classes that read pictures or sound and generate no text.
NOT_GENERATING = (
    "ForImageClassification",
    "ForMaskedImageModeling",
    "ForObjectDetection",
    "ForSemanticSegmentation",
    "ForInstanceSegmentation",
    "ForUniversalSegmentation",
    "ForDepthEstimation",
    "ForAudioClassification",
    "ForCTC",
    "VisionModel",
    "AudioModel",
    "ImageModel",
)
ENCODERS = words(
    "CLIPModel SiglipModel Siglip2Model ViTModel Dinov2Model DINOv3ViTModel DinoModel BeitModel SwinModel ConvNextModel",
    "InternVisionModel MoonViTPretrainedModel",
    "Wav2Vec2Model HubertModel ChineseCLIPModel AltCLIPModel CLIPSegModel",
)


_RECURRENT = "it has recurrent layers of a kind that is not served"


def refusal(fields: Json, architecture: object) -> str | None:
    """The reason why no model of this architecture is served, as the end of a sentence; None if there is none."""
    name = str(architecture)
    if name in BOTH:
        return "its attention is sparse, which is not served, and some of its layers are recurrent"
    for kind, names in KINDS.items():
        if name in names:
            return f"{_RECURRENT}: {kind}"
    if name in SPARSE:
        return "its attention is sparse, which is not served"
    if name in ENCODERS or name.endswith(NOT_GENERATING):
        return "it generates no text"
    return _by_fields(fields)


def _by_fields(fields: Json) -> str | None:
    """The reason by config.json's fields, for architectures that are in no list."""
    texts = [fields, *(value for name, value in fields.items() if name.endswith("_config") and isinstance(value, dict))]
    for text in texts:
        types = text.get("layer_types")
        types = {str(name) for name in types} if isinstance(types, list) else set()
        if "linear_attention" in types or any("mamba" in name or "recurrent" in name for name in types):
            return _RECURRENT
        by_layer = text.get("sparse_attention_config")  # MiniMax M3's
        layers = by_layer.get("sparse_attention_freq") if isinstance(by_layer, dict) else None
        chooses = any(layers) if isinstance(layers, list) else bool(layers)
        if chooses or text.get("index_topk") is not None or any("sparse" in name or "indexed" in name for name in types):
            return "its attention is sparse, which is not served"
    return None
