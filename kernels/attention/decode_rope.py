"""The work of `rope_kv` for models without QK-norm, done inside decode attention: one launch a layer less in decode steps.

A program takes the query heads of its (row, KV head) from the raw qkv, as lines of a tile. The new token's key and value are
two more lines of that tile, for which there is room: the same instructions rotate the key. Only the program that has the row's
last KV tile loads those two, and writes them; no other program reads them, so after a barrier it finds them in the cache like
any other key. The attention code itself is unchanged, and its result is bit for bit that after `rope_kv`. Folding the new key
in after the loop instead would save no time: the loop's first copies wait at a barrier for the query anyway.

Query and key are rotated as in `rope_kv`, to the bit: products and sums are rounded one by one. With QK-norm before the
rotation a call would take longer than `rope_kv` and attention do (benchmarks/LOG.md).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.attention.decode_schedule import DecodeWorkspace
from quire.kernels.attention.rope_kv import to_cache
from quire.kernels.attention.tile import COMPILED


@dataclass(frozen=True)
class Rope:
    """The arguments of `rope_kv` that attention lacks; shapes and types as there. Positions are seq_lens - 1."""

    qkv: torch.Tensor  # [T, (Hq + 2 * Hkv) * D], not rotated; not modified
    cos_sin: torch.Tensor
    slot_mapping: torch.Tensor  # int64 [T]; must be where the block table has the row's last key; negative: not written
    positions: torch.Tensor | None = None  # int32 [T], of rotation, if they are others


def tile_rows(group: int) -> int:
    """Rows of the query tile, for `group` query rows: a power of two, at least what the tensor cores take at once."""
    return max(triton.next_power_of_2(group), 16)


def rope_lines(group: int, head_dim: int) -> int:
    """Lines of the tile that is rotated, of which group + 2 are used: as few as possible: the first keys wait for it."""
    rows = tile_rows(group)
    return min(max(rows // 2, 1024 // head_dim, triton.next_power_of_2(group + 2)), rows)


def can_fuse(workspace: DecodeWorkspace, cos_sin: torch.Tensor, interleaved: bool = False) -> bool:
    """Whether decode attention takes `rope`: one query a row, whole heads rotated, half against half, room in the query
    tile.
    """
    head_dim, group = workspace.head_dim, workspace.num_heads // workspace.num_kv_heads
    return (
        workspace.max_query_len == 1
        and not interleaved
        and cos_sin.shape[1] == head_dim
        and head_dim >= 16
        and head_dim & (head_dim - 1) == 0
        and group + 2 <= tile_rows(group)
    )


def check_rope(rope: Rope, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, workspace: DecodeWorkspace) -> None:
    """Raise ValueError for arguments that the kernel would misread."""
    tokens, num_heads, head_dim = q.shape
    if not can_fuse(workspace, rope.cos_sin) or k_cache.dtype != v_cache.dtype:
        raise ValueError("rope: these shapes and types are for rope_kv; see can_fuse")
    if rope.qkv.shape != (tokens, (num_heads + 2 * k_cache.shape[1]) * head_dim) or rope.qkv.stride(1) != 1:
        raise ValueError(f"rope: qkv {rope.qkv.shape} does not fit q {q.shape} and the cache {k_cache.shape}")
    if rope.qkv.dtype != q.dtype or rope.qkv.data_ptr() != q.data_ptr():
        raise ValueError("rope: q must be a view of qkv")
    if rope.slot_mapping.shape != (tokens,) or rope.slot_mapping.dtype != torch.int64 or rope.slot_mapping.stride(0) != 1:
        raise ValueError(f"rope: slot_mapping must be int64 [{tokens}], dense")
    if rope.positions is not None and (rope.positions.shape != (tokens,) or rope.positions.dtype != torch.int32):
        raise ValueError(f"rope: positions must be int32 [{tokens}]")
    if rope.cos_sin.dtype != torch.float32 or not rope.cos_sin.is_contiguous():
        raise ValueError("rope: cos_sin must be float32 and contiguous")


@triton.jit
def rope_position(positions_ptr, token, num_tokens, last, PLACED: tl.constexpr):
    """The position by which a row's only query is rotated: `last`, or what positions_ptr says."""
    if PLACED:
        last = tl.load(positions_ptr + token, token < num_tokens, other=0)
    return last


@triton.jit
def _product(a, b):
    """a * b in float32, rounded: the compiler must not fuse it with a sum, or the last bits would differ from `rope_kv`'s."""
    if COMPILED:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return a * b


@triton.jit
def _only(a, b):
    """The combining function of a reduction over one element: never called."""
    return a


@triton.jit
def angles(cos_sin_ptr, position, max_position, HEAD_DIM: tl.constexpr):
    """Pointer to a position's cos and sin, HEAD_DIM numbers."""
    return cos_sin_ptr + tl.maximum(tl.minimum(position, max_position - 1), 0).to(tl.int64) * HEAD_DIM


@triton.jit
def load_group(
    qkv_ptr, cos_sin_ptr, slot_mapping_ptr, token, kv_head, position, max_position, has_last_tile, stride_token,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """(halves a, b [LINES, D / 2] of the heads of one token and KV head, cos, sin [1, D / 2], slot).

    Lines: GROUP queries, then, if has_last_tile, key and value; zeros elsewhere. Without has_last_tile the slot is -1.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    line = tl.arange(0, LINES)
    cols = tl.arange(0, HALF)
    # Heads of qkv: GROUP * Hkv of q, then Hkv of k, then Hkv of v.
    head = tl.where(line < GROUP, kv_head * GROUP + line, line * NUM_KV_HEADS + kv_head)
    live = (line < tl.where(has_last_tile, GROUP + 2, GROUP))[:, None]
    at = qkv_ptr + token.to(tl.int64) * stride_token + head[:, None] * HEAD_DIM + cols[None, :]
    a = tl.load(at, live, other=0.0)
    b = tl.load(at + HALF, live, other=0.0)
    at = angles(cos_sin_ptr, position, max_position, HEAD_DIM) + cols
    cos = tl.load(at)[None, :]
    sin = tl.load(at + HALF)[None, :]
    slot = tl.load(slot_mapping_ptr + token, has_last_tile, other=-1)
    return a, b, cos, sin, slot


@triton.jit
def rotate_group(
    raw_a, raw_b, cos, sin, slot, key_ptr, value_ptr, key_scale, value_scale, num_blocks,
    stride_key_block, stride_key_token, stride_value_block, stride_value_token,
    GROUP: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """The queries, rotated, as a tile [ROWS, D]; also writes key and value to the cache, if slot is in it.

    raw_a, raw_b, cos, sin, slot: from load_group; key_ptr, value_ptr: the head's entries in block 0; TOP: the cache's largest
    number, 0 if it has more than 8 bits. Rows from GROUP on are never used, but finite where qkv is.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    line = tl.arange(0, LINES)
    cols = tl.arange(0, HALF)[None, :]
    dtype: tl.constexpr = raw_a.dtype
    a = raw_a.to(tl.float32)
    b = raw_b.to(tl.float32)
    rotates = (line <= GROUP)[:, None]
    rotated_a = tl.where(rotates, (_product(a, cos) - _product(b, sin)).to(dtype), raw_a)
    rotated_b = tl.where(rotates, (_product(b, cos) + _product(a, sin)).to(dtype), raw_b)

    write = (slot >= 0) & (slot < num_blocks.to(tl.int64) * BLOCK_SIZE)
    slot = tl.where(write, slot, 0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    key_ptr += block * stride_key_block + offset * stride_key_token
    value_ptr += block * stride_value_block + offset * stride_value_token
    place = tl.where(line == GROUP, key_ptr, value_ptr)[:, None] + cols
    mask = ((line >= GROUP) & (line < GROUP + 2))[:, None] & write
    if TOP > 0:
        scale = tl.where(line == GROUP, key_scale, value_scale)[:, None]
        tl.store(place, to_cache(rotated_a.to(tl.float32), scale, TOP, key_ptr.dtype.element_ty), mask)
        tl.store(place + HALF, to_cache(rotated_b.to(tl.float32), scale, TOP, key_ptr.dtype.element_ty), mask)
    else:
        tl.store(place, rotated_a.to(key_ptr.dtype.element_ty), mask)
        tl.store(place + HALF, rotated_b.to(key_ptr.dtype.element_ty), mask)
    tl.debug_barrier()  # attention reads them with other threads
    # The halves side by side, and rows of zeros below.
    if LINES < ROWS:
        zeros = tl.zeros_like(rotated_a)
        tile = tl.permute(tl.join(tl.join(rotated_a, zeros), tl.join(rotated_b, zeros)), (2, 0, 3, 1))
    else:
        tile = tl.permute(tl.join(rotated_a, rotated_b), (0, 2, 1))
    # A reduction over one element: if an operand of a product comes from a join, with no reduction in between, Triton loads the
    # other operand, the keys, in pieces half as wide. That would be 100 instructions more a tile.
    return tl.reduce(tl.reshape(tile, (1, ROWS, HEAD_DIM)), 0, _only)
