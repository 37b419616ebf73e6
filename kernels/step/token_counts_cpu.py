"""Counting tokens on the CPU: filling, reading and increasing the counts of `LogitsProcessorPool`, in numpy.

Tables are filled here for every device, for all sequences of a step at once, since many may begin in one. `count_tokens` and
`entries_of_row` are the CPU worker's path and the oracle of `token_counts`.
"""

from typing import NamedTuple

import numpy as np

from quire.kernels.step.tables import ENTRY_BIAS, ENTRY_EXTRA, ENTRY_KEY, ENTRY_PLANES, IN_TABLE, LogitsProcessorPool


class Entries(NamedTuple):
    """New entries of some pool rows that had none: what to write at which place in the flattened tensors of the pool."""

    counts_at: np.ndarray  # int64 [n]: bytes that become IN_TABLE
    entries_at: np.ndarray  # int64 [ENTRY_PLANES * n]
    values: np.ndarray  # int32 [ENTRY_PLANES * n]


def homes(tokens: np.ndarray, pool: LogitsProcessorPool) -> np.ndarray:
    """Where probing for each token begins, int64."""
    return ((tokens.astype(np.int64) * pool.multiplier) & 0xFFFFFFFF) >> (32 - pool.table_bits)


def new_entries(
    pool: LogitsProcessorPool, output_at: np.ndarray, output_counts: np.ndarray, bias_at: np.ndarray, biases: np.ndarray
) -> Entries:
    """Entries for tokens with a bias and for those that occur more than IN_TABLE times in the output.

    Tokens are given as indices of pool.counts flattened: output_at int64 [n] ascending and unique, with output_counts int [n];
    bias_at int64 [m] with biases float32 [m], which add up if a token is named twice. ValueError if a table is too small.
    """
    vocab, size = pool.counts.shape[1], pool.table_size
    at = np.union1d(bias_at, output_at[output_counts > IN_TABLE])
    place = np.minimum(np.searchsorted(output_at, at), max(len(output_at) - 1, 0))
    occurs = output_at[place] == at if len(output_at) else np.zeros(len(at), bool)
    extra = np.where(occurs, output_counts[place] if len(output_at) else 0, 0) - IN_TABLE
    bias = np.zeros(len(at), np.float32)
    np.add.at(bias, np.searchsorted(at, bias_at), biases)
    rows, tokens = np.divmod(at, vocab)
    base = rows * (ENTRY_PLANES * size) + _free_places(rows, homes(tokens, pool), size)
    planes: list[np.ndarray] = [base] * ENTRY_PLANES
    values: list[np.ndarray] = [base] * ENTRY_PLANES
    for plane, value in ((ENTRY_KEY, tokens + 1), (ENTRY_EXTRA, extra), (ENTRY_BIAS, bias.view(np.int32))):
        planes[plane], values[plane] = base + plane * size, value.astype(np.int32)
    return Entries(at, np.concatenate(planes), np.concatenate(values))


def _free_places(rows: np.ndarray, home: np.ndarray, size: int) -> np.ndarray:
    """A place for each entry by linear probing in its row's table, which is empty: int64, below size."""
    _, table, number = np.unique(rows, return_inverse=True, return_counts=True)
    if number.max(initial=0) >= size:
        raise ValueError(f"{number.max()} tokens of one sequence have a bias or occur often: its table holds {size - 1}")
    owner = np.full(len(number) * size, -1, np.int64)
    places, left = home.copy(), np.arange(len(home))
    while len(left):
        at = table[left] * size + places[left]
        free = owner[at] < 0
        owner[at[free]] = left[free]  # the last of several for one place
        left = left[owner[at] != left]
        places[left] = (places[left] + 1) % size
    return places


def entries_of_row(pool: LogitsProcessorPool, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, ascending, occurrences beyond IN_TABLE, float32 biases) of a row's table."""
    planes = pool.entries[row].numpy()
    keys = planes[ENTRY_KEY]
    used = np.flatnonzero(keys)
    used = used[np.argsort(keys[used])]
    return keys[used] - 1, planes[ENTRY_EXTRA, used], planes[ENTRY_BIAS, used].view(np.float32)


def count_tokens(pool: LogitsProcessorPool, rows: np.ndarray, tokens: np.ndarray) -> None:
    """Count one token in each of some rows, all different."""
    counts = pool.counts.numpy()
    full = counts[rows, tokens] & IN_TABLE == IN_TABLE
    counts[rows[~full], tokens[~full]] += 1
    for row, token in zip(rows[full].tolist(), tokens[full].tolist(), strict=True):
        _count_in_table(pool, row, token)


def _count_in_table(pool: LogitsProcessorPool, row: int, token: int) -> None:
    planes, home = pool.entries[row].numpy(), int(homes(np.array(token), pool))
    for probe in range(pool.table_size):
        at = (home + probe) % pool.table_size
        if planes[ENTRY_KEY, at] in (0, token + 1):
            planes[ENTRY_KEY, at] = token + 1
            planes[ENTRY_EXTRA, at] += 1
            return
