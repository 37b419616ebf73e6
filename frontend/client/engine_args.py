"""EngineArgs and AsyncEngineArgs: an engine's options under vLLM's names, for LLM, LLMEngine and AsyncLLM.

The options are EngineConfig's fields (ipc/config.py), most of which are vLLM's, and vLLM's options in engine_options.py.
"""

import argparse
import dataclasses
import os
from typing import Any, NoReturn, Self

from quire.frontend.client.engine_options import MEDIA_OPTIONS, engine_options, is_vllms
from quire.frontend.client.model_config import VllmConfig, unstarted_config
from quire.frontend.client.own_engine import engine_config
from quire.ipc.config import EngineConfig, add_engine_arguments
from quire.ipc.unknown_names import NoSuchName, what_to_write

_Fields = dataclasses.make_dataclass("_Fields", [(n, Any) for n in EngineConfig.__struct_fields__], init=False)


class EngineArgs(_Fields):  # type: ignore[misc, valid-type]
    """Options of an engine, as a dataclass: each is an attribute that can be set; those not given have their defaults.

    vLLM's options without effect here are attributes, too, where they are given; others of them are None. Raises ValueError for
    an unknown name, naming the nearest, or an unsupported value.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *others: Any, **options: Any) -> None:
        if others:
            raise ValueError(f"{type(self).__name__} takes the model; give all other options by name")
        config = engine_config(model, options, type(self).__name__)
        self.__dict__.update({name: value for name, value in options.items() if is_vllms(name)})
        for name in EngineConfig.__struct_fields__:
            setattr(self, name, getattr(config, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in EngineConfig.__struct_fields__:
            if not is_vllms(name):
                raise _no_option(self, name)
            engine_options({name: value})
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> None:
        if not is_vllms(name):
            raise _no_option(self, name)

    @property
    def options(self) -> dict[str, Any]:
        """All options but the model, as `LLM` takes them."""
        names = [*EngineConfig.__struct_fields__, *(name for name in MEDIA_OPTIONS if name in self.__dict__)]
        return {name: getattr(self, name) for name in names if name != "model"}

    @property
    def config(self) -> EngineConfig:
        """The EngineConfig of the options' present values. Raises ValueError."""
        return engine_config(self.model, self.options, type(self).__name__)

    def create_engine_config(self, *_: Any, **__: Any) -> VllmConfig:
        """The options' present values as vLLM's VllmConfig, for `from_vllm_config`. A value that an engine finds out when it
        starts says so when it is used. vLLM's arguments (usage_context, ...) have no effect. Raises ValueError."""
        return unstarted_config(self.config)

    def create_model_config(self) -> NoReturn:
        """vLLM's ModelConfig before the start of an engine: here the engine reads the model's files. Raises
        NotImplementedError."""
        raise NotImplementedError("create_model_config is not here: a started engine has it, as LLM(...).model_config")

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


def check_engine_args(kind: str, engine_args: Any) -> EngineArgs:
    """The argument of `from_engine_args`. Raises ValueError."""
    if not isinstance(engine_args, EngineArgs):
        given = type(engine_args).__name__
        raise ValueError(f"{kind} is made from options: {kind}.from_engine_args(EngineArgs(model, ...)); got {given}")
    return engine_args


def _no_option(args: EngineArgs, name: str) -> AttributeError:
    kind = type(args).__name__
    if name.startswith("__"):  # what copy, pickle and inspect ask for
        return AttributeError(f"{kind!r} object has no attribute {name!r}")
    return NoSuchName(f"{kind} has no option {name!r}; {what_to_write(name, EngineConfig.__struct_fields__)}")
