"""Memory that items take beside text, for `quire estimate`: the cache of embeddings, and the encoder's largest run."""

from pathlib import Path

from quire.frontend.cli.estimate_model import Model
from quire.ipc.config import EngineConfig
from quire.ipc.memory_plan import MOST_ITEM_TOKENS
from quire.ipc.whole_images import image_processor, image_tokens


def for_items(model: Model, config: EngineConfig, length: int, itemsize: int) -> tuple[int, int, int]:
    """Bytes of the encoder cache, of the encoder's largest run, and of its captured runs on a GPU, which Qwen's encoders have
    (workers/models/media/tower_graphs.py); 0 of a model that takes text alone."""
    if (items := model.items) is None or config.language_model_only:
        return 0, 0, 0
    rows = _rows(model, config, length)
    is_captured = str((model.config or {}).get("model_type")).startswith("qwen")
    return items.cache_bytes(rows, itemsize), items.run_bytes(rows, itemsize), is_captured * items.graphs_bytes(rows, itemsize)


def _rows(model: Model, config: EngineConfig, length: int) -> int:
    """Tokens of the encoder cache."""
    largest = image_tokens(model.config or {}, image_processor(Path(model.folder or ""))) or MOST_ITEM_TOKENS
    return config.encoder_cache_tokens or 2 * min(largest, length)


def as_served(model: Model, config: EngineConfig) -> Model:
    """The model without its encoder, if it is served for its text alone."""
    if model.items is None or not config.language_model_only:
        return model
    return model._replace(num_parameters=model.num_parameters - model.items.parameters, items=None)
