"""How each family of models writes an item into a prompt: which token stands for it, and which tokens texts must not spell.

The engine says whether its model takes media (EngineLimits.media); config.json's model_type says here how. No torch, no
transformers: the processors run in children.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Files of the handshake that make a processor.
FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


class Family(NamedTuple):
    """token: stands for an item in a rendered prompt, and for each of its embeddings in the tokens that the engine gets.

    in_text: what a template that takes texts alone gets in an item's place. tokens: of media; a text that spells one does not
    mean it. options: settings of the processor that a request may bring (request_options.py). of_rows: the token for each
    embedding, if it is another. around: texts that the processor writes before and behind `token` in a rendered prompt.
    """

    token: str
    in_text: str
    tokens: tuple[str, ...]
    options: tuple[str, ...] = ()
    of_rows: str = ""
    around: tuple[str, str] = ("", "")

    @property
    def placeholder(self) -> str:
        """The token for each embedding."""
        return self.of_rows or self.token

    def written(self, text: str, ends: Sequence[int] = ()) -> tuple[str, list[int]]:
        """A rendered prompt with what the processor writes around placeholders, and places in it."""
        before, behind = self.around
        if not before and not behind:
            return text, list(ends)
        more, whole = len(before) + len(behind), before + self.token + behind
        return text.replace(self.token, whole), [end + more * text.count(self.token, 0, end) for end in ends]


_QWEN = Family(
    "<|image_pad|>",
    "<|vision_start|><|image_pad|><|vision_end|>",
    ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    ("min_pixels", "max_pixels", "size"),
)
_GLM = Family(
    "<|image|>",
    "<|begin_of_image|><|image|><|end_of_image|>",
    ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
    ("size",),
)
_GEMMA4 = Family(
    "<|image|>",
    "<|image|>",
    ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>"),
)
_FAMILIES = {
    "gemma3": Family(
        "<start_of_image>",
        "<start_of_image>",
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        of_rows="<image_soft_token>",
        around=("\n\n", "<end_of_image>\n\n"),
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "internvl": Family(
        "<IMG_CONTEXT>", "<IMG_CONTEXT>", ("<img>", "<IMG_CONTEXT>", "</img>", "<video>"), ("min_patches", "max_patches")
    ),
    "mistral3": Family("[IMG]", "[IMG]", ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), ("size",)),
}


def family_of(files: Mapping[str, bytes]) -> Family:
    """files: with config.json. Raises ValueError for one that no family takes media for."""
    kind = json.loads(files.get("config.json", b"{}")).get("model_type")
    if kind not in _FAMILIES:
        raise ValueError(f"config.json: there is no way to write images into prompts of model_type {kind!r}")
    return _FAMILIES[kind]
