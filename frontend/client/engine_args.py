"""EngineArgs and AsyncEngineArgs: an engine's options under vLLM's names, for LLM, LLMEngine and AsyncLLM.

The options are EngineConfig's fields (ipc/config.py), most of which are vLLM's, and what engine_options.py knows of theirs.
"""

import argparse
import os
from typing import Any, Self

from quire.frontend.client.engine_options import engine_options
from quire.frontend.client.llm import engine_config
from quire.ipc.config import EngineConfig, add_engine_arguments


class EngineArgs:
    """Options of an engine. Each is an attribute, the default where it was not given.

    Raises TypeError for an unknown name, naming the nearest, ValueError for a value that cannot be had.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self.options = engine_options(options)
        self._config = engine_config(model, self.options, type(self).__name__)
        self.model = self._config.model

    def __getattr__(self, name: str) -> Any:
        config = self.__dict__.get("_config")
        if config is None or name not in EngineConfig.__struct_fields__:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        return getattr(config, name)

    def create_engine_config(self) -> EngineConfig:
        return self._config

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """The engine's flags, for a parser of yours."""
        add_engine_arguments(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From what such a parser has found; what is not an option of an engine is left alone."""
        names = [name for name in EngineConfig.__struct_fields__ if hasattr(args, name)]
        return cls(**{name: getattr(args, name) for name in names})


class AsyncEngineArgs(EngineArgs):
    """Options of an engine for AsyncLLM: the same."""
