"""Sum over ranks, residual addition and RMSNorm in one kernel, over memory that the GPUs of one host see of each other.

    x[rank] = sum of this rank's parts, rounded to the residual's dtype
    residual += sum of x[0], x[1], ... in float32, in this order, rounded (in place);  out = weight * cast(residual / rms)

x [T, H] of the residual's dtype, or parts float32 [S, T, H]; residual, out [T, H], weight [H]; one program a row. A program
stores its row into the buffer that each other rank keeps for it (one shot: (ranks - 1) * T * H elements leave a GPU, as many
arrive), then waits for the others' rows in its own. All ranks add the same values in the same order: equal bits everywhere.

The data is its own flag: an empty place holds EMPTY, -0.0 in every element, which is never sent (a zero is sent as +0.0). A row
has three places for each rank, taken in turn by a counter on the device, so that a graph may hold launches. In its turn n a
program stores into the others' places n % 3, empties its own of turn n - 1, and reads those of turn n. Nobody stores into a
place that is not empty: who is at turn n + 2 has had our row of turn n + 1, which we sent after turn n, in which we emptied it.
What waits is bounded: after `limit_ns` a program traps, the process loses its device and ends; a wrong sum is never used.

Programs need no others of their launch, so any number of rows is right; they are begun in the same order on all ranks.
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
    """One rank's end. Every rank makes its own, of the same sizes, before any launch."""

    rank: int
    size: int
    max_rows: int
    places: torch.Tensor  # integers of the dtype's size, [3, size, max_rows, H], all EMPTY: this rank's, others store into it
    peers: torch.Tensor  # int64 [size], addresses of all ranks' `places`, as this GPU sees them
    turns: torch.Tensor  # int32 [max_rows], each row's turn modulo 3: a count of all would wrap around within days
    limit_ns: int  # a program waits no longer

    @property
    def hidden_size(self) -> int:
        return self.places.shape[3]


def places_shape(size: int, max_rows: int, hidden_size: int) -> tuple[int, int, int, int]:
    """Of Buffers.places."""
    return TURNS.value, size, max_rows, hidden_size


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


@triton.jit(do_not_specialize=["max_rows", "limit_ns"])
def _all_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, places_ptr, peers_ptr, turns_ptr, x_stride, residual_stride, out_stride,
    part_stride, max_rows, limit_ns, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    weight = tl.load(weight_ptr + cols, mask, other=0.0)
    wait_for_previous(PDL)
    turn = tl.load(turns_ptr + row)
    x = sum_of_splits(x_ptr, row, cols, mask, x_stride, part_stride, PARTS)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    word: tl.constexpr = places_ptr.dtype.element_ty
    mine = x.to(dtype).to(word, bitcast=True)
    mine = tl.where(mine == EMPTY, 0, mine).to(word)
    place = row * H + cols  # of rank 0, in turn 0
    rank_stride = max_rows.to(tl.int64) * H
    now = turn * SIZE * rank_stride
    for step in tl.static_range(1, SIZE):
        peer = tl.load(peers_ptr + (RANK + step) % SIZE).to(tl.pointer_type(word))
        peer = tl.multiple_of(peer, 16)
        tl.store(peer + now + RANK * rank_stride + place, mine, mask, cache_modifier=".wt")
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask, other=0.0)
    before = ((turn + 2) % 3) * SIZE * rank_stride
    for step in tl.static_range(1, SIZE):
        other = (RANK + step) % SIZE
        tl.store(places_ptr + before + other * rank_stride + place, tl.full([BLOCK], EMPTY, word), mask)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            words = mine
        else:
            words = _received(places_ptr + now + rank * rank_stride + place, mask, EMPTY, limit_ns)
        total += words.to(dtype, bitcast=True).to(tl.float32)
    tl.store(turns_ptr + row, (turn + 1) % 3)
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

    x [T, H], or parts of it as `norm.add_rms_norm` takes them; T up to buffers.max_rows. Raises ValueError for what does not
    fit, TypeError for parts of another dtype.
    """
    split_k = x.dim() == 3
    parts, part_stride = num_splits(x), x.stride(0) if split_k else 0
    first = x[0] if split_k else x
    rows, width = residual.shape
    if first.shape != residual.shape or weight.shape != (width,) or width != buffers.hidden_size or rows > buffers.max_rows:
        raise ValueError(f"all_reduce_norm: {x.shape}, {residual.shape}, {weight.shape}, {buffers.places.shape} do not fit")
    if (not split_k and x.dtype != residual.dtype) or weight.dtype != residual.dtype:
        raise ValueError(f"all_reduce_norm: dtypes differ: {x.dtype}, {residual.dtype}, {weight.dtype}")
    if residual.element_size() != buffers.places.element_size():
        raise ValueError(f"all_reduce_norm: buffers of {buffers.places.dtype} are not for {residual.dtype}")
    if not first.stride(1) == residual.stride(1) == weight.stride(0) == 1:
        raise ValueError("all_reduce_norm: the last dimension must have stride 1")
    out = torch.empty_like(residual)
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // current().elementwise.norm_warp_elements, 1), MAX_WARPS)
    _all_reduce_norm_kernel[(rows,)](
        first, residual, weight, out, buffers.places, buffers.peers, buffers.turns, first.stride(0), residual.stride(0),
        out.stride(0), part_stride, buffers.max_rows, buffers.limit_ns, eps,
        width, block, parts, buffers.rank, buffers.size, EMPTY[residual.element_size()], pdl,
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
