"""Rows: which state each row of a step reads and writes. The kernels of recurrent layers take it beside their inputs.

A step's rows are decode rows (one token each, or a window), then prompts' chunks, then padding. All arrays have padded sizes,
and the real numbers are on the device, so that a captured step can be run again with other rows.

A decode row with a window does not know yet which of its tokens will be accepted. So its state stays behind: each layer keeps
the inputs of the window's tokens, and the next step of the row applies those that were accepted before it computes its own. A
state is read once and written once a step, as without windows, and no token needs a state of its own.
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


class Windows(NamedTuple):
    """Facts about decode rows with windows for a layer; int32 on the device. S slots, R rows as in Rows.

    The state of a row's sequence lacks the last num_kept of its seq_len tokens, whose inputs are kept side by side. Once
    keep_at tokens are in the state, it is kept as keep_state, too. If that is the row's own, the state ends there: what comes
    later is dropped. A row without tokens only applies what is kept of it.
    """

    slots: torch.Tensor  # [R], of rows
    num_kept: torch.Tensor  # [S]
    first_kept: torch.Tensor  # [S], index of the first kept token
    seq_len: torch.Tensor  # [S], tokens before those of this step
    keep_at: torch.Tensor  # [S]; 0: nowhere
    keep_state: torch.Tensor  # [S]
    base: torch.Tensor  # [1]: the inputs of this step's token t are kept at base + t, where none are that it applies
    inputs: tuple[torch.Tensor, ...] = ()  # of a layer, each [number, size], in the activations' dtype


class KeptRow(NamedTuple):
    """A decode row with a window, known to the host.

    Its tokens are [start, stop), the first of which has the position `position`. There are num_kept tokens before it that are
    kept, and those in [first, end) are applied. leaves: how many are when the state is kept as keep_state; None: it is not.
    """

    own: int
    start: int
    stop: int
    first: int
    end: int
    num_kept: int
    position: int
    leaves: int | None
    keep_state: int


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
    windows: Windows | None = None  # None: decode rows have one token each, which their states take

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

    def kept_rows(self) -> list[KeptRow]:
        """The decode rows of a step with windows. On the CPU."""
        w, limit = self.windows, int(self.decode_limit[0])
        assert w is not None
        slots, starts = w.slots[:limit].long(), self.query_start.tolist()
        of_slots = (x[slots].tolist() for x in (w.num_kept, w.first_kept, w.seq_len, w.keep_at, w.keep_state))
        rows = []
        for row, (own, count, first, position, keep_at, state) in enumerate(
            zip(self.own[:limit].tolist(), *of_slots, strict=True)
        ):
            start, stop, taken = starts[row], starts[row + 1], keep_at - (position - count)
            leaves = taken if (start < stop) <= taken <= count else None
            end = first + (taken if leaves is not None and state == own else count)
            rows.append(KeptRow(own, start, stop, first, end, count, position, leaves, state))
        return rows
