"""Models in which all tokens of an image see each other, and how many tokens an image of theirs has: by config.json, no torch.

One step computes such an image whole, so the core must know its size before a worker reads the model. The worker's own table is
workers/models/media/spec.py; a test compares the two.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.ipc.text_config import nested_text

GEMMA4 = {"gemma4": None, "gemma4_unified": "vision"}  # model_type -> default of use_bidirectional_attention
TOKENS_OF_GEMMA3 = 256
TOKENS_OF_GEMMA4 = 280


def sees_ahead(config: dict[str, Any]) -> bool:
    """Whether tokens of an image see those of the image that come behind them, in some layer."""
    kind = str(config.get("model_type"))
    if not isinstance(config.get("vision_config"), dict):
        return False
    if kind in GEMMA4:
        return (nested_text(config) or {}).get("use_bidirectional_attention", GEMMA4[kind]) == "vision"
    return kind == "gemma3"


def image_tokens(config: dict[str, Any], processor: Mapping[str, Any]) -> int | None:
    """The most tokens of an image; None for models of other kinds. processor: the image processor's fields."""
    kind = config.get("model_type")
    if kind == "gemma3":
        return _whole(config.get("mm_tokens_per_image"), TOKENS_OF_GEMMA3)
    return _whole(processor.get("max_soft_tokens"), TOKENS_OF_GEMMA4) if kind in GEMMA4 else None


def _whole(value: Any, default: int) -> int:
    return value if type(value) is int and value > 0 else default


def image_processors(folder: Path) -> Iterator[dict[str, Any]]:
    """The image processor's fields, from each file of a checkpoint that has some."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            found = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        fields = found.get("image_processor", found) if isinstance(found, dict) else {}
        if isinstance(fields, dict):
            yield fields


def image_processor(folder: Path) -> dict[str, Any]:
    """The fields of the first such file."""
    return next(image_processors(folder), {})


def whole_image(config: dict[str, Any], folder: Path) -> int:
    """The most tokens of an image that one step must compute whole; 0: images may be cut."""
    return (image_tokens(config, image_processor(folder)) or 0) if sees_ahead(config) else 0
