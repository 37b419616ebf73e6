"""The source that both attention kernels share: one query tile against a range of KV tiles, and the sum of several ranges.

Paged attention over a cache of blocks [num_blocks, Hkv, block_size, D], for one KV head h and a tile of query rows m
(query tokens x the group of query heads that share h, packed into the tile's rows):

    s[m, n] = scale * k_scale * <q[m], k[n]>             for first_visible(m) <= n <= last_visible(m), else -inf
    s       = softcap * tanh(s / softcap)                if the layer caps its scores (Gemma 2)
    s      += alibi(n) - alibi(position(m))              if it has ALiBi: alibi(n) = alibi_scale * slope * n
    out[m]  = v_scale * sum_n exp(s[m, n]) * v[n] / (exp(sink) + sum_n exp(s[m, n])),   exp(sink): if it has attention sinks

last_visible(m) is position(m), but for tokens that see some behind them (those of an image, in some models). All is computed
online (running maximum and sum, in fp32, in base 2 so that the scale folds into exp2). decode.py and prefill.py call
this; it does not decide which rows or tiles run where. Indices that come from tables are clamped here, and a key outside a
row's range never reaches its result, even where the cache holds NaN.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter does not support inline assembly


def check_layout(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Raise ValueError for tensors that the kernels would misread: they take strides, but need the last dimension dense."""
    if q.stride(2) != 1 or out.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1 or block_table.stride(1) != 1:
        raise ValueError("the last dimension of q, out, k_cache, v_cache and block_table must be contiguous")
    if q.shape != out.shape or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"shapes do not fit: q {q.shape}, out {out.shape}, caches {k_cache.shape}, {v_cache.shape}")
    if k_cache.shape[2] & (k_cache.shape[2] - 1):
        raise ValueError(f"block size {k_cache.shape[2]} is not a power of two")
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")


@triton.jit
def compute_type(q, key_ptr):
    """q in the products' type. An 8-bit cache is widened to fp16 in one instruction; widening to bf16 takes several."""
    if key_ptr.dtype.element_ty.primitive_bitwidth == 8 and q.dtype == tl.bfloat16:
        return tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    else:
        return q


@triton.jit
def _unpaired(pairs, HIGH: tl.constexpr, E5M2: tl.constexpr):
    """The lower or the higher byte of each 16-bit word, an 8-bit float, as fp16."""
    BYTES: tl.constexpr = "0x0031" if HIGH else "0x0020"
    KIND: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
    PERMUTE: tl.constexpr = "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, " + BYTES + "; mov.b32 {a, b}, t; "
    ASM: tl.constexpr = PERMUTE + "cvt.rn.f16x2." + KIND + " $0, a; }"
    return tl.inline_asm_elementwise(ASM, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


def windowed(window: int, is_chunked: bool) -> int:
    """The kernels' WINDOWED: 0, a query sees all keys before it; 1, the last `window`; 2, its chunk of `window` keys; 3, for a
    window below 0, all but the first."""
    if window < 0:
        return 3
    return (2 if is_chunked else 1) if window else 0


@triton.jit
def first_visible_key(position, window, WINDOWED: tl.constexpr):
    """The first key that a query at `position` sees: exactly `window` keys, its own included, or its chunk's first."""
    if WINDOWED == 3:
        return tl.minimum(position, 1)
    elif WINDOWED == 2:
        return tl.maximum(position - position % window, 0)
    elif WINDOWED:
        return tl.maximum(position - window + 1, 0)
    else:
        return position * 0


@triton.jit
def row_lengths(query_start_ptr, seq_lens_ptr, row, num_tokens, max_keys, MAX_QUERY: tl.constexpr):
    """(first query token, number of query tokens, number of keys) of rows, clamped; MAX_QUERY 0 means no limit."""
    start = tl.minimum(tl.maximum(tl.load(query_start_ptr + row), 0), num_tokens)
    end = tl.minimum(tl.maximum(tl.load(query_start_ptr + row + 1), start), num_tokens)
    seq_len = tl.minimum(tl.maximum(tl.load(seq_lens_ptr + row), 0), max_keys)
    query_len = end - start
    if MAX_QUERY > 0:
        query_len = tl.minimum(query_len, MAX_QUERY)
    return start, query_len, seq_len


@triton.jit
def _tile_blocks(block_row_ptr, tile, end_key, tile_end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block id of a tile: a scalar if a block holds a whole tile, else one id per key; unclamped."""
    if BLOCK_SIZE >= TILE:
        return tl.load(block_row_ptr + (tile * TILE) // BLOCK_SIZE, mask=tile < tile_end, other=0)
    elif BLOCK_SIZE * 2 == TILE:
        # Two scalars take fewer registers than an id a key: with those, prefill's 128 x 128 tiles spill.
        end = tl.minimum(end_key, tile_end * TILE)
        first = tl.load(block_row_ptr + tile * 2, mask=tile * TILE < end, other=0)
        second = tl.load(block_row_ptr + tile * 2 + 1, mask=tile * TILE + BLOCK_SIZE < end, other=0)
        return tl.where(tl.arange(0, TILE) < BLOCK_SIZE, first, second)
    else:
        keys = tile * TILE + tl.arange(0, TILE)
        return tl.load(block_row_ptr + keys // BLOCK_SIZE, mask=keys < tl.minimum(end_key, tile_end * TILE), other=0)


@triton.jit
def _to_bfloat16(x):
    """float32, not NaN, rounded to a bfloat16 by its bits: in Triton's interpreter a conversion only truncates."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _shaped_scores(scores, keys, positions, qk_scale, softcap, alibi_scale, slopes, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores [M, TILE], capped and with ALiBi, in units of log2."""
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(scores * (qk_scale * (2.0 / softcap))) + 1.0))
    else:
        scores = scores * qk_scale
    if ALIBI > 0:
        if ALIBI == 2:  # factors and products are rounded, as Falcon computes them
            slopes = _to_bfloat16(slopes)
            own = _to_bfloat16(slopes * _to_bfloat16(positions.to(tl.float32)))
            bias = _to_bfloat16(slopes[:, None] * _to_bfloat16(keys.to(tl.float32))[None, :]) - own[:, None]
        else:
            bias = slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        scores += bias * (alibi_scale * 1.4426950408889634)
    return scores


@triton.jit
def row_slopes(slopes_ptr, head, ALIBI: tl.constexpr):
    """ALiBi's slopes [M] of a tile's rows, which are of heads `head` [M]."""
    if ALIBI > 0:
        return tl.load(slopes_ptr + head)
    else:
        return 0.0


@triton.jit
def first_sums(sinks_ptr, head, is_first, SINKS: tl.constexpr):
    """(row_max, row_sum) [M] before the first tile: those of the heads' [M] sinks, in the range with a row's first keys."""
    row_max = tl.full([head.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([head.shape[0]], tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        row_max = tl.where(is_first, sink, row_max)
        row_sum = tl.where(is_first, 1.0, row_sum)
    return row_max, row_sum


@triton.jit
def attend_tiles(
    acc,
    row_max,
    row_sum,
    q,
    positions,
    last_visible,
    key_ptr,
    value_ptr,
    block_row_ptr,
    tile_begin,
    tile_end,
    first_key,
    end_key,
    qk_scale,
    softcap,
    alibi_scale,
    slopes,
    window,
    num_blocks,
    stride_key_block,
    stride_key_token: tl.constexpr,
    stride_value_block,
    stride_value_token: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    MASKED: tl.constexpr,
    SUM_LATER: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold KV tiles [tile_begin, tile_end) into the running (acc [M, HEAD_PAD], row_max [M], row_sum), all fp32.

    q [M, HEAD_PAD]; positions [M] int32 of the queries, last_visible [M] of the last keys that they see; slopes [M], of
    ALiBi; key_ptr, value_ptr: the head's entries in block 0; row_max is in units of log2. Unmasked tiles must be visible in
    full to every row. Keys outside [first_key, end_key) are seen by no row and are not read. row_sum is [M], or with SUM_LATER
    [M, TILE], which the caller sums: where few rows are spread over all warps, that saves two barriers a tile.
    Bytes: 2 * TILE * HEAD_DIM cache elements and the block ids of a tile.
    """
    offs_n = tl.arange(0, TILE)
    offs_d = tl.arange(0, HEAD_PAD)
    log2_scale = qk_scale
    if SOFTCAP or ALIBI > 0:
        log2_scale = 1.0  # the scores are in units of log2 already
    # A tile's block ids are read one tile ahead. In the same iteration, the loads of K and V would wait for their load, and
    # Triton's pipeliner would spend half of its stages on it.
    block = _tile_blocks(block_row_ptr, tile_begin, end_key, tile_end, BLOCK_SIZE, TILE)
    # With 8-bit values and few rows, the tensor cores want the values of two neighboring keys in one register. 16-bit values
    # are transposed on their way from shared memory; 8-bit values would each need a load, which takes longer than memory does.
    IS_8_BIT: tl.constexpr = value_ptr.dtype.element_ty.primitive_bitwidth == 8
    PAIRS: tl.constexpr = COMPILED and IS_8_BIT and q.dtype == tl.float16 and q.shape[0] < 64
    E5M2: tl.constexpr = value_ptr.dtype.element_ty == tl.float8e5
    WORD: tl.constexpr = 2 if PAIRS else 1  # values in a word
    offs_v = tl.arange(0, HEAD_PAD // WORD)
    if PAIRS:
        value_ptr = value_ptr.to(tl.pointer_type(tl.int16))
        acc, odd = tl.split(acc.reshape(acc.shape[0], HEAD_PAD // 2, 2))
    for tile in range(tile_begin, tile_end):
        next_block = _tile_blocks(block_row_ptr, tile + 1, end_key, tile_end, BLOCK_SIZE, TILE)
        block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
        keys = tile * TILE + offs_n
        if BLOCK_SIZE >= TILE:
            # One block holds the whole tile: the address is a scalar plus offsets that are the same in every tile.
            token = offs_n
            if BLOCK_SIZE > TILE:
                token += (tile * TILE) % BLOCK_SIZE
            key_ptrs = key_ptr + block * stride_key_block + token[:, None] * stride_key_token + offs_d[None, :]
            values = token[:, None] * (stride_value_token // WORD)
            value_ptrs = value_ptr + block * (stride_value_block // WORD) + values + offs_v[None, :]
        else:
            token = offs_n % BLOCK_SIZE
            key_ptrs = key_ptr + (block * stride_key_block + token * stride_key_token)[:, None] + offs_d[None, :]
            values = block * (stride_value_block // WORD) + token * (stride_value_token // WORD)
            value_ptrs = value_ptr + values[:, None] + offs_v[None, :]
        if MASKED:
            # Zero, not garbage: 0 * NaN would pass through the product with V, whatever the weight.
            key_mask = ((keys >= first_key) & (keys < end_key))[:, None]
            value_mask = key_mask
            if HEAD_DIM < HEAD_PAD:
                key_mask = key_mask & (offs_d[None, :] < HEAD_DIM)
                value_mask = value_mask & (offs_v[None, :] < HEAD_DIM // WORD)
            k = tl.load(key_ptrs, mask=key_mask, other=0.0)
            v = tl.load(value_ptrs, mask=value_mask, other=0.0)
        elif HEAD_DIM < HEAD_PAD:
            k = tl.load(key_ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
            v = tl.load(value_ptrs, mask=offs_v[None, :] < HEAD_DIM // WORD, other=0.0)
        else:
            k = tl.load(key_ptrs)
            v = tl.load(value_ptrs)

        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if SOFTCAP or ALIBI > 0:
            scores = _shaped_scores(scores, keys, positions, qk_scale, softcap, alibi_scale, slopes, SOFTCAP, ALIBI)
        if MASKED:
            visible = keys[None, :] <= last_visible[:, None]  # this also hides keys past the row's end
            if WINDOWED >= 2:
                visible = visible & (keys[None, :] >= first_visible_key(positions, window, WINDOWED)[:, None])
            elif WINDOWED:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * log2_scale)
        base = new_max
        if MASKED:
            # A row that has seen no key yet keeps -inf as its maximum; exp2(-inf - -inf) would be NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * log2_scale - base[:, None])
        rescale = tl.exp2(row_max - base)
        if SUM_LATER:
            row_sum = row_sum * rescale[:, None] + p
        else:
            row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if PAIRS:
            odd = odd * rescale[:, None]
            acc = tl.dot(p.to(q.dtype), _unpaired(v, False, E5M2), acc)
            odd = tl.dot(p.to(q.dtype), _unpaired(v, True, E5M2), odd)
        else:
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        row_max = new_max
        block = next_block
    if PAIRS:
        acc = tl.join(acc, odd).reshape(acc.shape[0], HEAD_PAD)
    return acc, row_max, row_sum


@triton.jit
def store_partial(
    partial_out_ptr, partial_max_ptr, partial_sum_ptr, arrival_ptr, slot, acc, row_max, row_sum,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Store the partial sums of one range, for its first ROWS rows, at `slot`; returns how many ranges came before.

    The last to arrive may call reduce_partials, and must set the count at arrival_ptr back to 0.
    """
    offs_m = tl.arange(0, acc.shape[0])
    offs_d = tl.arange(0, HEAD_PAD)
    line = slot * ROWS + offs_m
    stored = offs_m < ROWS
    mask = stored[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(partial_out_ptr + line.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask)
    tl.store(partial_max_ptr + line, row_max, mask=stored)
    tl.store(partial_sum_ptr + line, row_sum, mask=stored)
    # All threads' stores come before one release; the last range to arrive has acquired all partial sums.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return arrived


@triton.jit
def reduce_partials(
    partial_out_ptr, partial_max_ptr, partial_sum_ptr, first_slot, later_slot, slot_step, parts,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """(acc [ROWS, HEAD_PAD], row_sum [ROWS]) of all partial sums: 0 is at first_slot, i at later_slot + i * slot_step.

    Loads go to L2 (.cg): other SMs wrote these lines in this launch.
    """
    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, HEAD_PAD)
    total_max = tl.full([ROWS], float("-inf"), tl.float32)
    total_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for begin in range(0, parts, PARTS):
        # Unrolled, so that the loads of PARTS partial sums are in flight at once.
        for i in tl.static_range(PARTS):
            part = tl.full([ROWS], i, tl.int32) + begin
            live = part < parts
            line = tl.where(part == 0, first_slot, later_slot + part * slot_step) * ROWS + offs_m
            maximum = tl.load(partial_max_ptr + line, mask=live, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(partial_sum_ptr + line, mask=live, other=0.0, cache_modifier=".cg")
            values = tl.load(
                partial_out_ptr + line.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :],
                mask=live[:, None] & (offs_d < HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_max = tl.maximum(total_max, maximum)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.exp2(maximum - base)
            rescale = tl.exp2(total_max - base)
            total_sum = total_sum * rescale + weight * sums
            acc = acc * rescale[:, None] + weight[:, None] * values
            total_max = new_max
    return acc, total_sum
