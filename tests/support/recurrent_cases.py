"""Steps of recurrent layers for tests of their kernels and layers: rows of a mixed batch, and states poisoned with NaN."""

from typing import NamedTuple

import pytest
import torch

from quire.kernels.recurrent.rounding_cpu import rounded
from quire.kernels.recurrent.rows import Rows


class Row(NamedTuple):
    """A row of a step: its number of tokens, the ids of its states, and the position of its first token."""

    tokens: int
    own: int
    first: int = 0
    last: int = 0
    position: int = 0


def rows_of(decode: list[int], chunks: list[Row], *, padding: int = 0, knows: bool = True, device: str = "cpu") -> Rows:
    """decode: states of decode rows. knows: whether the host knows how many there are."""
    every = [*(Row(1, own, own, 0, 70 * own) for own in decode), *chunks, *([Row(0, 0)] * padding)]
    starts = [0]
    for row in every:
        starts.append(starts[-1] + row.tokens)

    def ints(values):
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    ids = (ints(row[i] for row in every) for i in (1, 2, 3))
    known = (len(every) if decode and not chunks else len(decode)) if knows else None
    positions = [position for row in every for position in range(row.position, row.position + row.tokens)]
    return Rows(ints(starts), *ids, ints([len(decode)]), ints(positions), known)


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def states_of(
    written: list[int], number: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.Tensor:
    """States [number, *shape] that lie apart, as a cache of several layers has them; those not written before are NaN."""
    memory = torch.full((number, 3, *shape), float("nan"), dtype=dtype, device=device)
    states = memory[:, 1]
    states[0] = 0.0
    for state in written:
        states[state] = random(*shape, dtype=dtype, device=device, seed=state)
    return states


interpreted = pytest.mark.interpret
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
# A state of 16 bits is rounded after each chunk. Where a sum is near half a step, the norm behind it shows the step: of 831,488
# values on an H200 one was 0.05 off, and of 116,928 one 0.08.
ON_GPU = {torch.float32: 2e-4, torch.bfloat16: 1e-1}

# of 12 states, those that are written before
WRITTEN = [1, 2, 3, 4, 9]
MIXED = rows_of([3, 1], [Row(70, 5), Row(2, 2, 2), Row(1, 7, 4, 8), Row(128, 6, 9, 10)], padding=2)
CASES = {
    "mixed": MIXED,
    "device-knows": MIXED._replace(num_decode_rows=None),
    "decode": rows_of([4, 2, 9], [], padding=2),
    "prefill": rows_of([], [Row(3, 1), Row(65, 2, 3, 5)], padding=1),
}

# Each row is rounded once: no chunk has more than 64 tokens.
ROUNDED = rows_of([3, 1], [Row(60, 5), Row(64, 2, 2, 8, 128), Row(1, 7, 4, 0, 640)], padding=1)


def assert_rounded(run, sizes, device="cpu"):
    """run(states, rows) leaves in float16 what it leaves in float32, rounded by chance at the position of a row's last token.

    A compiler may form sums otherwise for the other type, and then a few are rounded elsewhere.
    """
    begun = states_of(WRITTEN, 12, *sizes, dtype=torch.float16)
    wide, found, rows = begun.float().to(device), begun.to(device), on(device, ROUNDED)
    run(wide, rows)
    run(found, rows)
    wide, found, ends = wide.cpu(), found.cpu(), ROUNDED.query_start[1:] - 1
    for row, end in zip(range(5), ends.tolist(), strict=False):
        for state in {int(ids[row]) for ids in (ROUNDED.own, ROUNDED.last)} - {0}:
            want = rounded(wide[state][None], ROUNDED.positions[end : end + 1], torch.float16)[0]
            assert (want == found[state]).float().mean() > 0.99


def on(device, rows):
    return type(rows)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in rows))


def num_tokens(rows):
    return int(rows.query_start[-1]) + 3 * (rows.num_decode_rows != len(rows.own))
