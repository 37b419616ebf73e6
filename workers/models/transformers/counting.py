"""Positions that a model without position_ids counts itself, by torch.arange(tokens): it gets the step's positions instead.

`Counting` watches the calls of torch.arange while a model is recorded (recorder.py); `counted` replaces the result of the call
that counted tokens while the model runs (model.py).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quire.workers.models.config import ModelConfigError


class Counting:
    """Numbers the calls of torch.arange since `begin`, and finds those that count `length` tokens from 0."""

    def __init__(self, length: int):
        self.is_counting = False  # during such a call
        self._length, self._calls = length, 0
        self._found: list[int] = []

    def begin(self) -> None:
        """To be called when the body begins."""
        self._calls, self._found = 0, []

    def place(self, takes_positions: bool) -> int | None:
        """The number of the call that counts; None if there is none. Raises ModelConfigError if this is ambiguous."""
        if not self._found:
            return None
        if takes_positions or len(self._found) > 1:
            raise ModelConfigError("positions are counted, not taken from position_ids")
        return self._found[0]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with _patched(self._arange):
            yield

    def _arange(self, arange: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if args in ((self._length,), (0, self._length)) and not {"start", "end", "step"} & kwargs.keys():
            self._found.append(self._calls)
            self.is_counting = True
        self._calls += 1
        try:
            return arange(*args, **kwargs)
        finally:
            self.is_counting = False


@contextlib.contextmanager
def counted(place: int, positions: torch.Tensor) -> Iterator[None]:
    """A context in which call number `place` of torch.arange returns `positions`, int64 [T]."""
    calls = 0

    def counting(arange: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return positions if calls == place + 1 else arange(*args, **kwargs)

    with _patched(counting):
        yield


@contextlib.contextmanager
def _patched(call: Callable[..., torch.Tensor]) -> Iterator[None]:
    arange = torch.arange

    def patched(*args: Any, **kwargs: Any) -> torch.Tensor:
        return call(arange, *args, **kwargs)

    torch.arange = patched
    try:
        yield
    finally:
        torch.arange = arange
