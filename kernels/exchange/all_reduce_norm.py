"""Sum over ranks, residual addition and RMSNorm in one kernel, through memory that the GPUs of one host share.

    x[rank] = sum of this rank's partial sums, rounded to the residual's dtype
    residual += sum of x[0], x[1], ... in float32, in this order, rounded (in place);  out = weight * cast(residual / rms)

x [T, H] of the residual's dtype, or partial sums float32 [S, T, H]; residual, out [T, H], weight [H]; one program a row.

    one-shot   each rank stores its row at all others, and all add them up: (ranks - 1) * T * H elements leave a GPU
    two-shot   row r belongs to rank r % ranks: the others store theirs there, it adds them up and stores the total at all
               others: 2 * (ranks - 1) / ranks * T * H elements leave a GPU, and one wait follows another

Both add the same values in the same order, so the result has equal bits on every rank and by either way.

The data is its own flag: an empty place holds EMPTY, -0.0 in every element, which is never sent (a zero is sent as +0.0). Each
row that may arrive has three places, used in turn by a per-row counter on the device, so that a graph may hold launches. In
turn n a program stores into the others' places n % 3, empties its own of turn n - 1, and reads those of turn n. No rank stores
into a place that is not empty: a rank at turn n + 2 received, at turn n + 1, every rank's row or a total that needs it, and
each rank sent that after its turn n, in which it emptied the place (tests/kernels/test_exchange_protocol.py goes through all
orders). Waits are bounded: after `limit_ns` a program traps, the process loses its device and ends; a wrong sum is never used.

Stores to peers and loads of places are of system scope, but none is a release or an acquire, so CUDA's memory model alone does
not order them; the code relies on what GPUs do. When a launch is past `wait_for_previous`, the places that the launch before
emptied are empty in this GPU's L2. Peers' stores go through this L2, too, and volatile loads read there; a word arrives whole.

A program waits only for the others' data of its row, and GPUs start a launch's programs in order: the first unfinished row has
been started on all ranks, so any number of rows works.
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
    """One rank's buffers for one way. Every rank allocates its own, of the same sizes, before any launch."""

    rank: int
    size: int
    max_rows: int
    two_shot: bool
    places: torch.Tensor  # integers of the dtype's size, `places_shape`, all EMPTY at first: this rank's, others store into it
    peers: torch.Tensor  # int64 [size], addresses of all ranks' `places`, as mapped on this GPU
    turns: torch.Tensor  # int32 [max_rows], each row's turn modulo 3: a full count would wrap around within days
    limit_ns: int  # a program's longest wait

    @property
    def hidden_size(self) -> int:
        return self.places.shape[3]


def places_shape(size: int, max_rows: int, hidden_size: int, *, two_shot: bool) -> tuple[int, int, int, int]:
    """Shape of Buffers.places: in each turn a row from each rank; two-shot: rows to add up, and totals.

    Raises ValueError if max_rows is not a multiple of size for two-shot.
    """
    if two_shot and max_rows % size:
        raise ValueError(f"all_reduce_norm: {max_rows} rows cannot be shared evenly by {size} ranks")
    return TURNS.value, 2 if two_shot else size, max_rows, hidden_size


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of Buffers.places for activations of this dtype."""
    return _WORDS[dtype.itemsize]


def empty(places: torch.Tensor) -> None:
    """Initialize new places."""
    places.fill_(EMPTY[places.element_size()])


@triton.jit
def _received(at, mask, empty, limit_ns):
    """The words at these places, once all of them have arrived."""
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
    """x, rounded, as words, none of which equals EMPTY."""
    words = x.to(dtype).to(word, bitcast=True)
    return tl.where(words == empty, 0, words).to(word)


@triton.jit
def _store_at(peers_ptr, rank, word: tl.constexpr, at, words, mask):
    peer = tl.load(peers_ptr + rank).to(tl.pointer_type(word))
    tl.store(tl.multiple_of(peer, 16) + at, words, mask, cache_modifier=".wt")


@triton.jit
def _one_shot(mine, row, cols, mask, turn, places_ptr, peers_ptr, max_rows, H, dtype: tl.constexpr,
              RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr, limit_ns):  # fmt: skip
    """The float32 sum of all ranks' rows; `mine` is this rank's. places [3, SIZE, max_rows, H]: a row from each rank."""
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
    """As _one_shot. Places [3, 2, max_rows, H]: in [:, 0] a row from each rank for each of our rows, in [:, 1] the totals."""
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
    """residual [T, H] += the sum of all ranks' x, in place; returns the norm of it. Every rank launches this with its own x.

    x [T, H], or its partial sums as for `norm.add_rms_norm`; more than buffers.max_rows rows take several launches. Raises
    ValueError for shapes and dtypes that do not fit, TypeError for partial sums of another dtype.
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
