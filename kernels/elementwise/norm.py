"""RMSNorm and LayerNorm, alone or fused with the residual addition before them.

    rms_norm:      y = weight * cast(x / sqrt(mean(x^2) + eps))           reads x, writes y:               2 * T * H elements
    layer_norm:    y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias likewise
    add_rms_norm:  residual += scale * x (in place); y as above, of it    reads x and residual, writes both: 4 * T * H elements

x, residual, out [T, H] with unit stride in H and any row stride; weight, bias [H]; float32, float16 or bfloat16, all of one
dtype. x may be [T, N, H], N heads with a norm each; weight [N, H] then has a row for each.
x of add_rms_norm and add_layer_norm may also be split-K partial sums, which are all read: float32 [S, T, H], or, of int8
products (`scaled_hopper`), int32 [S + 2, T, H], where the last two hold the scales that the total is multiplied by. `places`
int32 [H]: column c of y goes to places[c], for a product with a weight of permuted inputs. `term`: what LoRA adapters add to x,
scale * B h of each row's adapter, R * H elements a row, which are loaded before the wait. One program a row, which fits
into registers: H up to 32768. Math in float32; `weighs` says how RMSNorm's weight is applied (norm_reference.py, which is the
reference): by default the normalized value is rounded to x's dtype before the product, as in transformers' LlamaRMSNorm. `pdl`
is a mode of `dependent_launch`: the weights are loaded before the wait.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.adapter_term import load_h, num_parts, padded
from quire.kernels.elementwise.norm_reference import Term, Weighs
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import current

MAX_WARPS = 16
TERM_WARPS = 16  # of a row with an adapter's B
MAX_TERM_WIDTH, MAX_TERM_RANK = 4096, 64  # limits of `takes_term`: registers, and a row's time
WEIGHS: dict[Weighs, int] = {"rounded": 1, "wide": 2, "plus_one": 3}  # as the kernels' constant
LAYER_NORM = 4


@triton.jit
def weighed(normed, weight, dtype: tl.constexpr, WEIGHS: tl.constexpr):
    """Normalized values times their weights, in float32."""
    if WEIGHS == 1:
        return normed.to(dtype).to(tl.float32) * weight
    elif WEIGHS == 3:
        return normed * (1.0 + weight)
    else:
        return normed * weight


@triton.jit
def sum_of_splits(x_ptr, row, cols, mask, x_stride, part_stride, PARTS: tl.constexpr):
    """Columns of a row of x, or of the total of its partial sums if there are several: float32, or x's dtype."""
    at = x_ptr + row * x_stride + cols
    x = tl.load(at, mask, other=0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * part_stride, mask, other=0)
    if x_ptr.dtype.element_ty == tl.int32:  # exact; the next two hold scales as float32 bits: the columns', then the rows'
        scales = (x_ptr + PARTS * part_stride).to(tl.pointer_type(tl.float32), bitcast=True)
        x = x.to(tl.float32) * tl.load(scales + part_stride + row) * tl.load(scales + cols, mask, other=0.0)
    return x


def num_splits(x: torch.Tensor) -> int:
    """Number of partial sums in x: 1 for [T, H], S for [S, T, H]. TypeError if x is 3-D and of another dtype."""
    if x.dim() == 3 and x.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"partial sums must be float32 or int32, not {x.dtype}")
    return 1 if x.dim() == 2 else len(x) - 2 * (x.dtype == torch.int32)


@triton.jit
def _b_of_row(b, ranks, scales, ids, row, cols, H: tl.constexpr, R: tl.constexpr, RANK_STEP: tl.constexpr):
    """(the places [BLOCK, RANK_STEP] of a row's adapter's first ranks in B, its rank rounded up, its scale); rank 0: none."""
    slot = tl.load(ids + row)
    rank = padded(tl.load(ranks + slot, slot >= 0, other=0), RANK_STEP)
    scale = tl.load(scales + slot, slot >= 0, other=0.0)
    at = b + slot.to(tl.int64) * (H * R) + cols[:, None] * rank + tl.arange(0, RANK_STEP)[None, :]
    return at, rank, scale


@triton.jit(do_not_specialize=["part_units", "h_stride"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, places_ptr, out_ptr, h, b, ranks, scales, ids, h_stride,
    x_stride, residual_stride, out_stride, part_units, weight_stride, scale, eps, UNIT: tl.constexpr,
    H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, PARTS: tl.constexpr, WEIGHS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PLACED: tl.constexpr, PDL: tl.constexpr,
    R: tl.constexpr, H_PARTS: tl.constexpr, RANK_STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    if WEIGHT:
        weight = tl.load(weight_ptr + head * weight_stride + cols, mask, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + cols, mask, other=0.0).to(tl.float32)
    places = cols + head * H
    if PLACED:
        places = tl.load(places_ptr + cols, mask, other=0)
    cols += head * H
    if R > 0:
        b_at, rank, factor = _b_of_row(b, ranks, scales, ids, row, cols, H, R, RANK_STEP)
        of_b = tl.load(b_at, mask[:, None] & (rank > 0), other=0.0)  # all of them would not fit into registers
    wait_for_previous(PDL)
    x = sum_of_splits(x_ptr, row, cols, mask, x_stride, part_units * UNIT, PARTS)
    if R > 0:
        term = tl.zeros([BLOCK], tl.float32)
        h_at = h + row * R + tl.arange(0, RANK_STEP)
        for r in tl.static_range(0, R, RANK_STEP):
            if r > 0:
                of_b = tl.load(b_at + r, mask[:, None] & (r < rank), other=0.0)
            hidden = load_h(h_at + r, tl.arange(0, RANK_STEP) + r < rank, h_stride, H_PARTS).to(of_b.dtype).to(tl.float32)
            term += tl.sum(of_b.to(tl.float32) * hidden[None, :], 1)
        x = tl.where(rank > 0, x.to(tl.float32) + term * factor, x.to(tl.float32))
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask, other=0.0)
        x = x.to(residual.dtype)
        if SCALED:
            x = (x.to(tl.float32) * scale).to(residual.dtype)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * residual_stride + cols, x, mask)
    wide = x.to(tl.float32)
    if WEIGHS == 4:
        wide = tl.where(mask, wide - tl.sum(wide, 0) / H, 0.0)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    if WEIGHT:
        y = weighed(y, weight, x.dtype, WEIGHS)
    if BIAS:
        y += bias
    tl.store(out_ptr + row * out_stride + places, y.to(x.dtype), mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    pdl: int,
    *,
    bias: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    scale: float = 1.0,
    weighs: int = 1,
    term: Term | None = None,
) -> torch.Tensor:
    parts, part_stride = 1, 0
    if x.dim() == 3 and residual is not None:
        parts, part_stride = num_splits(x), x.stride(0)
        out = torch.empty_like(residual) if out is None else out
        x = x[0]
        if x.shape != residual.shape:
            raise ValueError(f"add_rms_norm: parts {x.shape} do not fit the residual {residual.shape}")
        _check(residual, residual, weight, bias, out)
    out = torch.empty_like(x) if out is None else out
    second = x if residual is None else residual
    if not part_stride:
        _check(x, second, weight, bias, out)
    if places is not None and (x.dim() != 2 or places.shape != x.shape[1:] or places.dtype != torch.int32):
        raise ValueError(f"norm: places {places.shape} of {places.dtype} do not fit")
    rows, width = x.shape[0], x.shape[-1]
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // current().elementwise.norm_warp_elements, 1), MAX_WARPS)
    of_heads = 0 if weight is None or weight.dim() == 1 else weight.stride(0)
    # of the partial sums' stride: one kernel for any number of rows, which reads them 16 bytes at a time
    unit = 16 if width % 16 == 0 and part_stride % 16 == 0 else 1
    adapter, of_h = list[object]([None] * 5 + [0]), (0, 1, 1)
    if term is not None:
        rank = term.h.shape[-1]
        if term.h.shape[-2] != rows or term.b.shape[1] != width * rank or x.dim() != 2:
            raise ValueError(f"norm: an adapter's h {term.h.shape} and B {term.b.shape} do not fit x {x.shape}")
        adapter, of_h = [*term[:5], rows * rank], (rank, num_parts(term.h), term.rank_step)
        num_warps = max(num_warps, min(TERM_WARPS, block // 32))
    _norm_kernel[(rows, x.shape[1] if x.dim() == 3 else 1)](
        x, second, weight, bias, places, out, *adapter, x.stride(0), second.stride(0), out.stride(0), part_stride // unit,
        of_heads, scale, eps, unit, width, block, residual is not None, scale != 1.0, parts, weighs, weight is not None,
        bias is not None, places is not None, pdl, *of_h, num_warps=num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out


def _check(
    x: torch.Tensor, second: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    of_row = {x.shape[-1:], x.shape[1:]}
    vectors = [v for v in (weight, bias) if v is not None]
    bias_fits = bias is None or bias.dim() == 1
    fits = second.shape == out.shape == x.shape and all(v.shape in of_row for v in vectors) and bias_fits
    if x.dim() not in (2, 3) or not fits:
        raise ValueError(f"norm: shapes {x.shape}, {second.shape}, {[v.shape for v in vectors]}, {out.shape} do not fit")
    if any(t.dtype != x.dtype for t in (second, out, *vectors)):
        raise TypeError(f"norm: dtypes differ: {x.dtype}, {second.dtype}, {[v.dtype for v in vectors]}, {out.dtype}")
    if any(t.stride(-1) != 1 or (t.dim() == 3 and t.stride(1) != t.shape[2]) for t in (x, second, out, *vectors)):
        raise ValueError("norm: the last dimension must have stride 1, and heads must lie side by side")


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    weighs: Weighs = "rounded",
    places: torch.Tensor | None = None,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """The normalized rows of x, written to `out` if given (which may be x itself)."""
    return _launch(x, None, weight, eps, out, pdl, weighs=WEIGHS[weighs], places=places)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    weighs: Weighs = "rounded",
    places: torch.Tensor | None = None,
    term: Term | None = None,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """Add scale * x to the residual in place and return the norm of the sum; `out` may be x itself, unless partial sums.

    x may be partial sums; their total, rounded to the residual's dtype, is added: float32 [S, T, H] (`split_linear`), or int32.
    term: what adapters add to x, if `takes_term`.
    """
    return _launch(x, residual, weight, eps, out, pdl, scale=scale, weighs=WEIGHS[weighs], places=places, term=term)


def takes_term(width: int, rank: int) -> bool:
    """Whether `add_rms_norm` can add adapters of this R to rows of so many elements, and may: it is not for all steps."""
    return not current().fixed_order and width <= MAX_TERM_WIDTH and rank <= MAX_TERM_RANK


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """LayerNorm's rows of x, written to `out` if given (which may be x itself)."""
    return _launch(x, None, weight, eps, out, pdl, bias=bias, weighs=LAYER_NORM)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """Add scale * x to the residual in place and return the LayerNorm of the sum; x as in add_rms_norm."""
    return _launch(x, residual, weight, eps, None, pdl, bias=bias, scale=scale, weighs=LAYER_NORM)
