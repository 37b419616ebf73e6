"""Skinny linear layers for 1 to 16 rows, where reading W is all the work.

    skinny_linear   y = x @ W^T + bias               x [M, K], W [N, K], bias [N] or none, y [M, N]
    skinny_gated    y = cast(silu(g)) * u            g | u = cast(x @ W^T + bias), W [2 I, K], y [M, I]

bfloat16 or float16 (float32 in tests), accumulated in float32, rounded once (g and u too, as if they had been stored).
Moves every element of W once, marked evict-first: the weights of a model do not fit into L2, and x and y should stay there.
The vector kernel (1 to 4 rows): one program per few output columns, products and sums on the plain cores, all of K within the
program. The dot kernel (2 to 16): tensor cores on tiles of 16 rows x BLOCK_N columns. The order of summation depends on the
shape alone, not on what other rows hold; but it differs between numbers of rows, so a row's last bits may change with M, as
they do with cuBLAS. `choose` says which kernel a shape gets, and where cuBLAS is faster.

pdl=True launches a kernel as a programmatic dependent of the one before it (Hopper): weights, which nobody writes, are on
their way before it waits for x. torch.nn.functional.linear and `activation_torch` are the references.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from quire.kernels.activation import silu_mul

MAX_ROWS = 16  # beyond it cuBLAS is at the memory's speed too
MAX_VECTOR_ROWS = 4  # of the kernel without tensor cores
PREFETCH_BYTES = 1 << 16  # of W that a program of the dot kernel asks into L2 before it waits for x


class Config(NamedTuple):
    dot: bool  # on tensor cores
    block_n: int  # output columns of a program
    block_k: int
    num_warps: int
    num_stages: int = 1  # of the dot kernel: loads in flight ahead of the arithmetic


@triton.jit
def _tile(w_row, k, inside, K: tl.constexpr):
    return tl.load(w_row + k[None, :], inside & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_row(acc, w, x_row, k, K: tl.constexpr):
    return acc + w.to(tl.float32) * tl.load(x_row + k, k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of sums in float32, rounded where `silu_mul` rounds."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _store_row(out, gate, up, bias, up_bias, mask, GATED: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    y = tl.sum(gate, 1) + bias
    if GATED:
        y = _gated(y, tl.sum(up, 1) + up_bias, dtype)
    tl.store(out, y.to(dtype), mask)


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, x_stride, w_stride, out_stride, N,
    K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """M = 1 to 4 rows: one accumulator tile [BLOCK_N, BLOCK_K] a row, summed over K at the end; N columns of the output."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None]
    w_row = w_ptr + n.to(tl.int64)[:, None] * w_stride
    up_row = w_ptr + (n + N).to(tl.int64)[:, None] * w_stride
    w = _tile(w_row, k, inside, K)
    up = w
    if GATED:
        up = _tile(up_row, k, inside, K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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


@triton.jit
def _prefetch(w_ptr, w_stride, first, last, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask the first COLUMNS (a multiple of 32) of BLOCK_N rows of 16-bit weights into L2, a quarter of a row a thread."""
    i = tl.arange(0, 4 * BLOCK_N)
    at = w_ptr + tl.minimum(first + i // 4, last).to(tl.int64) * w_stride + (i % 4) * (COLUMNS // 4)
    asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    size = tl.full([4 * BLOCK_N], COLUMNS // 4 * 2, tl.int32)
    tl.inline_asm_elementwise(asm, "=r,l,r", [at, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, x_stride, w_stride, out_stride, M, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Up to 16 rows on tensor cores; rows beyond M are zero and cost no traffic."""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, 16)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * x_stride + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * w_stride + k[:, None]
    up_at = w_ptr + (n + N).to(tl.int64)[None, :] * w_stride + k[:, None]
    acc = tl.zeros([16, BLOCK_N], tl.float32)
    up = acc
    if PREFETCH > 0:
        _prefetch(w_ptr, w_stride, first, N - 1, BLOCK_N, PREFETCH)
        if GATED:
            _prefetch(w_ptr, w_stride, N + first, 2 * N - 1, BLOCK_N, PREFETCH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
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
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + n, n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = _gated(acc, up, dtype)
    out = out_ptr + m[:, None] * out_stride + n[None, :]
    tl.store(out, acc.to(dtype), (m < M)[:, None] & (n < N)[None, :])


def choose(rows: int, n: int, k: int, gated: bool = False) -> Config | None:
    """The configuration for a shape (n columns of the output), None for cuBLAS.

    Found with benchmarks/kernels_small.py --tune.
    """
    block_k = triton.next_power_of_2(k)
    if rows == 1:
        if k <= 2048:
            return Config(False, 4 if k <= 1024 else 2, min(block_k, 2048), 4)
        return Config(False, 2, 2048, 4) if k > 4096 else Config(False, 1, 4096, 8)
    if rows <= MAX_VECTOR_ROWS and n <= 1024:
        return Config(False, 2, min(block_k, 1024), 4)
    block_k = max(block_k, 16)
    if n <= 1024:
        return Config(True, 16, min(block_k, 256), 4, 4)
    if n <= 4096 and k >= 4096:
        return Config(True, 32, min(block_k, 512), 4, 3)
    return Config(True, 32 if n <= 4096 or gated else 64, min(block_k, 128), 4, 5 if n * k <= 2**25 else 3)


def _prefetch_columns(config: Config, x: torch.Tensor, weight: torch.Tensor) -> int:
    """Columns of W that a program of the dot kernel prefetches: what aligned 16-byte pieces a quarter of a row divides into."""
    columns = min(x.shape[1], PREFETCH_BYTES // (2 * config.block_n)) // 32 * 32
    aligned = x.dtype.itemsize == 2 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0
    return columns if aligned else 0


def launch_skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """Run our kernel, whatever the shape is worth: 1 to 16 rows of a float dtype. Gated: weight [2 I, K], out [M, I]."""
    (rows, k), n = x.shape, out.shape[1]
    columns = 2 * n if gated else n
    bias_fits = bias is None or bias.shape == (columns,)
    if weight.shape != (columns, k) or out.shape[0] != rows or not 1 <= rows <= MAX_ROWS or not bias_fits:
        raise ValueError(f"skinny_linear: x {x.shape}, weight {weight.shape}, out {out.shape} do not fit, or too many rows")
    if not x.dtype == weight.dtype == out.dtype or not x.stride(1) == weight.stride(1) == out.stride(1) == 1:
        raise ValueError("skinny_linear: x, weight and out need one dtype, and unit stride in the last dimension")
    strides = (x.stride(0), weight.stride(0), out.stride(0))
    extra = {"launch_pdl": True} if pdl else {}
    arguments = (x, weight, x if bias is None else bias, out, *strides)
    grid = (triton.cdiv(n, config.block_n),)
    shape = (config.block_n, config.block_k, bias is not None, gated, pdl)
    if config.dot:
        prefetch = _prefetch_columns(config, x, weight) if pdl else 0
        _dot_kernel[grid](
            *arguments, rows, n, k, *shape, prefetch, num_warps=config.num_warps, num_stages=config.num_stages, **extra
        )
    elif rows <= MAX_VECTOR_ROWS:
        _vector_kernel[grid](*arguments, n, k, rows, *shape, num_warps=config.num_warps, **extra)
    else:
        raise ValueError(f"skinny_linear: {rows} rows need the kernel on tensor cores")


def _choose_for(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> Config | None:
    """None: by cuBLAS."""
    if not 1 <= x.shape[0] <= MAX_ROWS or x.dtype.itemsize != 2 or x.stride(1) != 1 or weight.stride(1) != 1:
        return None
    n, k = weight.shape
    return choose(x.shape[0], n // 2 if gated else n, k, gated)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """x @ weight^T + bias: by our kernel for few rows of a 16-bit dtype, by cuBLAS otherwise."""
    config = _choose_for(x, weight, False)
    if config is None:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    out = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
    launch_skinny(x, weight, bias, out, config, pdl=pdl)
    return out


def skinny_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pdl: bool = False) -> torch.Tensor:
    """silu(gate) * up of gate | up = x @ weight^T + bias: in one kernel for few rows, by cuBLAS and `silu_mul` otherwise."""
    config = _choose_for(x, weight, True)
    if config is None:
        return silu_mul(F.linear(x, weight, bias), pdl=pdl)
    out = x.new_empty((x.shape[0], weight.shape[0] // 2))
    launch_skinny(x, weight, bias, out, config, gated=True, pdl=pdl)
    return out
