"""MediaSpec: what a model's config says about items beside text, and the architectures that take some: the table `SEES`.

The encoder itself is transformers' (tower.py). A model that is not in the table, or that is served for its text alone, has no
MediaSpec: its checkpoint's encoder is passed over, and positions are plain. Read by models/family_table.py.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

MAX_AXES = 3  # of rotary positions


class Axes(msgspec.Struct, frozen=True):
    """Rotary positions with several axes: each pair of a head's elements rotates by one of them. Qwen's M-RoPE."""

    sections: tuple[int, ...]  # pairs of each axis
    is_interleaved: bool = False  # axes take turns among the first pairs; otherwise each has its pairs together

    def of_pairs(self, num_pairs: int) -> list[int]:
        """The axis of each pair."""
        if self.is_interleaved:
            count = len(self.sections)
            axes = [i % count for i in range(num_pairs)]
            return [axis if axis and i < self.sections[axis] * count else 0 for i, axis in enumerate(axes)]
        axes = [axis for axis, size in enumerate(self.sections) for _ in range(size)]
        return (axes + [0] * num_pairs)[:num_pairs]


class MediaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """kinds: of items. config: the text of config.json, from which transformers makes the encoder. axes: None: positions are
    plain. modules: of the encoder, as transformers names them in the model. pad_token_id: the text model's."""

    kinds: tuple[str, ...]
    config: str
    modules: tuple[str, ...]
    axes: Axes | None = None
    pad_token_id: int = 0


class Sees(NamedTuple):
    """modules: as in MediaSpec. axes: how rotary positions are split, unless the config says more; None: they are plain.

    ahead: the layers in which a token of an image sees all of its image. two_way: the default of use_bidirectional_attention,
    without which "windows" means none. renamed: (in checkpoints, in the model) of tensors that have other names there.
    """

    modules: tuple[str, ...]
    axes: Axes | None = None
    ahead: Literal["none", "all", "windows"] = "none"
    two_way: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()

    def sees_ahead(self, text: Mapping[str, Any], window: int) -> bool:
        """Whether tokens of an image see each other in layers with such a window. text: the text model's config."""
        if self.ahead == "windows":
            return window > 0 and text.get("use_bidirectional_attention", self.two_way) == "vision"
        return self.ahead == "all"


_QWEN3 = Sees(("visual",), Axes((24, 20, 20), True))
_QWEN35 = Sees(("visual",), Axes((11, 11, 10), True))
_GLM = Sees(("visual",), Axes((8, 12, 12)))
_PROJECTED = Sees(("vision_tower", "multi_modal_projector"))
_UNIFIED = (
    ("vision_embedder.", "embed_vision."),
    ("embed_vision.embedding_projection.", "embed_vision.multimodal_embedder.embedding_projection."),
)
SEES: Mapping[str, Sees] = {
    "Gemma3ForConditionalGeneration": _PROJECTED._replace(ahead="all"),
    "Gemma4ForConditionalGeneration": Sees(("vision_tower", "embed_vision"), ahead="windows"),
    "Gemma4UnifiedForConditionalGeneration": Sees(("embed_vision",), ahead="windows", two_way="vision", renamed=_UNIFIED),
    "InternVLForConditionalGeneration": _PROJECTED,
    "Mistral3ForConditionalGeneration": _PROJECTED,
    "Glm46VForConditionalGeneration": _GLM,
    "Glm4vForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
    "Qwen2_5_VLForConditionalGeneration": Sees(("visual",), Axes((16, 24, 24))),
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Qwen3_5ForConditionalGeneration": _QWEN35,
    "Qwen3_5MoeForConditionalGeneration": _QWEN35,
}


def axes_of(text: Mapping[str, Any], default: Axes | None) -> Axes | None:
    """The axes of a text config; its architecture has `default`."""
    if default is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    if not isinstance(sections, list) or not all(type(n) is int and n >= 0 for n in sections) or len(sections) > MAX_AXES:
        return default
    return msgspec.structs.replace(default, sections=tuple(sections))
