"""EngineArgs and AsyncEngineArgs: an engine's options under vLLM's names, for LLM, LLMEngine and AsyncLLM.

The options are EngineConfig's fields (ipc/config.py), most of which are vLLM's, and what engine_options.py knows of theirs.
"""

import argparse
import dataclasses
import os
from typing import Any, Self

from quire.frontend.client.own_engine import engine_config
from quire.ipc.config import EngineConfig, add_engine_arguments

_Fields = dataclasses.make_dataclass("_Fields", [(n, Any) for n in EngineConfig.__struct_fields__], init=False, slots=True)


class EngineArgs(_Fields):  # type: ignore[misc, valid-type]
    """Options of an engine, a dataclass: each is an attribute that can be set, the default where it was not given.

    Raises TypeError for an unknown name, naming the nearest, ValueError for a value that cannot be had.
    """

    __slots__ = ()

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        config = engine_config(model, options, type(self).__name__)
        for name in EngineConfig.__struct_fields__:
            setattr(self, name, getattr(config, name))

    @property
    def options(self) -> dict[str, Any]:
        """All but the model, as `LLM` takes them."""
        return {name: getattr(self, name) for name in EngineConfig.__struct_fields__ if name != "model"}

    def create_engine_config(self) -> EngineConfig:
        """Of the options as they are now."""
        return engine_config(self.model, self.options, type(self).__name__)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """The engine's flags, --model among them, for a parser of yours. async_args_only: there are none."""
        if not async_args_only:
            add_engine_arguments(parser, "--model")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From what such a parser has found; what is not an option of an engine is left alone."""
        names = [name for name in EngineConfig.__struct_fields__ if hasattr(args, name)]
        return cls(**{name: getattr(args, name) for name in names})


class AsyncEngineArgs(EngineArgs):
    """Options of an engine for AsyncLLM: the same."""

    __slots__ = ()
