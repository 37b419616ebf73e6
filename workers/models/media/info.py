"""The media that a built model takes, as the worker reports them."""

from pathlib import Path

from quire.ipc.messages.media import MediaInfo
from quire.ipc.worker_config import ResolvedEngineConfig
from quire.workers.models.language_model import LanguageModel
from quire.workers.models.media.sizes import cache_rows


def media_info(engine: ResolvedEngineConfig, model: LanguageModel, folder: Path) -> MediaInfo | None:
    """The media that a model takes, None if it takes text alone; its cache will have the rows that this says. Raises
    ModelConfigError."""
    spec = model.config.media
    if spec is None:
        return None
    rows = cache_rows(engine, spec, folder)
    whole = min(rows, engine.max_num_batched_tokens) if model.config.sees_ahead else 0
    info = MediaInfo(list(spec.kinds), rows, whole)
    if model.items is not None:
        model.items.num_rows = info.max_item_tokens
    return info
