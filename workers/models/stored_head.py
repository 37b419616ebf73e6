"""Whether a multimodal model's head is tied to its embedding, where the two configs that it has do not agree on it.

transformers ties by the outer one, true by default, whatever text_config says; then it unties what a checkpoint holds apart.
So checkpoints of either kind have either flags, and what they hold decides. Called by families.py before config.json is read.
"""

from pathlib import Path

import safetensors

from quire.workers.loading.files import checkpoint_files
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.fields import Json

TIE = "tie_word_embeddings"


def tied_as_stored(fields: Json, model_dir: Path) -> Json:
    """config.json's fields, text_config's flag set where it was in doubt; as they are where the folder has no weights."""
    text = fields.get("text_config")
    if not isinstance(text, dict) or (fields.get(TIE) is not None and fields.get(TIE) == text.get(TIE)):
        return fields
    stored = _holds_head(model_dir)
    if stored is None or (stored and fields.get(TIE) is not False):
        return fields
    return {**fields, "text_config": {**text, TIE: not stored}}


def _holds_head(model_dir: Path) -> bool | None:
    """None: there are no tensors that could be read."""
    try:
        for file in checkpoint_files(model_dir):
            with safetensors.safe_open(file, framework="pt") as tensors:
                if any("lm_head" in name.split(".") for name in tensors.keys()):  # noqa: SIM118 - not a dict
                    return True
    except (WeightsError, safetensors.SafetensorError, OSError):
        return None  # loading says what is wrong with them
    return False
