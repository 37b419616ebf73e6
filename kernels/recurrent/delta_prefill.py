"""Gated DeltaNet of prompts, by chunks of 64 tokens: three launches. Formulas: delta_cpu.

    solve   a program for a chunk and a head: u = T β v and w = T β exp(c) k, T the inverse of the triangular system, and the
            decayed products q kᵀ; all chunks at once
    scan    a program for a row, a head and some of its values: goes through the chunks with the state, u - w S are the updates
    norm    the norm and the gate of all tokens of prompts

T is made row by row in float32: a product of powers would be faster, but loses all digits where keys are alike. Products of
16-bit models are tf32, with float32 sums. A chunk's arithmetic does not depend on where its row began.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent import delta_reference
from quire.kernels.recurrent.chunks import CHUNK, find_chunk, max_chunks, normed_keys, rows_2, unit_inverse
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.gates import decay_and_beta, gated
from quire.kernels.recurrent.rounding import rounded
from quire.kernels.recurrent.rows import CHUNK as TOKENS
from quire.kernels.recurrent.rows import Rows

BLOCK_VALUES = 32  # of a program that scans
NORM_HEADS = 8  # of a program that norms


@triton.jit
def _chunk_gates(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, a_stride, b_stride, t, valid, head):
    """(cumulative sums of g, β) of a chunk's tokens; what is no token adds nothing."""
    a = tl.load(a_ptr + t * a_stride + head, valid, other=0.0)
    b = tl.load(b_ptr + t * b_stride + head, valid, other=0.0)
    g, beta = decay_and_beta(a, b, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head))
    return tl.cumsum(tl.where(valid, g, 0.0), 0), tl.where(valid, beta, 0.0)


@triton.jit(do_not_specialize=["R"])
def _solve_kernel(
    qkv_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    query_start_ptr,
    limit_ptr,
    u_ptr,
    w_ptr,
    products_ptr,
    qkv_stride,
    b_stride,
    a_stride,
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
    t = (tl.load(query_start_ptr + row) + number * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    valid = t < tl.load(query_start_ptr + row + 1)
    i, j, n = tl.arange(0, K_2), tl.arange(0, V_2), tl.arange(0, CHUNK)
    sums, beta = _chunk_gates(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, a_stride, b_stride, t, valid, head)
    key = qkv_ptr + head // (VALUES // KEYS) * K
    k = normed_keys(key + KEYS * K, t, qkv_stride, valid, i, l2_eps, K)
    q = normed_keys(key, t, qkv_stride, valid, i, l2_eps, K) * scale
    seen = n[:, None] >= n[None, :]
    decay = tl.where(seen, tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0)), 0.0)
    place = t * VALUES + head
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    products_ptrs = products_ptr + place[:, None] * CHUNK + n[None, :]
    tl.store(products_ptrs, products.to(products_ptr.dtype.element_ty), valid[:, None])
    system = tl.dot(k * beta[:, None], tl.trans(k), input_precision="ieee") * decay
    inverse = unit_inverse(tl.where(n[:, None] > n[None, :], system, 0.0))
    w = tl.dot(inverse, k * (beta * tl.exp(sums))[:, None], input_precision=PRECISION)
    inside = valid[:, None] & (i < K)[None, :]
    tl.store(w_ptr + place[:, None] * K + i[None, :], w.to(w_ptr.dtype.element_ty), inside)
    inside = valid[:, None] & (j < V)[None, :]
    v = tl.load(qkv_ptr + t[:, None] * qkv_stride + 2 * KEYS * K + head * V + j[None, :], inside, other=0.0)
    u = tl.dot(inverse, v.to(tl.float32) * beta[:, None], input_precision=PRECISION)
    tl.store(u_ptr + place[:, None] * V + j[None, :], u.to(u_ptr.dtype.element_ty), inside)


@triton.jit
def _scan_kernel(
    qkv_ptr,
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
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
    b_stride,
    a_stride,
    states_stride,
    l2_eps,
    scale,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_2: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
    if (row < tl.load(limit_ptr)) | (start == stop):
        return
    own, first, last = tl.load(own_ptr + row), tl.load(first_ptr + row), tl.load(last_ptr + row)
    i, n = tl.arange(0, K_2), tl.arange(0, CHUNK)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    element = head * (K * V) + i[:, None] * V + j[None, :]
    state_ptrs = states_ptr + element
    inside = (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(state_ptrs + first.to(tl.int64) * states_stride, inside & (first != 0), other=0.0).to(tl.float32)
    key = qkv_ptr + head // (VALUES // KEYS) * K
    for begin in range(start, stop, CHUNK):
        t = (begin + n).to(tl.int64)
        valid = t < stop
        sums, _ = _chunk_gates(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, a_stride, b_stride, t, valid, head)
        end = tl.min(sums, 0)
        place, of_keys = t * VALUES + head, valid[:, None] & (i < K)[None, :]
        w = tl.load(w_ptr + place[:, None] * K + i[None, :], of_keys, other=0.0).to(tl.float32)
        of_values = valid[:, None] & (j < V)[None, :]
        u = tl.load(u_ptr + place[:, None] * V + j[None, :], of_values, other=0.0).to(tl.float32)
        u -= tl.dot(w, state, input_precision=PRECISION)
        q = normed_keys(key, t, qkv_stride, valid, i, l2_eps, K) * (scale * tl.exp(sums))[:, None]
        products = tl.load(products_ptr + place[:, None] * CHUNK + n[None, :], valid[:, None], other=0.0).to(tl.float32)
        o = tl.dot(q, state, input_precision=PRECISION) + tl.dot(products, u, input_precision=PRECISION)
        tl.store(y_ptr + place[:, None] * V + j[None, :], o.to(y_ptr.dtype.element_ty), of_values)
        k = normed_keys(key + KEYS * K, t, qkv_stride, valid, i, l2_eps, K) * tl.exp(end - sums)[:, None]
        state = state * tl.exp(end) + tl.dot(tl.trans(k), u, input_precision=PRECISION)
        position = tl.load(positions_ptr + tl.minimum(begin + CHUNK, stop) - 1)
        state = rounded(state, position, element, states_ptr.dtype.element_ty).to(tl.float32)
    state = state.to(states_ptr.dtype.element_ty)
    tl.store(state_ptrs + own.to(tl.int64) * states_stride, state, inside)
    tl.store(state_ptrs + last.to(tl.int64) * states_stride, state, inside & (last != 0))


@triton.jit(do_not_specialize=["R"])
def _norm_kernel(
    y_ptr,
    z_ptr,
    norm_ptr,
    query_start_ptr,
    limit_ptr,
    z_stride,
    eps,
    R,
    VALUES: tl.constexpr,
    V: tl.constexpr,
    V_2: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    if t < tl.load(query_start_ptr + tl.load(limit_ptr)):  # a token of a decode row
        return
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, V_2)[None, :]
    inside, at = (heads < VALUES) & (j < V), heads * V + j
    is_token = t < tl.load(query_start_ptr + R)
    y = y_ptr + t * (VALUES * V) + at
    o = tl.load(y, inside & is_token, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + t * z_stride + at, inside & is_token, other=0.0)
    variance = tl.sum(o * o, 1, keep_dims=True) / V
    normed = gated(o, variance, tl.load(norm_ptr + j, j < V, other=0.0), z, eps, SIGMOID)
    tl.store(y, normed.to(y_ptr.dtype.element_ty), inside)


def prefill(
    inputs: DeltaInputs, weights: DeltaWeights, heads: DeltaHeads, states: torch.Tensor, rows: Rows, y: torch.Tensor
) -> None:
    """Write the recurrence's output for all tokens of prompts to y [T, Hv V], not yet normed, and their states."""
    qkv, _, b, a = inputs
    (num_tokens, num_rows), (dtype, device) = (len(qkv), len(rows.own)), (qkv.dtype, qkv.device)
    per_head = num_tokens, heads.num_values
    u = torch.empty((*per_head, heads.value_dim), dtype=dtype, device=device)
    w = torch.empty((*per_head, heads.key_dim), dtype=dtype, device=device)
    products = torch.empty((*per_head, TOKENS), dtype=dtype, device=device)
    gates = b, a, weights.a_log, weights.dt_bias
    strides = qkv.stride(0), b.stride(0), a.stride(0)
    numbers = delta_reference.L2_EPS, heads.key_dim**-0.5
    sizes = {"KEYS": heads.num_keys, "VALUES": heads.num_values, "K": heads.key_dim, "V": heads.value_dim}
    sizes["K_2"], v_2 = max(16, triton.next_power_of_2(heads.key_dim)), max(16, triton.next_power_of_2(heads.value_dim))
    precision, block = "ieee" if dtype == torch.float32 else "tf32", min(BLOCK_VALUES, v_2)
    _solve_kernel[max_chunks(num_tokens, num_rows), heads.num_values](
        qkv,
        *gates,
        rows.query_start,
        rows.decode_limit,
        u,
        w,
        products,
        *strides,
        *numbers,
        num_rows,
        **sizes,
        V_2=v_2,
        ROWS_2=rows_2(rows.own),
        PRECISION=precision,
        num_warps=4,
    )
    _scan_kernel[triton.cdiv(heads.value_dim, block), heads.num_values, num_rows](
        qkv,
        *gates,
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
        *strides,
        states.stride(0),
        *numbers,
        **sizes,
        BLOCK=block,
        PRECISION=precision,
        num_warps=4,
        num_stages=1 if dtype == torch.float32 else 2,  # three need 281 KiB of shared memory, and an H100 has 227
    )


def norm_in_place(y: torch.Tensor, z: torch.Tensor, weights: DeltaWeights, heads: DeltaHeads, rows: Rows) -> None:
    """The norm and the gate of all tokens of prompts in y; zeros for tokens of no row."""
    block = min(NORM_HEADS, triton.next_power_of_2(heads.num_values))
    _norm_kernel[len(y), triton.cdiv(heads.num_values, block)](
        y,
        z,
        weights.norm,
        rows.query_start,
        rows.decode_limit,
        z.stride(0),
        weights.eps,
        len(rows.own),
        VALUES=heads.num_values,
        V=heads.value_dim,
        V_2=triton.next_power_of_2(heads.value_dim),
        BLOCK=block,
        SIGMOID=heads.by_channel,
    )
