"""A model's config as it is served: read with the flags about pooling (choice.py). Called by the worker at its start."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.workers.models.config import ModelConfig
from quire.workers.models.encoders.two_way import two_way
from quire.workers.models.family_table import FAMILIES, read_model_config
from quire.workers.pooling.choice import PoolingChoice, choose_pooling


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

    def choose(fields: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = {"runner": flags.runner, "convert": flags.convert, "pooler_config": flags.pooler_config}
        chosen.append(choose_pooling(fields, Path(model_dir), FAMILIES, **given))
        return chosen[0].fields

    config = read_model_config(model_dir, overrides, choose, **options)
    if chosen[0].encoder is not None and config.encoder is None:
        config = two_way(config)
    return msgspec.structs.replace(config, pooling=chosen[0].spec), chosen[0]
