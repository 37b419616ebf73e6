"""The data that kernels of LoRA adapters read: a layer's weights by adapter slot, and a step's tokens grouped by adapter.

    y[t, piece] += scale * B (A x[t])        A [rank, in], B [out of the piece, rank], of the token's adapter and the piece

A piece is one of the checkpoint's layers that the product y has side by side: q, k and v, or gate and up; a layer of its own is
one piece. An adapter has a rank of its own for each piece, 0 if it leaves the piece as it is. An embedding's x are token ids,
and A x is a column of A; its A is kept transposed. No triton here.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.kernels.tuning.current import current

RANK_STEP = 8  # rows of B are padded to a multiple of it, so that they are read in 16-byte words
BLOCK_N = 128  # outputs of one program of `expand`


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


@dataclass
class LoraWeights:
    """Adapters of one product, by adapter slot, S of them; P pieces of at most R ranks; y has `out` columns."""

    a: torch.Tensor  # [S, P, R, in]; of a table of V tokens [S, 1, V, R]
    b: torch.Tensor  # [S, out * R]: each piece [its outputs, its rank, with zeros up to RANK_STEP], from R * (its first output)
    ranks: torch.Tensor  # int32 [S + 1, P]; the last row is that of tokens without an adapter
    scales: torch.Tensor  # float32 [S + 1, P]
    blocks: torch.Tensor  # int32 [N, 4], for each BLOCK_N outputs: piece, its first output, first and end of the block
    pieces: tuple[tuple[int, int], ...]  # [first, end) outputs of each piece
    max_rank: int  # R
    is_table: bool = False

    @classmethod
    def allocate(
        cls,
        slots: int,
        max_rank: int,
        num_inputs: int,
        sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_table: bool = False,
    ) -> "LoraWeights":
        """Without adapters. sizes: outputs of each piece. is_table: of an embedding of num_inputs tokens."""
        rank, pieces, first = round_up(max_rank, 16), list[tuple[int, int]](), 0
        for size in sizes:
            pieces.append((first, first + size))
            first += size
        blocks = [
            (number, begin, at, min(at + BLOCK_N, end))
            for number, (begin, end) in enumerate(pieces)
            for at in range(begin, end, BLOCK_N)
        ]
        return cls(
            torch.zeros(
                slots, len(sizes), *((num_inputs, rank) if is_table else (rank, num_inputs)), dtype=dtype, device=device
            ),
            torch.zeros(slots, first * rank, dtype=dtype, device=device),
            torch.zeros(slots + 1, len(sizes), dtype=torch.int32, device=device),
            torch.zeros(slots + 1, len(sizes), dtype=torch.float32, device=device),
            torch.tensor(blocks, dtype=torch.int32).to(device),
            tuple(pieces),
            rank,
            is_table,
        )

    @property
    def num_bytes(self) -> int:
        tensors = self.a, self.b, self.ranks, self.scales, self.blocks
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def alignment(self) -> int:
        """All pieces begin and end at multiples of it: 16 or less."""
        return math.gcd(16, *(end for _, end in self.pieces))

    @property
    def is_gate_up(self) -> bool:
        """Whether y may be gate|up: of one piece, or of two of one size."""
        (_, end), *others = self.pieces
        return not others or (len(others) == 1 and others[0][1] == 2 * end)

    def a_of(self, slot: int, piece: int, rank: int) -> torch.Tensor:
        """The memory of a piece's A of this rank: a view [rank, in]."""
        a = self.a[slot, piece]
        return a[:, :rank].T if self.is_table else a[:rank]

    def b_of(self, slot: int, piece: int, rank: int) -> torch.Tensor:
        """The memory of a piece's B of this rank: a view [outputs, rank rounded up to RANK_STEP]."""
        (first, end), width = self.pieces[piece], round_up(rank, RANK_STEP)
        begin = first * self.max_rank
        return self.b[slot, begin : begin + (end - first) * width].view(end - first, width)


@dataclass
class LoraSchedule:
    """The tokens of a step by adapter. Row 0 is of the step's tokens, row 1 of its samples, row 2 of some of its tokens.

    Positions in `order` of one adapter's tokens follow one another, and so do those of tokens without one; a tile is up to
    `tile_of` them, and which tile an adapter gets is not determined. The device writes all of it (schedule.py).
    """

    ids: torch.Tensor  # int32 [3, T], the adapter slot of each token, -1: none
    order: torch.Tensor  # int32 [3, T], all tokens
    tiles: torch.Tensor  # int32 [3, 3, N], of each tile: adapter slot (S: none; -1: there is no such tile), position, tokens
    counters: torch.Tensor  # int32 [3, 2], tiles and positions in use
    arrived: torch.Tensor  # int32 [ARRIVED], of `shrink`: programs that have stored their part; every launch leaves zeros

    @classmethod
    def allocate(cls, max_tokens: int, slots: int, device: torch.device, arrived: torch.Tensor | None = None) -> "LoraSchedule":
        """arrived: that of another schedule; their layers must never run at the same time."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        most = max(num_tiles(min(max_tokens, SMALL_STEP), slots), num_tiles(max_tokens, slots))
        return cls(
            ints(3, max_tokens) - 1,
            ints(3, max_tokens),
            ints(3, 3, most) - 1,
            ints(3, 2),
            ints(ARRIVED) if arrived is None else arrived,
        )


class Shrink(NamedTuple):
    """All that a kernel of a product needs to compute h of `products.shrink` beside it, of the same x [T, in]."""

    a: torch.Tensor  # [S, P, R, in], as of `LoraWeights`
    ranks: torch.Tensor
    ids: torch.Tensor  # int32 [T], the adapter slot of each token, -1: none

    @property
    def rows(self) -> int:
        """Rows of A of all slots."""
        slots, pieces, rank, _ = self.a.shape
        return slots * pieces * rank

    @property
    def width(self) -> int:
        """P * R, the values of h of a token."""
        return self.a.shape[1] * self.a.shape[2]

    def new_h(self, tokens: int, parts: int = 1) -> torch.Tensor:
        """h float32 [T, P * R], or [S, T, P * R], its partial sums over S parts of the inputs; `expand` takes both."""
        shape = (tokens, self.width) if parts == 1 else (parts, tokens, self.width)
        return torch.empty(shape, dtype=torch.float32, device=self.a.device)


ARRIVED = 1 << 16
SMALL_STEP = 4096  # tokens; a step of more fills the GPU with large tiles
LARGE_TILE = 64


def by_rows(num_tokens: int, slots: int) -> bool:
    """Whether each token is computed by itself, because tiles of one adapter would be almost empty."""
    return num_tokens <= 2 * slots and not current().fixed_order


def is_large(num_tokens: int) -> bool:
    """Whether a step has tiles and chunks of its own: not where sums have one order whatever the number of rows."""
    return num_tokens > SMALL_STEP and not current().fixed_order


def tile_of(num_tokens: int) -> int:
    """Tokens of a tile, in a step or a list of so many."""
    return LARGE_TILE if is_large(num_tokens) else 16


def num_tiles(num_tokens: int, slots: int) -> int:
    """The most tiles that so many tokens may have, of so many adapter slots and of none."""
    return min(num_tokens, num_tokens // tile_of(num_tokens) + slots + 1)
