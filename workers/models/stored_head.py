"""Whether a model's head is tied to its embedding, where the config does not say so reliably.

For a multimodal model transformers ties by the outer config, true by default, whatever text_config says; then it unties a head
that the checkpoint contains. So checkpoints with and without a head have either flag, and their tensors decide. They also do
for families of which transformers never ties the head, whatever the flag says. Called by family_table.py.
"""

from pathlib import Path

import safetensors

from quire.ipc.text_config import nested_text
from quire.workers.loading.files import checkpoint_files
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.fields import Json

TIE = "tie_word_embeddings"
NEVER_TIED = ("nemotron_h", "kimi_linear")  # model types


def tied_as_stored(fields: Json, model_dir: Path) -> Json:
    """config.json's fields, with the flag set if it was in doubt; unchanged if the folder has no weights."""
    if fields.get("model_type") in NEVER_TIED and fields.get(TIE) and _holds_head(model_dir):
        return {**fields, TIE: False}
    text = nested_text(fields)
    if text is None or (fields.get(TIE) is not None and fields.get(TIE) == text.get(TIE)):
        return fields
    stored = _holds_head(model_dir)
    if stored is None or (stored and fields.get(TIE) is not False and TIE in text):
        return fields
    return {**fields, "text_config": {**text, TIE: not stored}}


def _holds_head(model_dir: Path) -> bool | None:
    """Whether the checkpoint contains a head; None if no tensors can be read."""
    try:
        for file in checkpoint_files(model_dir):
            with safetensors.safe_open(file, framework="pt") as tensors:
                if any("lm_head" in name.split(".") for name in tensors.keys()):  # noqa: SIM118 - not a dict
                    return True
    except (WeightsError, safetensors.SafetensorError, OSError):
        return None  # loading will report the error
    return False
