"""Skinny linear layers, where reading W is nearly all the work: our portable kernels, for 1 to 16 rows, and the choice.

    skinny_linear   y = x @ W^T + bias               x [M, K], W [N, K], bias [N] or none, y [M, N]
    skinny_gated    y = cast(silu(g)) * u            g | u = cast(x @ W^T + bias), W [2 I, K], y [M, I]

bfloat16 or float16 (float32 in tests), accumulated in float32, rounded once (g and u too, as if they had been stored).
Moves every element of W once, marked evict-first: the weights of a model do not fit into L2, and x and y should stay there.
The vector kernel (1 to 4 rows): one program per few output columns, products and sums on the plain cores, all of K within the
program. The dot kernel (2 to 16): tensor cores on tiles of 16 rows x BLOCK_N columns. The order of summation depends on the
shape alone, not on the content of other rows; but it differs between numbers of rows, so a row's last bits may change with M,
as with cuBLAS. The tuning table says which kernel a shape gets (`choose`).

pdl is a mode of `dependent_launch`: the vector kernel loads its first weights before it waits for x.
On a Hopper, 2 to 64 rows go to `linear_hopper` instead, except where the vector kernel is faster.
With one row the vector kernel's first programs may compute A x of the row's LoRA adapter (`tables.Shrink`), as others W x.
References: torch.nn.functional.linear, `activation_cpu`.
"""

import torch
import triton
import triton.language as tl
from msgspec.structs import replace

from quire.kernels.elementwise.activation import gated, silu_mul
from quire.kernels.linear.blas import blas_linear
from quire.kernels.linear.fixed import fixed_linear
from quire.kernels.lora.rows import rows_of_a
from quire.kernels.lora.tables import RANK_STEP, Shrink
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, prefetch, wait_for_previous
from quire.kernels.tuning.configs import SkinnyConfig
from quire.kernels.tuning.current import cached, current, linear_tuning

MAX_ROWS = 16  # a tile of the kernel on tensor cores; with more cuBLAS is as fast, for small weights, too (benchmarks/LOG.md)
WARPS_OF_SM = 64
MAX_VECTOR_ROWS = 4  # of the kernel without tensor cores


@triton.jit
def _tile(w_row, k, inside, K: tl.constexpr):
    return tl.load(w_row + k[None, :], inside & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_row(acc, w, x_row, k, K: tl.constexpr):
    return acc + w.to(tl.float32) * tl.load(x_row + k, k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_row(out, gate, up, bias, up_bias, mask, GATED: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    y = tl.sum(gate, 1) + bias
    if GATED:
        y = gated(y, tl.sum(up, 1) + up_bias, dtype)
    tl.store(out, y.to(dtype), mask)


@triton.jit
def _prefetch_row(w_ptr, first, rows, w_stride, ROWS: tl.constexpr, K: tl.constexpr, LINES: tl.constexpr):
    """Prefetch ROWS rows of W from `first` on into L2."""
    row = tl.minimum(first + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    line = tl.minimum(tl.arange(0, LINES) * 64, K - 1)
    prefetch(w_ptr + row[:, None] * w_stride + line[None, :])


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, a_ptr, ranks, ids, h, x_stride, w_stride, out_stride, N,
    K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, ROOM: tl.constexpr, BEHIND: tl.constexpr, LINES: tl.constexpr,
    PIECES: tl.constexpr, R: tl.constexpr, RANK_STEP: tl.constexpr,
):  # fmt: skip
    """The first programs compute h of an adapter of so many pieces: first, since they wait for its number before they load."""
    SHRINKS: tl.constexpr = (PIECES * R + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if SHRINKS == 0:
        _vector_product(
            program,
            x_ptr,
            w_ptr,
            bias_ptr,
            out_ptr,
            x_stride,
            w_stride,
            out_stride,
            N,
            K,
            M,
            BLOCK_N,
            BLOCK_K,
            BIAS,
            GATED,
            PDL,
            ROOM,
            BEHIND,
            LINES,
        )
    elif program >= SHRINKS:
        _vector_product(
            program - SHRINKS,
            x_ptr,
            w_ptr,
            bias_ptr,
            out_ptr,
            x_stride,
            w_stride,
            out_stride,
            N,
            K,
            M,
            BLOCK_N,
            BLOCK_K,
            BIAS,
            GATED,
            PDL,
            ROOM,
            BEHIND,
            LINES,
        )
    else:
        n = program * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        row, has_rank, kept = rows_of_a(ids, ranks, n, PIECES, R, RANK_STEP)
        a_row = a_ptr + row[:, None] * K
        a = _tile(a_row, k, has_rank[:, None], K)  # a constant, before the wait
        wait_for_previous(2 if PDL > 0 else 0)
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            if start > 0:
                a = _tile(a_row, start + k, has_rank[:, None], K)
            acc = _add_row(acc, a, x_ptr, start + k, K)
        tl.store(h + n, tl.sum(acc, 1), kept)


@triton.jit
def _vector_product(
    program,
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    w_stride,
    out_stride,
    N,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    ROOM: tl.constexpr,
    BEHIND: tl.constexpr,
    LINES: tl.constexpr,
):
    """M = 1 to 4 rows: one accumulator tile [BLOCK_N, BLOCK_K] a row, summed over K at the end; N columns of the output."""
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None]
    w_row = w_ptr + n.to(tl.int64)[:, None] * w_stride
    up_row = w_ptr + (n + N).to(tl.int64)[:, None] * w_stride
    w = _tile(w_row, k, inside, K)
    up = w
    if GATED:
        up = _tile(up_row, k, inside, K)
    for turn in tl.static_range(BEHIND):  # for programs that have no room yet
        behind = (program + (turn + 1) * ROOM) * BLOCK_N
        if program < ROOM and behind < N:
            _prefetch_row(w_ptr, behind, N, w_stride, BLOCK_N, K, LINES)
            if GATED:
                _prefetch_row(w_ptr + N.to(tl.int64) * w_stride, behind, N, w_stride, BLOCK_N, K, LINES)
    wait_for_previous(2 if PDL > 0 else 0)  # many small programs, always: EARLY
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    up0 = acc0
    up1 = acc0
    up2 = acc0
    up3 = acc0
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            w = _tile(w_row, start + k, inside, K)
            if GATED:
                up = _tile(up_row, start + k, inside, K)
        acc0 = _add_row(acc0, w, x_ptr, start + k, K)
        if GATED:
            up0 = _add_row(up0, up, x_ptr, start + k, K)
        if M > 1:
            acc1 = _add_row(acc1, w, x_ptr + x_stride, start + k, K)
            if GATED:
                up1 = _add_row(up1, up, x_ptr + x_stride, start + k, K)
        if M > 2:
            acc2 = _add_row(acc2, w, x_ptr + 2 * x_stride, start + k, K)
            if GATED:
                up2 = _add_row(up2, up, x_ptr + 2 * x_stride, start + k, K)
        if M > 3:
            acc3 = _add_row(acc3, w, x_ptr + 3 * x_stride, start + k, K)
            if GATED:
                up3 = _add_row(up3, up, x_ptr + 3 * x_stride, start + k, K)
    mask = n < N
    bias = tl.zeros([BLOCK_N], tl.float32)
    up_bias = bias
    if BIAS:
        bias = tl.load(bias_ptr + n, mask, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + N + n, mask, other=0.0).to(tl.float32)
    _store_row(out_ptr + n, acc0, up0, bias, up_bias, mask, GATED)
    if M > 1:
        _store_row(out_ptr + out_stride + n, acc1, up1, bias, up_bias, mask, GATED)
    if M > 2:
        _store_row(out_ptr + 2 * out_stride + n, acc2, up2, bias, up_bias, mask, GATED)
    if M > 3:
        _store_row(out_ptr + 3 * out_stride + n, acc3, up3, bias, up_bias, mask, GATED)


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, x_stride, w_stride, out_stride, M, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows on tensor cores; rows beyond M are zero and cost no traffic."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * x_stride + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * w_stride + k[:, None]
    up_at = w_ptr + (n + N).to(tl.int64)[None, :] * w_stride + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BLOCK_K):
        x_mask = (m < M)[:, None] & (k < K - start)[None, :]
        w_mask = (k < K - start)[:, None] & (n < N)[None, :]
        x = tl.load(x_at + start, x_mask, other=0.0)
        w = tl.load(w_at + start, w_mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            w = tl.load(up_at + start, w_mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(x, w, up, input_precision="ieee")
    if PDL > 0:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + n, n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = gated(acc, up, dtype)
    out = out_ptr + m[:, None] * out_stride + n[None, :]
    tl.store(out, acc.to(dtype), (m < M)[:, None] & (n < N)[None, :])


@cached
def choose(rows: int, n: int, k: int, is_gated: bool = False) -> SkinnyConfig:
    """The configuration for a shape, 1 to 16 rows and n columns of the output: the table's first rule that fits."""
    config = next(rule.config for rule in linear_tuning().skinny if rule.fits(rows, n, k, is_gated))
    return fit(config, k)


def fit(config: SkinnyConfig, k: int) -> SkinnyConfig:
    """The configuration with block_k no longer than K needs."""
    least = 16 if config.dot else 1
    return replace(config, block_k=min(config.block_k, max(triton.next_power_of_2(k), least)))


def _behind(n: int, k: int, config: SkinnyConfig, pdl: int, device: torch.device) -> tuple[int, int]:
    """(programs that run at once, how many times as many follow them).

    The followers' weights are prefetched into L2 while the kernels before this one compute, if they stay there; else 0.
    """
    room = hopper.num_sms(device) * (WARPS_OF_SM // config.num_warps)
    is_little = n * k <= linear_tuning().prefetch_weight
    return (room, triton.cdiv(n, room * config.block_n) - 1) if pdl != PLAIN and is_little else (room, 0)


def launch_skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SkinnyConfig,
    *,
    is_gated: bool = False,
    shrink: Shrink | None = None,
    h: torch.Tensor | None = None,
    pdl: int = PLAIN,
) -> None:
    """Run our kernel even if it does not pay for the shape: 1 to 16 rows of a float dtype. Gated: weight [2 I, K].

    shrink: of one row, for the vector kernel, which writes h float32 [1, P * R].
    """
    (rows, k), n = x.shape, out.shape[1]
    columns = 2 * n if is_gated else n
    bias_fits = bias is None or bias.shape == (columns,)
    if weight.shape != (columns, k) or out.shape[0] != rows or not 1 <= rows <= MAX_ROWS or not bias_fits:
        raise ValueError(f"skinny_linear: x {x.shape}, weight {weight.shape}, out {out.shape} do not fit, or too many rows")
    if not x.dtype == weight.dtype == out.dtype or not x.stride(1) == weight.stride(1) == out.stride(1) == 1:
        raise ValueError("skinny_linear: x, weight and out need one dtype, and unit stride in the last dimension")
    strides = (x.stride(0), weight.stride(0), out.stride(0))
    extra = launch_options(pdl)
    tensors = (x, weight, x if bias is None else bias, out)
    programs = triton.cdiv(n, config.block_n)
    shape = (config.block_n, config.block_k, bias is not None, is_gated, pdl)
    if shrink is not None and (config.dot or rows > 1 or is_gated or h is None):
        raise ValueError("skinny_linear: an adapter's product is computed beside one row's by the vector kernel")
    if config.dot:
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **extra}
        _dot_kernel[(programs,)](*tensors, *strides, rows, n, k, *shape, MAX_ROWS, **options)
    elif rows <= MAX_VECTOR_ROWS:
        ahead = _behind(n, k, config, pdl, x.device)
        lines = triton.next_power_of_2(triton.cdiv(k, 64))
        adapter, sizes = ((shrink.a, shrink.ranks, shrink.ids, h), shrink.a.shape[1:3]) if shrink else ((None,) * 4, (0, 0))
        programs += triton.cdiv(sizes[0] * sizes[1], config.block_n)
        _vector_kernel[(programs,)](
            *tensors,
            *adapter,
            *strides,
            n,
            k,
            rows,
            *shape,
            *ahead,
            lines,
            *sizes,
            RANK_STEP,
            num_warps=config.num_warps,
            **extra,
        )
    else:
        raise ValueError(f"skinny_linear: {rows} rows need the kernel on tensor cores")


def _choose_for(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> SkinnyConfig | None:
    """The configuration of our kernels; None: cuBLAS computes it."""
    if not 1 <= x.shape[0] <= MAX_ROWS or x.dtype.itemsize != 2 or x.stride(1) != 1 or weight.stride(1) != 1:
        return None
    n, k = weight.shape
    return choose(x.shape[0], n // 2 if is_gated else n, k, is_gated)


def streams(x: torch.Tensor, weight: torch.Tensor, *, split_k: bool = False) -> bool:
    """Whether `linear_hopper` computes these: if it can, and has enough programs to keep the memory busy.

    With split K few columns are enough, except for 2 to 4 rows, where the vector kernel is faster.
    """
    tuning = linear_tuning().stream
    least = (tuning.min_parts_columns if x.shape[0] <= MAX_VECTOR_ROWS else 1) if split_k else tuning.min_columns
    return weight.shape[0] >= least and hopper.supports_linear(x, weight)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """x @ weight^T + bias: by our kernels for few rows of a 16-bit dtype, by cuBLAS otherwise."""
    if current().fixed_order:
        return fixed_linear(x, weight, bias, out, pdl=pdl)
    if streams(x, weight):
        from quire.kernels.linear import linear_hopper

        return linear_hopper.linear(x, weight, bias, out, is_gated=False, pdl=pdl)
    config = _choose_for(x, weight, False)
    if config is None:
        return blas_linear(x, weight, bias, out)
    out = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
    launch_skinny(x, weight, bias, out, config, pdl=pdl)
    return out


def skinny_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pdl: int = PLAIN) -> torch.Tensor:
    """silu(gate) * up of gate | up = x @ weight^T + bias: in one kernel for few rows, by cuBLAS and `silu_mul` otherwise."""
    if current().fixed_order:
        return silu_mul(fixed_linear(x, weight, bias, pdl=pdl), pdl=pdl)
    if streams(x, weight):
        from quire.kernels.linear import linear_hopper

        return linear_hopper.linear(x, weight, bias, None, is_gated=True, pdl=pdl)
    config = _choose_for(x, weight, True)
    if config is None:
        return silu_mul(blas_linear(x, weight, bias), pdl=pdl)
    out = x.new_empty((x.shape[0], weight.shape[0] // 2))
    launch_skinny(x, weight, bias, out, config, is_gated=True, pdl=pdl)
    return out
