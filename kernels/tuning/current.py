"""The tuning table in force: that of the process's GPU, chosen when it is first needed.

An operator's own table, made by `python benchmarks/tuning/tune.py`, is a JSON file in this folder, named after the GPU; it
takes precedence over Quire's tables. A process without a GPU, and a GPU without a table, gets `default.py`.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import msgspec
import torch

from quire.kernels.tuning.default import DEFAULT
from quire.kernels.tuning.h100 import H100
from quire.kernels.tuning.h200 import H200
from quire.kernels.tuning.table import BF16, LinearTuning, Tuning

P = ParamSpec("P")
R = TypeVar("R")

TABLES = (H200, H100)
FOLDER = Path(__file__).parent
MAX_KEPT = 4096  # limit of each cache of choices: eager steps may have any number of rows

_current: Tuning | None = None
_choices: list[Callable[[], None]] = []


class TuningError(ValueError):
    """An operator's table cannot be read; the text names the file and is meant for the user."""


def current() -> Tuning:
    """The table in force. Raises TuningError if an operator's file cannot be read."""
    global _current
    if _current is None:
        _current = for_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else DEFAULT
    return _current


def linear_tuning() -> LinearTuning:
    """The table's part for products with 16-bit weights."""
    return current().linear[BF16]


def for_device(name: str, folder: Path = FOLDER) -> Tuning:
    """The table of a GPU of this name. Raises TuningError if an operator's file cannot be read."""
    path = table_path(name, folder)
    if path.exists():
        return read_table(path)
    return next((table for table in TABLES if name in table.devices), DEFAULT)


def table_path(name: str, folder: Path = FOLDER) -> Path:
    """Path of an operator's table for a GPU of this name."""
    return folder / (re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower() + ".json")


def read_table(path: Path) -> Tuning:
    """A table from a file. Raises TuningError, which names the file, if it is not a table."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tuning)
    except msgspec.MsgspecError as error:
        raise TuningError(f"{path} is not a tuning table ({error}): make it anew, or remove it") from None


def cached(choice: Callable[P, R]) -> Callable[P, R]:
    """functools.lru_cache for choices made from the table: cleared when another table comes into force.

    A step's layers, launched eagerly, ask the same again and again: 0.06 us instead of 0.5 to 2 for reading the rules.
    """
    kept = functools.lru_cache(MAX_KEPT)(choice)
    _choices.append(kept.cache_clear)
    return cast(Callable[P, R], kept)


@contextmanager
def using(table: Tuning) -> Iterator[None]:
    """Within, this table is in force: for tests and tuning."""
    global _current
    before = _current
    _set(table)
    try:
        yield
    finally:
        _set(before)


def use(table: Tuning) -> None:
    """Put this table in force, for the rest of the process: before any kernel is launched."""
    _set(table)


def _set(table: Tuning | None) -> None:
    global _current
    _current = table
    for forget in _choices:
        forget()
