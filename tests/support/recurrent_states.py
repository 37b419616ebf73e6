"""States of recurrent layers that are NaN, so that a pass that reads them shows it."""

from collections.abc import Iterable
from typing import Any

import torch

from quire.workers.recurrent.state_cache import StateCache


def poisoned_states(config, parallel):
    """One state and the dummy; the state is NaN, so that a pass that reads it before it is written shows it."""
    tensors = config.state_tensors(parallel)
    cache = StateCache(tensors, torch.float32, torch.float32)
    cache.allocate(2, torch.device("cpu"))
    for layer in tensors:
        for tensor in cache.tensors(layer):
            tensor[1] = float("nan")
    return cache


def poison(ctx: Any, states: Iterable[int]) -> None:
    """Fill these states of a runner's context, which no sequence holds, with NaN."""
    if ids := list(states):
        for layer in ctx.config.state_tensors(ctx.parallel):
            for tensor in ctx.states.tensors(layer):
                tensor[ids] = float("nan")
