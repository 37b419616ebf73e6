"""Sum over ranks, residual addition and RMSNorm in one kernel, over memory that the GPUs of one host see of each other.

    x[rank] = sum of this rank's parts, rounded to the residual's dtype
    residual += sum of x[0], x[1], ... in float32, in this order, rounded (in place);  out = weight * cast(residual / rms)

x [T, H] of the residual's dtype, or parts float32 [S, T, H]; residual, out [T, H], weight [H]; one program a row.

    one-shot   each rank stores its row at all others, and all add them up: (ranks - 1) * T * H elements leave a GPU
    two-shot   row r belongs to rank r % ranks: the others store theirs there, it adds them up and stores the total at all
               others: 2 * (ranks - 1) / ranks * T * H elements leave a GPU, and one wait follows another

The values and their order are the same: equal bits everywhere, by either way.

The data is its own flag: an empty place holds EMPTY, -0.0 in every element, which is never sent (a zero is sent as +0.0). What
may arrive has three places, taken in turn by a counter of the row on the device, so that a graph may hold launches. In its turn
n a program stores into others' places n % 3, empties its own of turn n - 1, and reads those of turn n. Nobody stores into a
place that is not empty: who is at turn n + 2 has had, at turn n + 1, every rank's row or a total that needs it, which each
sent after its turn n, in which it emptied the place (tests/kernels/test_exchange_protocol.py goes through all orders).
What waits is bounded: after `limit_ns` a program traps, the process loses its device and ends; a wrong sum is never used.

Stores to peers and loads of places are of system scope, but none is a release or an acquire, so CUDA's memory model alone does
not order them; what GPUs do is relied on. When a launch is behind `wait_for_previous`, what the one before has emptied is empty
in this GPU's L2. Peers' stores go through this L2, too, and volatile loads read there; a word, of 2 or 4 bytes, arrives whole.

A program waits for those of its row alone, and GPUs begin a launch's programs in order: the first row that is not done has been
begun on all ranks, so any number is right.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.norm import num_splits, sum_of_splits
from quire.kernels.exchange.waiting import trap
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import current

MAX_WARPS = 16
TURNS = tl.constexpr(3)
EMPTY = {2: -(1 << 15), 4: -(1 << 31)}  # by the size of an element, as an integer: -0.0 of float32, float16 and bfloat16
_WORDS = {2: torch.int16, 4: torch.int32}


class Buffers(NamedTuple):
    """One rank's end of one way. Every rank makes its own, of the same sizes, before any launch."""

    rank: int
    size: int
    max_rows: int
    two_shot: bool
    places: torch.Tensor  # integers of the dtype's size, `places_shape`, all EMPTY: this rank's, others store into it
    peers: torch.Tensor  # int64 [size], addresses of all ranks' `places`, as this GPU sees them
    turns: torch.Tensor  # int32 [max_rows], each row's turn modulo 3: a count of all would wrap around within days
    limit_ns: int  # a program waits no longer

    @property
    def hidden_size(self) -> int:
        return self.places.shape[3]


def places_shape(size: int, max_rows: int, hidden_size: int, *, two_shot: bool) -> tuple[int, int, int, int]:
    """Of Buffers.places: in each turn a row from each rank; or rows to add up and totals, `max_rows` a multiple of size.

    Raises ValueError.
    """
    if two_shot and max_rows % size:
        raise ValueError(f"all_reduce_norm: {max_rows} rows cannot be shared evenly by {size} ranks")
    return TURNS.value, 2 if two_shot else size, max_rows, hidden_size


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of Buffers.places, for activations of this dtype."""
    return _WORDS[dtype.itemsize]


def empty(places: torch.Tensor) -> None:
    """Make new places ready."""
    places.fill_(EMPTY[places.element_size()])


@triton.jit
def _received(at, mask, empty, limit_ns):
    """What arrives at these places, once all of it has."""
    words = tl.load(at, mask, other=0, volatile=True)
    missing = tl.max((words == empty).to(tl.int32), 0)
    if missing > 0:
        begin = tl.extra.cuda.globaltimer()
        while missing > 0:
            words = tl.load(at, mask, other=0, volatile=True)
            missing = tl.max((words == empty).to(tl.int32), 0)
            if tl.extra.cuda.globaltimer() - begin > limit_ns:
                trap()
    return words


@triton.jit
def _to_send(x, dtype: tl.constexpr, word: tl.constexpr, empty):
    """x, rounded, as words of which none looks empty."""
    words = x.to(dtype).to(word, bitcast=True)
    return tl.where(words == empty, 0, words).to(word)


@triton.jit
def _store_at(peers_ptr, rank, word: tl.constexpr, at, words, mask):
    peer = tl.load(peers_ptr + rank).to(tl.pointer_type(word))
    tl.store(tl.multiple_of(peer, 16) + at, words, mask, cache_modifier=".wt")


@triton.jit
def _one_shot(mine, row, cols, mask, turn, places_ptr, peers_ptr, max_rows, H, dtype: tl.constexpr,
              RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr, limit_ns):  # fmt: skip
    """The sum of all ranks' rows, float32, of `mine` on this one: places [3, SIZE, max_rows, H], from each rank a row."""
    word: tl.constexpr = places_ptr.dtype.element_ty
    rank_stride = max_rows.to(tl.int64) * H
    now = turn * SIZE * rank_stride + row * H + cols
    before = (turn + 2) % 3 * SIZE * rank_stride + row * H + cols
    for step in tl.static_range(1, SIZE):
        _store_at(peers_ptr, (RANK + step) % SIZE, word, now + RANK * rank_stride, mine, mask)
    for step in tl.static_range(1, SIZE):
        tl.store(places_ptr + before + (RANK + step) % SIZE * rank_stride, tl.full([BLOCK], EMPTY, word), mask)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            words = mine
        else:
            words = _received(places_ptr + now + rank * rank_stride, mask, EMPTY, limit_ns)
        total += words.to(dtype, bitcast=True).to(tl.float32)
    return total


@triton.jit
def _two_shot(mine, row, cols, mask, turn, places_ptr, peers_ptr, max_rows, H, dtype: tl.constexpr,
              RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr, limit_ns):  # fmt: skip
    """As _one_shot. Places [3, 2, max_rows, H]: in [:, 0] a row from each rank for each of our rows, in [:, 1] rows' totals."""
    word: tl.constexpr = places_ptr.dtype.element_ty
    kind_stride = max_rows.to(tl.int64) * H
    now = turn * 2 * kind_stride + cols
    before = (turn + 2) % 3 * 2 * kind_stride + cols
    nothing = tl.full([BLOCK], EMPTY, word)
    owner = (row % SIZE).to(tl.int32)
    total_at = kind_stride + row * H
    rows_at = row // SIZE * SIZE * H
    if owner == RANK:
        for step in tl.static_range(1, SIZE):
            tl.store(places_ptr + before + rows_at + (RANK + step) % SIZE * H, nothing, mask)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                words = mine
            else:
                words = _received(places_ptr + now + rows_at + rank * H, mask, EMPTY, limit_ns)
            total += words.to(dtype, bitcast=True).to(tl.float32)
        words = _to_send(total, dtype, word, EMPTY)
        for step in tl.static_range(1, SIZE):
            _store_at(peers_ptr, (RANK + step) % SIZE, word, now + total_at, words, mask)
    else:
        _store_at(peers_ptr, owner, word, now + rows_at + RANK * H, mine, mask)
        tl.store(places_ptr + before + total_at, nothing, mask)
        words = _received(places_ptr + now + total_at, mask, EMPTY, limit_ns)
    return words.to(dtype, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["first_row", "max_rows", "limit_ns"])
def _all_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, places_ptr, peers_ptr, turns_ptr, x_stride, residual_stride, out_stride,
    part_stride, first_row, max_rows, limit_ns, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr,
    TWO_SHOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = first_row + place
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    weight = tl.load(weight_ptr + cols, mask, other=0.0)
    wait_for_previous(PDL)
    turn = tl.load(turns_ptr + place)
    x = sum_of_splits(x_ptr, row, cols, mask, x_stride, part_stride, PARTS)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    mine = _to_send(x, dtype, places_ptr.dtype.element_ty, EMPTY)
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask, other=0.0)
    if TWO_SHOT:
        total = _two_shot(
            mine, place, cols, mask, turn, places_ptr, peers_ptr, max_rows, H, dtype, RANK, SIZE, EMPTY, BLOCK, limit_ns
        )
    else:
        total = _one_shot(
            mine, place, cols, mask, turn, places_ptr, peers_ptr, max_rows, H, dtype, RANK, SIZE, EMPTY, BLOCK, limit_ns
        )
    tl.store(turns_ptr + place, (turn + 1) % 3)
    y = total.to(dtype).to(tl.float32)
    y = (y + residual.to(tl.float32)).to(dtype)
    tl.store(residual_ptr + row * residual_stride + cols, y, mask)
    wide = y.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    y = (wide * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, y.to(dtype), mask)


def all_reduce_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    buffers: Buffers,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """residual [T, H] += the sum of all ranks' x, in place; the norm of it. Every rank launches this with an x of its own.

    x [T, H], or parts of it as `norm.add_rms_norm` takes them; beyond buffers.max_rows it takes several launches. Raises
    ValueError for what does not fit, TypeError for parts of another dtype.
    """
    split_k = x.dim() == 3
    parts, part_stride = num_splits(x), x.stride(0) if split_k else 0
    first = x[0] if split_k else x
    rows, width = residual.shape
    if first.shape != residual.shape or weight.shape != (width,) or width != buffers.hidden_size:
        raise ValueError(f"all_reduce_norm: {x.shape}, {residual.shape}, {weight.shape}, {buffers.places.shape} do not fit")
    if (not split_k and x.dtype != residual.dtype) or weight.dtype != residual.dtype:
        raise ValueError(f"all_reduce_norm: dtypes differ: {x.dtype}, {residual.dtype}, {weight.dtype}")
    if residual.element_size() != buffers.places.element_size():
        raise ValueError(f"all_reduce_norm: buffers of {buffers.places.dtype} are not for {residual.dtype}")
    if not first.stride(1) == residual.stride(1) == weight.stride(0) == 1:
        raise ValueError("all_reduce_norm: the last dimension must have stride 1")
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // current().elementwise.norm_warp_elements, 1), MAX_WARPS)
    for first_row in range(0, rows, buffers.max_rows):
        _all_reduce_norm_kernel[(min(rows - first_row, buffers.max_rows),)](
            first, residual, weight, out, buffers.places, buffers.peers, buffers.turns, first.stride(0), residual.stride(0),
            out.stride(0), part_stride, first_row, buffers.max_rows, buffers.limit_ns, eps,
            width, block, parts, buffers.rank, buffers.size, EMPTY[residual.element_size()], buffers.two_shot, pdl,
            num_warps=num_warps, **launch_options(pdl),
        )  # fmt: skip
    return out


def reference(
    xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(new residual, norm) in torch, from all ranks' x."""
    dtype = residual.dtype
    mine = [(x.sum(0) if x.dim() == 3 else x).to(dtype).float() for x in xs]
    total = mine[0].clone()
    for part in mine[1:]:
        total += part
    residual = (total.to(dtype).float() + residual.float()).to(dtype)
    wide = residual.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(dtype)
    return residual, (normed.float() * weight.float()).to(dtype)
