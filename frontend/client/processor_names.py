"""LLM(logits_processors=[...]): turn classes into names under which a worker, another process, loads them.

A class of a module is named module:Class, a class of the program itself path/to/program.py:Class; both come with the folders
where this program finds its modules. A string is a name already.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

LOADED = "_quire_"  # prefix of module names of files loaded by a worker (workers/logits_processors/load.py)


def with_processor_names(options: dict[str, Any]) -> dict[str, Any]:
    """LLM's options, with logits_processors as names. Raises ValueError."""
    given = options.get("logits_processors")
    if not given:
        return options
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"logits_processors must be a list of classes or of names like 'module:Class', got {given!r}")
    folders = [os.path.abspath(folder) for folder in sys.path if folder and os.path.isdir(folder)]
    names = [item if isinstance(item, str) else _name(item) for item in given]
    return {"logits_processors_path": folders, **options, "logits_processors": names}


def _name(kind: Any) -> str:
    if not isinstance(kind, type):
        raise ValueError(f"logits_processors must hold classes or names like 'module:Class', got {kind!r}")
    module, name = kind.__module__, kind.__qualname__
    if module.startswith(LOADED):  # or each worker would start an engine, with workers that ...
        raise RuntimeError(
            f"this file is loaded for its class {name}: what it runs as a program belongs under if __name__ == '__main__'"
        )
    if module == "__main__":
        module = getattr(sys.modules["__main__"], "__file__", None) or ""
    if not module or "<locals>" in name or (module.endswith(".py") and not os.path.isfile(module)):
        raise ValueError(
            f"logits_processors: {name} cannot be loaded by the engine's process: define it at the top of a file or a module"
        )
    return f"{os.path.abspath(module) if module.endswith('.py') else module}:{name}"
