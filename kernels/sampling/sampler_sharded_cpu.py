"""`sampler_sharded` on a CPU, with the same signatures, built from `sampler_cpu`."""

import numpy as np
import torch

from quire.kernels.sampling.sampler_cpu import S_TEMPERATURE, finite, race
from quire.kernels.step.tables import SHARD_WORDS, LogitsProcessorPool, ShardedWorkspace, SlotTables


def best_of_shard(
    logits: torch.Tensor,
    first: int,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    tables: SlotTables,
    pool: LogitsProcessorPool | None = None,
    workspace: ShardedWorkspace | None = None,
    *,
    random: bool,
) -> torch.Tensor:
    """int32 [SHARD_WORDS, R]. See `sampler_sharded.best_of_shard`."""
    rows = len(logits)
    best = np.zeros((SHARD_WORDS, rows), np.int32)
    x, params = finite(logits.float().numpy()), tables.host["params"][row_slots[:rows].numpy()]
    floats = best.view(np.float32)
    floats[0] = x.max(1) if rows else 0.0
    best[2] = first + x.argmax(1) if rows else 0
    racing = np.flatnonzero(params.view(np.float32)[:, S_TEMPERATURE] > 0) if random else np.zeros(0, np.int64)
    if len(racing):
        at = positions[:rows].numpy()[racing].tolist()
        tokens, scores = race(x[racing], params[racing], at, first)
        floats[1, racing], best[2, racing] = scores, first + tokens
    return torch.from_numpy(best)


def choose(everyone: torch.Tensor, row_slots: torch.Tensor, tables: SlotTables, *, random: bool) -> torch.Tensor:
    """int32 [R] tokens. See `sampler_sharded.choose`."""
    words = everyone.numpy()
    rows, floats = words.shape[2], words.view(np.float32)
    key = tops = floats[:, 0]
    if random and rows:
        temperature = tables.host["params"].view(np.float32)[row_slots[:rows].numpy(), S_TEMPERATURE]
        is_random = temperature > 0
        scale = np.float32(1) / np.where(is_random, temperature, np.float32(1))
        top = tops.max(0)
        key = np.where(is_random, (tops - np.where(top == -np.inf, np.float32(0), top)) * scale + floats[:, 1], tops)
    return torch.from_numpy(words[key.argmax(0), 2, np.arange(rows)] if rows else words[0, 2].copy())
