"""A model's config as it is served: read with the flags about pooling (choice.py). Called by the worker at its start."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.workers.models.config import ModelConfig
from quire.workers.models.encoders.two_way import two_way
from quire.workers.models.family_table import FAMILIES, read_model_config
from quire.workers.pooling.choice import PoolingChoice, choose_pooling, max_embed_len
from quire.workers.pooling.jina_v5 import read_jina_v5
from quire.workers.pooling.late_interaction import COLBERT_WEIGHT


class Flags(Protocol):
    """The engine's, as EngineConfig has them."""

    @property
    def runner(self) -> str: ...

    @property
    def convert(self) -> str: ...

    @property
    def pooler_config(self) -> dict[str, Any]: ...


class AutoFlags(NamedTuple):
    """As if none of them were given."""

    runner: str = "auto"
    convert: str = "auto"
    pooler_config: dict[str, Any] = {}  # noqa: RUF012  # never changed


AUTO = AutoFlags()


def read_served(
    model_dir: str | Path, overrides: dict[str, Any], flags: Flags, **options: Any
) -> tuple[ModelConfig, PoolingChoice]:
    """The model's config, and how it pools. options: those of read_model_config. Raises ModelConfigError."""
    chosen: list[PoolingChoice] = []

    adapters: list[str | None] = []

    def choose(fields: dict[str, Any]) -> dict[str, Any]:
        fields, adapter = read_jina_v5(fields, Path(model_dir))
        adapters.append(adapter)
        given: dict[str, Any] = {"runner": flags.runner, "convert": flags.convert, "pooler_config": flags.pooler_config}
        chosen.append(choose_pooling(fields, Path(model_dir), FAMILIES, **given))
        return chosen[0].fields

    config = read_model_config(model_dir, overrides, choose, **options)
    encoder = chosen[0].encoder
    if encoder is not None and config.encoder is None:
        config = two_way(config, encoder.head)
    if encoder is not None and encoder.spec.late is not None:
        names = config.names._replace(ignored=(*config.names.ignored, COLBERT_WEIGHT))
        config = msgspec.structs.replace(config, names=names)
    choice = chosen[0]
    if choice.info is not None and (most := max_embed_len(flags.pooler_config, choice.info)):
        choice = choice._replace(info=msgspec.structs.replace(choice.info, max_embed_len=most))
    return msgspec.structs.replace(config, pooling=choice.spec, task_adapter=adapters[0]), choice
