"""Small functions and classes that vLLM's scripts import besides the engine: ids, counters, clean-up, tokenizers, configs."""

import enum
import itertools
import logging
import os
import random
import socket
import uuid
from pathlib import Path
from typing import Any

from quire.ipc.unknown_names import NoSuchName, what_to_write


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


class ScriptLogger(logging.Logger):
    """A logger with vLLM's methods for lines that are logged once."""

    def info_once(self, text: str, *args: object, **_: object) -> None:
        self._once(logging.INFO, text, *args)

    def warning_once(self, text: str, *args: object, **_: object) -> None:
        self._once(logging.WARNING, text, *args)

    def debug_once(self, text: str, *args: object, **_: object) -> None:
        self._once(logging.DEBUG, text, *args)

    def _once(self, level: int, text: str, *args: object) -> None:
        if (level, text, args) not in _logged:
            _logged.add((level, text, args))
            self.log(level, text, *args)


_logged: set[tuple[object, ...]] = set()
_loggers: dict[str, ScriptLogger] = {}


def init_logger(name: str) -> ScriptLogger:
    if name not in _loggers:
        _loggers[name] = ScriptLogger(name)
        _loggers[name].parent = logging.getLogger(name)
    return _loggers[name]


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

    def __init__(self, level: Any = None, *_: Any, **options: Any) -> None:
        self.__dict__.update({"level": level, **options})


class CompilationLevel(enum.IntEnum):
    """vLLM's older names for how much torch.compile does: no effect."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


class CompilationMode(enum.IntEnum):
    """vLLM's names for how much torch.compile does: no effect."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


def get_open_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def get_ip() -> str:
    """This machine's address in its network, or that of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 80))  # sends nothing: the system chooses the interface
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def cuda_device_count() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def set_random_seed(seed: int | None) -> None:
    """Seed Python, numpy and torch in this process; SamplingParams(seed=...) and LLM(seed=...) are for the engine."""
    if seed is not None:
        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def is_list_of(value: object, kind: type | tuple[type, ...], *, check: str = "first") -> bool:
    """check: "first" looks at the first item, "all" at each."""
    items = value if isinstance(value, list) else None
    return items is not None and all(isinstance(item, kind) for item in (items[:1] if check == "first" else items))


def load_chat_template(chat_template: str | os.PathLike[str] | None, *, is_literal: bool = False) -> str | None:
    """A template's text: that of a file, or what is given, if it is no file's name. Raises OSError."""
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    text = os.fspath(chat_template)
    return text if any(sign in text for sign in "{}\n") else Path(text).read_text(encoding="utf-8")


class Platform:
    """The device that this machine computes on, by vLLM's names."""

    def is_cuda(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def is_cpu(self) -> bool:
        return not self.is_cuda()

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    is_tpu = is_xpu = is_hpu = is_neuron = is_out_of_tree = is_unspecified = is_rocm

    @property
    def device_type(self) -> str:
        return "cuda" if self.is_cuda() else "cpu"

    device_name = device_type

    def get_device_name(self, device_id: int = 0) -> str:
        import torch

        return torch.cuda.get_device_name(device_id) if self.is_cuda() else "cpu"

    def get_device_capability(self, device_id: int = 0) -> tuple[int, int] | None:
        """Major and minor; None on a CPU."""
        import torch

        return torch.cuda.get_device_capability(device_id) if self.is_cuda() else None

    def has_device_capability(self, capability: int | tuple[int, int], device_id: int = 0) -> bool:
        """capability: (8, 0) or 80."""
        found = self.get_device_capability(device_id)
        return found is not None and found >= (capability if isinstance(capability, tuple) else divmod(capability, 10))

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of the GPU, or of this machine."""
        import torch

        if self.is_cuda():
            return int(torch.cuda.get_device_properties(device_id).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def device_count(self) -> int:
        return cuda_device_count()

    def empty_cache(self) -> None:
        """Free what torch keeps of this process's GPU memory; an engine is a process of its own."""
        import torch

        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        import torch

        if self.is_cuda():
            torch.cuda.synchronize()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy, pickle and inspect ask for
            raise AttributeError(name)
        raise NoSuchName(f"current_platform has no {name!r}; {what_to_write(name, [n for n in dir(self) if n[0] != '_'])}")

    def seed_everything(self, seed: int | None = None) -> None:
        set_random_seed(seed)


platform = Platform()


def same(value: Any, *_: Any, **__: Any) -> Any:
    """The value, for vLLM's functions that wrap one to make it faster."""
    return value


def collect_environment() -> None:
    """Print versions, GPUs and limits of this machine: `quire collect-env`."""
    from quire.frontend.cli.collect_env import collect_env

    collect_env()
