"""EngineArgs and AsyncEngineArgs: an engine's options under vLLM's names, for LLM, LLMEngine and AsyncLLM.

The options are EngineConfig's fields (ipc/config.py), most of which are vLLM's, and vLLM's options in engine_options.py.
"""

import argparse
import dataclasses
import os
from typing import Any, Self

from quire.frontend.client.own_engine import engine_config
from quire.ipc.config import EngineConfig, add_engine_arguments

_Fields = dataclasses.make_dataclass("_Fields", [(n, Any) for n in EngineConfig.__struct_fields__], init=False, slots=True)


class EngineArgs(_Fields):  # type: ignore[misc, valid-type]
    """Options of an engine, as a dataclass: each is an attribute that can be set; those not given have their defaults.

    Raises TypeError for an unknown name, naming the nearest; ValueError for an unsupported value.
    """

    __slots__ = ()

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        config = engine_config(model, options, type(self).__name__)
        for name in EngineConfig.__struct_fields__:
            setattr(self, name, getattr(config, name))

    @property
    def options(self) -> dict[str, Any]:
        """All options but the model, as `LLM` takes them."""
        return {name: getattr(self, name) for name in EngineConfig.__struct_fields__ if name != "model"}

    def create_engine_config(self) -> EngineConfig:
        """The EngineConfig of the options' present values."""
        return engine_config(self.model, self.options, type(self).__name__)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """Add the engine's flags, including --model, to a parser. async_args_only: add none, as there are no such flags."""
        if not async_args_only:
            add_engine_arguments(parser, "--model")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options in a parser's result; other attributes are ignored."""
        names = [name for name in EngineConfig.__struct_fields__ if hasattr(args, name)]
        return cls(**{name: getattr(args, name) for name in names})


class AsyncEngineArgs(EngineArgs):
    """Options of an engine for AsyncLLM; the same as EngineArgs."""

    __slots__ = ()
