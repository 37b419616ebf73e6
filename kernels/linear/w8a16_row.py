"""The product of one 16-bit row with int8 weights, on the plain cores: many small programs, as in `scaled_row` for 8-bit rows.

Operands and results as in `w8a16`, gated too. W moves once, as words of four. A conversion would take as many instructions as
everything else. Instead 128 is added to a byte, and it is moved so that with the bits of 256 it makes 256 + q in float32; the
excess, (384 + z) times the sum of x, is subtracted from each word's product: a shift and a mask a weight, and the product.
Reference: `w8a16.Weight8.dequantized`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

BITS_OF_256 = 0x43800000  # in float32
WORD = 4  # weights


class Config(NamedTuple):
    block_n: int  # output columns of a program
    block_words: int
    num_warps: int


@triton.jit
def _with_256(words, magic, t: tl.constexpr):
    """256 + q as float32, of byte t; magic is the bits of 256, in a register: so this is one `lop3`, else two."""
    if t == 0:
        bits = words << 15
    elif t == 1:
        bits = words << 7
    elif t == 2:
        bits = words >> 1
    else:
        bits = words >> 9
    return ((bits & 0x007F8000) | magic).to(tl.float32, bitcast=True)


@triton.jit
def _words(w_ptr, n, columns, WORDS: tl.constexpr, N):
    mask = (n < N)[:, None] & (columns < WORDS)[None, :]
    return tl.load(w_ptr + n.to(tl.int64)[:, None] * WORDS + columns[None, :], mask, other=0, eviction_policy="evict_first")


@triton.jit
def _add(
    acc, words, x_ptr, s_ptr, z_ptr, n, columns, N, magic,
    WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_WORDS] plus the products of these words; without their scale if a row has only one."""
    words = words ^ -2139062144  # 0x80808080
    four = x_ptr + 4 * columns[:, None] + tl.arange(0, 4)[None, :]
    x = tl.load(four, (columns < WORDS)[:, None], other=0.0).to(tl.float32).reshape(words.shape[1], 2, 2)
    x_sum = tl.sum(tl.sum(x, 2), 1)
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    part = _with_256(words, magic, 0) * first[None, :]
    part += _with_256(words, magic, 1) * second[None, :]
    part += _with_256(words, magic, 2) * third[None, :]
    part += _with_256(words, magic, 3) * fourth[None, :]
    at = n.to(tl.int64)[:, None] * GROUPS + (4 * columns // GROUP)[None, :]
    mask = (n < N)[:, None] & (columns < WORDS)[None, :]
    excess = tl.zeros_like(acc) + 384.0
    if ZEROS:
        excess += tl.load(z_ptr + at, mask, other=0).to(tl.float32)
    part -= excess * x_sum[None, :]
    if GROUPS > 1:
        part *= tl.load(s_ptr + at, mask, other=0.0).to(tl.float32)
    return acc + part


@triton.jit
def _finish(acc, s_ptr, bias_ptr, n, live, GROUPS: tl.constexpr, BIAS: tl.constexpr):
    y = tl.sum(acc, 1)
    if GROUPS == 1:
        y *= tl.load(s_ptr + n, live, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + n, live, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["magic"])
def _kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, N, magic,
    WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK)
    rows = 2 * N if GATED else N
    up_n = tl.where(n < N, n + N, rows)
    words = _words(w_ptr, n, columns, WORDS, N)
    up_words = words
    if GATED:
        up_words = _words(w_ptr, up_n, columns, WORDS, rows)
    wait_for_previous(2 if PDL > 0 else 0)  # many small programs, always: EARLY
    acc = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    up = acc
    for start in tl.static_range(0, WORDS, BLOCK):
        at = start + columns
        if start > 0:
            words = _words(w_ptr, n, at, WORDS, N)
            if GATED:
                up_words = _words(w_ptr, up_n, at, WORDS, rows)
        acc = _add(acc, words, x_ptr, s_ptr, z_ptr, n, at, N, magic, WORDS, GROUP, GROUPS, ZEROS)
        if GATED:
            up = _add(up, up_words, x_ptr, s_ptr, z_ptr, up_n, at, rows, magic, WORDS, GROUP, GROUPS, ZEROS)
    y = _finish(acc, s_ptr, bias_ptr, n, n < N, GROUPS, BIAS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        y = gated(y, _finish(up, s_ptr, bias_ptr, up_n, n < N, GROUPS, BIAS), dtype)
    tl.store(out_ptr + n, y.to(dtype), n < N)


def supports(x: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether x is one row, and W int8 in whole words."""
    return len(x) == 1 and x.stride(1) == 1 and data.dtype == torch.int8 and data.shape[1] % WORD == 0 and data.is_contiguous()


def choose(n: int, words: int) -> Config:
    """The configuration for n output columns and so many words a row: estimated, not measured.

    64 weights a thread at a time share the work on x: 5.5 instructions each, 6.4 with scales of groups; with 32 weights 7.4.
    """
    block, block_n = min(max(triton.next_power_of_2(words), 32), 256), 8 if n >= 4096 else 4 if n >= 1024 else 2
    return Config(block_n, block, max(1, block_n * block // 512))


def launch(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Config,
    *,
    is_gated: bool = False,
    pdl: int = PLAIN,
) -> None:
    """Run the kernel for operands that it `supports`; a weight as in `w8a16.Weight8`; out [1, N], gated [1, N / 2].

    Raises ValueError if shapes or types do not fit.
    """
    (columns, k), n = data.shape, out.shape[1]
    fits = x.shape == (1, k) and columns == (2 * n if is_gated else n) and (bias is None or bias.shape == (columns,))
    if not supports(x, data) or not fits or len(out) != 1 or scales.shape != (columns, triton.cdiv(k, group)):
        raise ValueError(f"w8a16_row: x {x.shape}, weight {data.shape}, out {out.shape} do not fit")
    if x.dtype != out.dtype or out.stride(1) != 1 or group % WORD:
        raise ValueError("w8a16_row: x and out need one dtype and unit stride in the last dimension, groups whole words")
    _kernel[(triton.cdiv(n, config.block_n),)](
        x, data.view(torch.int32), scales, scales if zeros is None else zeros, x if bias is None else bias, out, n, BITS_OF_256,
        k // WORD, group, scales.shape[1], config.block_n, config.block_words, zeros is not None, bias is not None, is_gated,
        pdl, num_warps=config.num_warps, **launch_options(pdl),
    )  # fmt: skip
