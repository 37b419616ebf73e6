"""Kimi Delta Attention of prompts, by chunks of 64 tokens: as delta_prefill, where each channel of a key decays by itself.
Formulas: delta_cpu.

    sums    a program for a chunk and a head: the sums of g in each block of 16 tokens, in float32
    solve   a program for a chunk and a head: u, w and the decayed products, as in delta_prefill
    scan    a program for a row, a head and some of its values: goes through the chunks with the state

A decay from token j to token i is split into factors of j and of i at the end of the block before i's, or computed channel by
channel within a block: no exponent is above 0, and none is a difference of sums of more than 16 tokens.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import delta_reference
from quire.kernels.recurrent import rows as words
from quire.kernels.recurrent.chunks import CHUNK, find_chunk, max_chunks, normed_keys, rows_2, unit_inverse
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.gates import decay
from quire.kernels.recurrent.rounding import rounded
from quire.kernels.recurrent.rows import Rows

BLOCK = tl.constexpr(words.BLOCK)
BLOCKS = tl.constexpr(words.CHUNK // words.BLOCK)
FORGOTTEN = tl.constexpr(words.FORGOTTEN)
BLOCK_VALUES = 32  # of a program that scans


@triton.jit(do_not_specialize=["R"])
def _sums_kernel(
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    query_start_ptr,
    limit_ptr,
    sums_ptr,
    a_stride,
    R,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    K_2: tl.constexpr,
    ROWS_2: tl.constexpr,
):
    head = tl.program_id(1)
    row, number = find_chunk(query_start_ptr, limit_ptr, tl.program_id(0), R, ROWS_2)
    if row >= R:
        return
    begin, stop = tl.load(query_start_ptr + row) + number * CHUNK, tl.load(query_start_ptr + row + 1)
    i = tl.arange(0, K_2)
    a_log, bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head * K + i, i < K, other=0.0)
    for block in range(BLOCKS):
        t = (begin + block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = (t < stop)[:, None] & (i < K)[None, :]
        a = tl.load(a_ptr + t[:, None] * a_stride + head * K + i[None, :], inside, other=0.0)
        sums = tl.cumsum(tl.maximum(decay(a, a_log, bias[None, :]), FORGOTTEN), 0)
        tl.store(sums_ptr + (t * VALUES + head)[:, None] * K + i[None, :], sums, inside)


@triton.jit
def _sums_of(sums_ptr, t, valid, head, i, VALUES: tl.constexpr, K: tl.constexpr):
    """The sums at tokens t, [.., K_2]; 0 at what is no token."""
    place = (t * VALUES + head)[:, None] * K + i[None, :]
    return tl.load(sums_ptr + place, valid[:, None] & (i < K)[None, :], other=0.0)


@triton.jit
def _block_end(sums_ptr, begin, stop, block, head, i, VALUES: tl.constexpr, K: tl.constexpr):
    """The sum of all tokens of a block of the chunk that begins at `begin`, [K_2]; 0 if it has none."""
    last = (tl.minimum(begin + (block + 1) * BLOCK, stop) - 1).to(tl.int64)
    return tl.load(sums_ptr + (last * VALUES + head) * K + i, (i < K) & (begin + block * BLOCK < stop), other=0.0)


@triton.jit(do_not_specialize=["R"])
def _solve_kernel(
    qkv_ptr,
    b_ptr,
    sums_ptr,
    query_start_ptr,
    limit_ptr,
    u_ptr,
    w_ptr,
    products_ptr,
    qkv_stride,
    b_stride,
    l2_eps,
    scale,
    R,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_2: tl.constexpr,
    V_2: tl.constexpr,
    ROWS_2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    row, number = find_chunk(query_start_ptr, limit_ptr, tl.program_id(0), R, ROWS_2)
    if row >= R:
        return
    begin, stop = tl.load(query_start_ptr + row) + number * CHUNK, tl.load(query_start_ptr + row + 1)
    i, j, n = tl.arange(0, K_2), tl.arange(0, V_2), tl.arange(0, CHUNK)
    t = (begin + n).to(tl.int64)
    valid, block = t < stop, n // BLOCK
    key = qkv_ptr + head // (VALUES // KEYS) * K
    k = normed_keys(key + KEYS * K, t, qkv_stride, valid, i, l2_eps, K)
    q = normed_keys(key, t, qkv_stride, valid, i, l2_eps, K) * scale
    sums = _sums_of(sums_ptr, t, valid, head, i, VALUES, K)
    system, products = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for m in range(BLOCK):  # token m of each token's own block
        other = (begin + block * BLOCK + m).to(tl.int64)
        there = other < stop
        decayed = tl.exp(tl.minimum(sums - _sums_of(sums_ptr, other, there, head, i, VALUES, K), 0.0))
        decayed *= normed_keys(key + KEYS * K, other, qkv_stride, there, i, l2_eps, K)
        at = n[None, :] == (block * BLOCK + m)[:, None]
        system = tl.where(at, tl.sum(k * decayed, 1)[:, None], system)
        products = tl.where(at, tl.sum(q * decayed, 1)[:, None], products)
    from_start, to_end = sums, tl.zeros([CHUNK, K_2], tl.float32)  # exponents, the second to the end of what is done
    for r in tl.static_range(BLOCKS):
        end = _block_end(sums_ptr, begin, stop, r, head, i, VALUES, K)[None, :]
        own, earlier = (block == r)[:, None], (block < r)[:, None]
        if r > 0:
            from_block = tl.where(own, tl.exp(sums), 0.0)
            decayed = tl.trans(tl.where(earlier, k * tl.exp(to_end), 0.0))
            system += tl.dot(k * from_block, decayed, input_precision="ieee")
            products += tl.dot(q * from_block, decayed, input_precision=PRECISION)
        from_start = tl.where((block > r)[:, None], from_start + end, from_start)
        to_end = tl.where(earlier, to_end + end, tl.where(own, end - sums, to_end))
    beta = tl.load(b_ptr + t * b_stride + head, valid, other=0.0).to(tl.float32)
    beta = tl.where(valid, tl.sigmoid(beta), 0.0)
    place = t * VALUES + head
    products = tl.where(n[:, None] >= n[None, :], products, 0.0)
    products_ptrs = products_ptr + place[:, None] * CHUNK + n[None, :]
    tl.store(products_ptrs, products.to(products_ptr.dtype.element_ty), valid[:, None])
    inverse = unit_inverse(tl.where(n[:, None] > n[None, :], system * beta[:, None], 0.0))
    w = tl.dot(inverse, k * tl.exp(from_start) * beta[:, None], input_precision=PRECISION)
    inside = valid[:, None] & (i < K)[None, :]
    tl.store(w_ptr + place[:, None] * K + i[None, :], w.to(w_ptr.dtype.element_ty), inside)
    inside = valid[:, None] & (j < V)[None, :]
    v = tl.load(qkv_ptr + t[:, None] * qkv_stride + 2 * KEYS * K + head * V + j[None, :], inside, other=0.0)
    u = tl.dot(inverse, v.to(tl.float32) * beta[:, None], input_precision=PRECISION)
    tl.store(u_ptr + place[:, None] * V + j[None, :], u.to(u_ptr.dtype.element_ty), inside)


@triton.jit
def _scan_kernel(
    qkv_ptr,
    sums_ptr,
    u_ptr,
    w_ptr,
    products_ptr,
    states_ptr,
    y_ptr,
    query_start_ptr,
    own_ptr,
    first_ptr,
    last_ptr,
    limit_ptr,
    positions_ptr,
    qkv_stride,
    states_stride,
    l2_eps,
    scale,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_2: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    if (row < tl.load(limit_ptr)) | (start == stop):
        return
    own, first, last = tl.load(own_ptr + row), tl.load(first_ptr + row), tl.load(last_ptr + row)
    i, n = tl.arange(0, K_2), tl.arange(0, CHUNK)
    block = (n // BLOCK)[:, None]
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    element = head * (K * V) + i[:, None] * V + j[None, :]
    state_ptrs = states_ptr + element
    inside = (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(state_ptrs + first.to(tl.int64) * states_stride, inside & (first != 0), other=0.0).to(tl.float32)
    key = qkv_ptr + head // (VALUES // KEYS) * K
    for begin in range(start, stop, CHUNK):
        t = (begin + n).to(tl.int64)
        valid = t < stop
        sums = _sums_of(sums_ptr, t, valid, head, i, VALUES, K)
        from_start, to_end, total = sums, tl.zeros([CHUNK, K_2], tl.float32), tl.zeros([K_2], tl.float32)  # exponents
        for r in tl.static_range(BLOCKS):
            end = _block_end(sums_ptr, begin, stop, r, head, i, VALUES, K)
            from_start = tl.where(block > r, from_start + end[None, :], from_start)
            to_end = tl.where(block < r, to_end + end[None, :], tl.where(block == r, end[None, :] - sums, to_end))
            total += end
        place, of_keys = t * VALUES + head, valid[:, None] & (i < K)[None, :]
        w = tl.load(w_ptr + place[:, None] * K + i[None, :], of_keys, other=0.0).to(tl.float32)
        of_values = valid[:, None] & (j < V)[None, :]
        u = tl.load(u_ptr + place[:, None] * V + j[None, :], of_values, other=0.0).to(tl.float32)
        u -= tl.dot(w, state, input_precision=PRECISION)
        q = normed_keys(key, t, qkv_stride, valid, i, l2_eps, K) * (scale * tl.exp(from_start))
        products = tl.load(products_ptr + place[:, None] * CHUNK + n[None, :], valid[:, None], other=0.0).to(tl.float32)
        o = tl.dot(q, state, input_precision=PRECISION) + tl.dot(products, u, input_precision=PRECISION)
        tl.store(y_ptr + place[:, None] * V + j[None, :], o.to(y_ptr.dtype.element_ty), of_values)
        k = normed_keys(key + KEYS * K, t, qkv_stride, valid, i, l2_eps, K) * tl.exp(to_end)
        state = state * tl.exp(total)[:, None] + tl.dot(tl.trans(k), u, input_precision=PRECISION)
        position = tl.load(positions_ptr + tl.minimum(begin + CHUNK, stop) - 1)
        state = rounded(state, position, element, states_ptr.dtype.element_ty).to(tl.float32)
    state = state.to(states_ptr.dtype.element_ty)
    tl.store(state_ptrs + own.to(tl.int64) * states_stride, state, inside)
    tl.store(state_ptrs + last.to(tl.int64) * states_stride, state, inside & (last != 0))


def prefill(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows, y: torch.Tensor
) -> None:
    """Write the recurrence's output for all tokens of prompts to y [T, Hv V], not yet normed, and their states."""
    qkv, _, b, a = inputs
    (num_tokens, num_rows), (dtype, device) = (len(qkv), len(rows.own)), (qkv.dtype, qkv.device)
    per_head = num_tokens, heads.num_values
    sums = torch.empty((*per_head, heads.key_dim), dtype=torch.float32, device=device)
    u = torch.empty((*per_head, heads.value_dim), dtype=dtype, device=device)
    w = torch.empty((*per_head, heads.key_dim), dtype=dtype, device=device)
    products = torch.empty((*per_head, words.CHUNK), dtype=dtype, device=device)
    numbers = delta_reference.L2_EPS, heads.key_dim**-0.5
    sizes = {"VALUES": heads.num_values, "K": heads.key_dim, "K_2": max(16, triton.next_power_of_2(heads.key_dim))}
    both = {"KEYS": heads.num_keys, "V": heads.value_dim, **sizes}
    v_2, rows_bound = max(16, triton.next_power_of_2(heads.value_dim)), rows_2(rows.own)
    precision, block = "ieee" if dtype == torch.float32 else "tf32", min(BLOCK_VALUES, v_2)
    chunks = max_chunks(num_tokens, num_rows), heads.num_values
    found = rows.query_start, rows.decode_limit
    _sums_kernel[chunks](
        a, weights.a_log, weights.dt_bias, *found, sums, a.stride(0), num_rows, **sizes, ROWS_2=rows_bound, num_warps=4
    )
    _solve_kernel[chunks](
        qkv,
        b,
        sums,
        *found,
        u,
        w,
        products,
        qkv.stride(0),
        b.stride(0),
        *numbers,
        num_rows,
        **both,
        V_2=v_2,
        ROWS_2=rows_bound,
        PRECISION=precision,
        num_warps=8,
    )
    _scan_kernel[triton.cdiv(heads.value_dim, block), heads.num_values, num_rows](
        qkv,
        sums,
        u,
        w,
        products,
        states,
        y,
        rows.query_start,
        rows.own,
        rows.first,
        rows.last,
        rows.decode_limit,
        rows.positions,
        qkv.stride(0),
        states.stride(0),
        *numbers,
        **both,
        BLOCK_V=block,
        PRECISION=precision,
        num_warps=8,
        num_stages=1,
    )
