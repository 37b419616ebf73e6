"""Load the classes that the operator names with --logits-processors: the only place in the tree that runs code by its name.

A name is module:Class, module.Class or path/to/file.py:Class. It comes from the command line or from `LLM(...)`, never from a
request. Modules are searched on Python's path, then in the current folder and, for `LLM`, on the path of its program.
"""

import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from quire.ipc.sampling import SamplingParams
from quire.workers.logits_processors import interface

log = logging.getLogger("quire.workers")

LOADED = "_quire_"  # prefix of modules made from files: LLM refuses to start in one (frontend/client/processor_names.py)
_METHODS = ("apply", "update_state", "is_argmax_invariant")
_INTERFACE = {
    "BatchUpdate": interface.BatchUpdate,
    "LogitsProcessor": interface.LogitsProcessor,
    "MoveDirectionality": interface.MoveDirectionality,
    "AdapterLogitsProcessor": interface.AdapterLogitsProcessor,
    "process_dict_updates": interface.process_dict_updates,
}
# Stand-ins, by module, for the names that a class written for vLLM imports from it.
_STAND_INS: dict[str, dict[str, Any]] = {
    "vllm": {"SamplingParams": SamplingParams},
    "vllm.config": {"VllmConfig": interface.VllmConfig},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.logits_process": {"LogitsProcessor": interface.RequestLogitsProcessor},
    "vllm.sampling_params": {"SamplingParams": SamplingParams},
    "vllm.v1": {},
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": _INTERFACE,
    "vllm.v1.sample.logits_processor.builtin": _INTERFACE,
    "vllm.v1.sample.logits_processor.interface": _INTERFACE,
}


class ProcessorError(Exception):
    """A class cannot be loaded or made; the text is for the operator, in one line."""


def load_classes(names: Sequence[str], folders: Sequence[str]) -> list[type]:
    """The classes of these names. folders: further folders to search for modules. Raises ProcessorError."""
    if not names:
        return []
    sys.path += [folder for folder in (os.getcwd(), *folders) if folder not in sys.path]
    if importlib.util.find_spec("vllm") is None:
        _stand_in_for_vllm()
    return [_load(name) for name in names]


def interface_in_use() -> Any:
    """The module of BatchUpdate and MoveDirectionality that the loaded classes use: vLLM's if they imported it."""
    return sys.modules.get("vllm.v1.sample.logits_processor", interface)


def _load(name: str) -> type:
    module_name, _, class_name = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not module_name or not class_name:
        raise ProcessorError(f"--logits-processors {name}: a class is named module:Class")
    try:
        found: Any = _module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # the operator's module may raise anything while it is loaded
        raise ProcessorError(f"--logits-processors {name}: {reason(error)}") from error
    lacks = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or lacks:
        what = f"has no {', '.join(lacks)}" if isinstance(found, type) else "is no class"
        raise ProcessorError(f"--logits-processors {name}: it {what}; see vLLM's LogitsProcessor for what one needs")
    return found


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    own_name = f"{LOADED}{os.path.basename(name)[:-3]}"  # not __main__, so that a script's main part does not run again
    spec = importlib.util.spec_from_file_location(own_name, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be loaded")
    module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reason(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _stand_in_for_vllm() -> None:
    for name, values in _STAND_INS.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(values)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
