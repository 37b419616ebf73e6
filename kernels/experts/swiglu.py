"""The activations of experts inside a kernel: `experts_reference.activate` of float32 sums."""

import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated
from quire.kernels.experts.experts_reference import Act, Gelu, Relu2


@triton.jit
def swiglu(gate, up, dtype: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, CUBIC: tl.constexpr):
    """The activation in float32, of sums that are first rounded to dtype. LIMIT 0: no limit."""
    if LIMIT == 0.0 and ALPHA == 1.0 and OFFSET == 0.0 and CUBIC == 0.0:
        return gated(gate, up, dtype)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    inner = gate
    if CUBIC != 0.0:
        inner = gate + CUBIC * gate * gate * gate
    return gate / (1.0 + tl.exp(-ALPHA * inner)) * (up + OFFSET)


@triton.jit
def ungated(up, dtype: tl.constexpr, ALPHA: tl.constexpr):
    """max(up, 0)² or, if ALPHA is 0, gelu(up) in float32, of sums that are first rounded to dtype."""
    up = up.to(dtype).to(tl.float32)
    if ALPHA == 0.0:
        return 0.5 * up * (1.0 + tl.erf(up * 0.7071067811865476))
    return tl.where(up > 0.0, up * up, 0.0)


def constants(act: Act) -> tuple[bool, float, float, float, float]:
    """A kernel's GATED, LIMIT, ALPHA, OFFSET and CUBIC."""
    if isinstance(act, Relu2):
        return False, 0.0, 1.0, 0.0, 0.0
    if isinstance(act, Gelu):
        return False, 0.0, 0.0, 0.0, 0.0
    return True, act.limit, act.alpha, act.offset, act.cubic
