"""Small functions and classes that vLLM's scripts import besides the engine: ids, counters, clean-up, tokenizers, configs."""

import enum
import itertools
import logging
import uuid
from typing import Any


def random_uuid() -> str:
    """A new id for a request, of 32 hexadecimal digits."""
    return uuid.uuid4().hex


class Counter:
    """Counts up: `next(counter)` is start, start + 1, and so on."""

    def __init__(self, start: int = 0) -> None:
        self._numbers = itertools.count(start)

    def __next__(self) -> int:
        return next(self._numbers)


def clean_up(*_: Any, **__: Any) -> None:
    """vLLM's functions that take a process's GPU state apart: engines are processes of their own, and `shutdown` ends one."""


def get_tokenizer(tokenizer_name: str, *_: Any, revision: str | None = None, **options: Any) -> Any:
    """transformers' tokenizer of a folder or hub id. Only `download_dir` of vLLM's other options has an effect."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name, revision=revision, cache_dir=options.get("download_dir"))


def get_config(model: str, *_: Any, revision: str | None = None, **__: Any) -> Any:
    """transformers' configuration of a folder or hub id. No checkpoint's code is run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, revision=revision)


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


class UsageContext(enum.Enum):
    """vLLM's names for what an engine is used by. Quire collects no usage: they have no effect."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class CompilationConfig:
    """vLLM's settings of torch.compile, which Quire does not use: taken with any options, and without effect."""

    def __init__(self, *_: Any, **options: Any) -> None:
        self.__dict__.update(options)
