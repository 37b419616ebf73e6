"""Why an architecture is not served: families with recurrent layers, families with sparse attention, models that write no text.

Called by family_table.py for what it does not know, before transformers' own model is tried.
"""

from quire.workers.models.fields import Json, words

# Families with recurrent layers: all or some of their layers keep a state instead of keys and values.
RECURRENT = words(
    "MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM xLSTMForCausalLM",
    "JambaForCausalLM BambaForCausalLM ZambaForCausalLM Zamba2ForCausalLM NemotronHForCausalLM FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM KimiLinearForCausalLM",
    "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM",
    "MiniMaxForCausalLM MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM OlmoHybridForCausalLM Phi4FlashForCausalLM",
    "Plamo2ForCausalLM BailingHybridForCausalLM BailingMoeV2_5ForCausalLM InklingForCausalLM InklingForConditionalGeneration",
    "Inkling2ForCausalLM Inkling2ForConditionalGeneration Lfm2VlForConditionalGeneration Lfm3ForCausalLM",
    "Lfm3VlForConditionalGeneration ZayaForCausalLM NemotronH_Nano_VL_V2",
)

# Families with sparse attention: their layers choose, by a small model of their own, which tokens they see.
SPARSE = words(
    "DeepseekV32ForCausalLM DeepseekV4ForCausalLM GlmMoeDsaForCausalLM MiniMaxM3ForCausalLM",
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
    "InternVisionModel MoonViTPretrainedModel BertModel RobertaModel XLMRobertaModel ModernBertModel NomicBertModel",
    "Wav2Vec2Model HubertModel ChineseCLIPModel AltCLIPModel CLIPSegModel",
)


def refusal(fields: Json, architecture: object) -> str | None:
    """The reason why no model of this architecture is served, as the end of a sentence; None if there is none."""
    name = str(architecture)
    if name in BOTH:
        return "its attention is sparse and some of its layers are recurrent, neither of which is served"
    if name in RECURRENT:
        return "it has recurrent layers, which are not served"
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
            return "it has recurrent layers, which are not served"
        by_layer = text.get("sparse_attention_config")  # MiniMax M3's
        chooses = isinstance(by_layer, dict) and any(by_layer.get("sparse_attention_freq") or ())
        if chooses or text.get("index_topk") is not None or any("sparse" in name or "indexed" in name for name in types):
            return "its attention is sparse, which is not served"
    return None
