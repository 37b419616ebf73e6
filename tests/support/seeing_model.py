"""Tiny models that take images, whole: weights, a tokenizer with the family's tokens, a chat template and an image processor.

`seeing(name)` gives the folder. `reference_text(...)` is what transformers generates for a rendered prompt and images: its
own processor, its own model, greedily in float32.
"""

import functools
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import tiny_wrappers
import toy_tokenizers
from PIL import Image
from tokenizers import AddedToken, Tokenizer

TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")  # ids 500 to 503, as tiny_wrappers.IDS says
# As Qwen's: texts and images in the order of a message's parts.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


# By the name's beginning, where they differ: tokens from id 500 on, what stands for an image in the template, the processor.
GLM = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>")
_GLM_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 24}
_GLM_PROCESSOR = PROCESSOR | {"image_processor_type": "Glm4vImageProcessor", "size": _GLM_SIZE}
OTHERS: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "glm": (GLM, "<|begin_of_image|><|image|><|end_of_image|>", _GLM_PROCESSOR),
    "mistral": (
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<other>"),
        "[IMG]",
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 112}},
    ),
    "gemma3": (
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>", "<other>"),
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 84, "width": 84}},
    ),
    "gemma4": (
        ("<|image|>", "<|image>", "<image|>", "<|video|>"),
        "<|image|>",
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
    ),
    "internvl": (
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        "<IMG_CONTEXT>",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28}, "max_patches": 6},
    ),
}


def _of(name: str) -> tuple[tuple[str, ...], str, dict[str, Any]]:
    found = next((given for begin, given in OTHERS.items() if name.startswith(begin)), None)
    return found or (TOKENS, "<|vision_start|><|image_pad|><|vision_end|>", PROCESSOR)


def in_template(name: str) -> str:
    """The text that the model's chat template writes for an image."""
    return _of(name)[1]


@functools.cache
def tokenizer(tokens: tuple[str, ...] = TOKENS) -> Tokenizer:
    made = Tokenizer.from_str(toy_tokenizers.byte_level().to_str())
    fillers = [f"<filler{i}>" for i in range(made.get_vocab_size(), 500)]
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*fillers, *tokens)])
    assert made.token_to_id(tokens[0]) == 500
    return made


def files(name: str = "qwen3-vl") -> dict[str, bytes]:
    """The handshake's files, as a core sends them."""
    tokens, shown, processor = _of(name)
    model = {"model_type": "qwen3_vl", "image_token_id": 500}
    return {
        **toy_tokenizers.files(tokenizer(tokens), chat_template=TEMPLATE.replace(in_template(""), shown)),
        "config.json": json.dumps(model).encode(),
        "preprocessor_config.json": json.dumps(processor).encode(),
    }


@functools.cache
def seeing(name: str) -> Path:
    """name: of tiny_wrappers.SEEING."""
    folder = tiny_models.root() / f"seeing-{name}"
    shutil.copytree(tiny_wrappers.wrapped(f"{name}-seen"), folder, dirs_exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (folder / file).unlink(missing_ok=True)
    given = files(name)
    for file in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (folder / file).write_bytes(given[file])
    (folder / "generation_config.json").write_text("{}")
    return folder


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _ids_of(name: str, made: Any) -> list[list[int]]:
    """The tokens of each image, of what transformers' processor has made."""
    if name.startswith("mistral"):
        sizes = [(height // 28, width // 28) for height, width in made["image_sizes"].tolist()]
        return [[*([*[500] * width, 501] * height)[:-1], 502] for height, width in sizes]
    if name.startswith("gemma3"):
        return [[501, *[500] * 9]] * len(made["pixel_values"])
    if name.startswith("gemma4"):
        return [[501, *[500] * int(count), 502] for count in made["num_soft_tokens_per_image"]]
    if name.startswith("internvl"):
        return [[501, *[500] * int(count), 502] for count in made["num_patches"]]
    return [[500] * count for count in (made["image_grid_thw"].prod(-1) // 4).tolist()]


def _joined(name: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """As of the unified form's own processor, which needs torchvision: Gemma 4's patches, joined (media/test_processing.py)."""
    import torch
    from transformers import Gemma4ImageProcessorPil

    from quire.frontend.media.processing import unpadded

    processor = Gemma4ImageProcessorPil.from_pretrained(seeing(name))
    parts = [unpadded(processor(image, return_tensors="np"), 2) for image in images]
    counts = [part["pixel_values"].shape[1] for part in parts]
    made: dict[str, Any] = {"num_soft_tokens_per_image": counts}
    for key, value in (("pixel_values", 0.0), ("image_position_ids", -1)):
        rows = [((0, 0), (0, max(counts) - count), (0, 0)) for count in counts]
        padded = [np.pad(part[key], own, constant_values=value) for part, own in zip(parts, rows, strict=True)]
        made[key] = torch.from_numpy(np.concatenate(padded))
    return made


def reference_ids(name: str, prompt: str, images: Sequence[Image.Image], count: int) -> tuple[list[int], list[int]]:
    """The prompt's ids, and those that transformers generates behind them."""
    import torch
    from transformers import AutoImageProcessor

    place = 501 if name.startswith("gemma3") else 500
    if name.startswith("gemma3"):
        prompt = prompt.replace("<start_of_image>", "\n\n<start_of_image><end_of_image>\n\n")
    ids = tokenizer(_of(name)[0]).encode(prompt, add_special_tokens=False).ids
    inputs: dict[str, Any] = {}
    if images:
        options = {"mistral": {"patch_size": {"height": 28, "width": 28}}, "internvl": {"crop_to_patches": True}}
        call = options.get(name.split("-")[0], {})
        if "unified" in name:
            made = _joined(name, images)
        else:
            made = AutoImageProcessor.from_pretrained(seeing(name), backend="pil")(list(images), return_tensors="pt", **call)
        rows = iter(_ids_of(name, made))
        ids = [one for id in ids for one in (next(rows) if id == place else [id])]
        inputs = {
            key: made[key] for key in ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids") if key in made
        }
    given = torch.tensor([ids])
    if name.startswith("gemma3"):
        inputs["token_type_ids"] = (given == 500).int()
    if "image_grid_thw" in inputs or "image_position_ids" in inputs:
        inputs["mm_token_type_ids"] = (given == 500).int()
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if name.startswith("gemma4"):  # to which a sampled placeholder is padding
        options["suppress_tokens"] = [500, 503]
    if "unified" in name:  # without which transformers 5.23 does not mask in layers with a window alone
        options["cache_implementation"] = "static"
    with torch.inference_mode():
        out = tiny_wrappers.reference(f"{name}-seen").generate(input_ids=given, **inputs, **options)
    return ids, out[0, len(ids) :].tolist()
