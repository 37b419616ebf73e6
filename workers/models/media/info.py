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
    info = MediaInfo(list(spec.kinds), cache_rows(engine, spec, folder))
    if model.items is not None:
        model.items.num_rows = info.max_item_tokens
    return info
