"""Rows: which state each row of a step reads and writes. The kernels of recurrent layers take it beside their inputs.

A step's rows are decode rows (one token each), then prompts' chunks, then padding. All arrays have padded sizes, and the real
numbers are on the device, so that a captured step can be run again with other rows.
"""

from typing import NamedTuple

import torch

CHUNK = 64  # tokens that prefill takes at once, counted from the first token of a row
BLOCK = 16  # tokens over which decays by channel are summed
FORGOTTEN = -104.0  # exp of it is 0 in float32: decays by channel are cut off here, or sums would lose digits of the others


class Chunk(NamedTuple):
    """A prompt's chunk, known to the host: tokens [start, stop), and the ids of its states."""

    start: int
    stop: int
    own: int
    first: int
    last: int

    @property
    def written(self) -> tuple[int, ...]:
        """The ids under which the state after the last token is kept."""
        return (self.own, self.last) if self.last else (self.own,)


class Rows(NamedTuple):
    """The rows of a step, int32 on the device. A decode row reads and writes `own`; its `first` is not read.

    first: the state before a chunk's first token; 0: zeros. last: a second id for the state behind its last token; 0: none.
    """

    query_start: torch.Tensor  # [R + 1]; padded rows have no tokens
    own: torch.Tensor  # [R]
    first: torch.Tensor  # [R]
    last: torch.Tensor  # [R]
    decode_limit: torch.Tensor  # [1]: the number of decode rows
    positions: torch.Tensor  # [T]: of each token in its sequence
    num_decode_rows: int | None  # the same as decode_limit, padded, on the host; None: only the device knows

    @property
    def has_decode(self) -> bool:
        return self.num_decode_rows != 0

    @property
    def has_prefill(self) -> bool:
        return self.num_decode_rows != len(self.own)

    def decoding(self) -> torch.Tensor:
        """Ids of the decode rows' states, int64. On the CPU."""
        return self.own[: int(self.decode_limit[0])].long()

    def chunks(self) -> list[Chunk]:
        """The chunks of prompts. On the CPU."""
        starts, decoding = self.query_start.tolist(), int(self.decode_limit[0])
        ids = zip(self.own.tolist(), self.first.tolist(), self.last.tolist(), strict=True)
        rows = [Chunk(start, stop, *of) for start, stop, of in zip(starts, starts[1:], ids, strict=False)]
        return [row for row in rows[decoding:] if row.stop > row.start]
