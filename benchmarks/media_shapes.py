"""Write model folders with the sizes of published models that see: `media_shapes.py OUT [NAME ...]`.

A folder has config.json, the image processor's settings, a chat template, and a tokenizer of bytes with the media tokens at
the ids that config.json names; it has no weights: run it with `--load-format dummy`. vLLM reads the same folders. The sizes are
those of the checkpoints' config.json. `--tiny` keeps all fields and makes the layers small, for a try on a CPU.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIRST_SPECIAL = 151643
NAMES = (
    "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start vision_end"
)
SPECIAL = tuple(f"<|{name}|>" for name in f"{NAMES} vision_pad image_pad video_pad".split())
_IDS = {"bos_token_id": 151643, "eos_token_id": 151645}
_MEDIA_IDS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> dict[str, Any]:
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    shared = {"model_type": "qwen3_vl_text", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, **_IDS}
    more = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
    more |= {"max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "rope_scaling": rope, "rope_theta": 5000000}
    sees = {"model_type": "qwen3_vl", "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}
    sees |= {"hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02, "num_position_embeddings": 2304}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        **_MEDIA_IDS,
        "text_config": {**shared, **more, "dtype": "bfloat16", "use_cache": True, "tie_word_embeddings": tied, **text},
        "tie_word_embeddings": tied,
        "vision_config": {**sees, "out_hidden_size": text["hidden_size"], **vision},
    }


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-VL-8B": _qwen3_vl(
        {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
        tied=False,
    ),
    "Qwen3-VL-2B": _qwen3_vl(
        {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_hidden_layers": 28},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
        tied=True,
    ),
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_IDS,
        **_MEDIA_IDS,
        "vision_token_id": 151654,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 152064,
        "vision_config": {
            "depth": 32,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_chans": 3,
            "intermediate_size": 3420,
            "model_type": "qwen2_5_vl",
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
    },
}
_PIXELS = {
    "qwen3_vl": {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    },
    "qwen2_5_vl": {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "processor_class": "Qwen2_5_VLProcessor",
    },
}


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with layers that a CPU computes at once."""
    made = copy.deepcopy(config)
    text, vision = made.get("text_config", made), made["vision_config"]
    text |= {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"num_hidden_layers": 4}
    vision |= {"depth": 4, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256}
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = [0, 1, 2]
    if "fullatt_block_indexes" in vision:
        vision["fullatt_block_indexes"] = [1, 3]
    return made


def tokenizer_text() -> str:
    """A tokenizer without merges: a token a byte, names for the ids up to the special tokens, and those."""
    vocab: dict[str, int] = {}
    for text in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"x{i}" for i in range(FIRST_SPECIAL))):
        if len(vocab) < FIRST_SPECIAL:
            vocab.setdefault(text, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer.to_str()


def write(folder: Path, config: dict[str, Any], tokenizer: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    media = {**_PIXELS[config["model_type"]], "temporal_patch_size": 2, "merge_size": 2}
    video = {
        **media,
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    if config["model_type"] == "qwen2_5_vl":
        video = {**media, "video_processor_type": "Qwen2VLVideoProcessor"}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL[1:]),
        "model_max_length": 131072,
        "chat_template": TEMPLATE,
    }
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer_config.json": described,
        "preprocessor_config.json": {**media, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": video,
        "generation_config.json": {**_IDS, "pad_token_id": FIRST_SPECIAL, "eos_token_id": [151645, 151643]},
    }
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields, indent=1))
    (folder / "tokenizer.json").write_text(tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--tiny", action="store_true", help="small layers, for a CPU")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in SHAPES]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}")
    tokenizer = tokenizer_text()
    for name in args.names or SHAPES:
        write(args.out / name, tiny(SHAPES[name]) if args.tiny else SHAPES[name], tokenizer)
        print(args.out / name, flush=True)


if __name__ == "__main__":
    main()
