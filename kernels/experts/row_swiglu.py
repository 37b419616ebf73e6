"""The activation of experts inside a Gluon kernel: `swiglu`'s."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.elementwise import activation

_gated = gluon.jit(activation.gated.fn)


@gluon.jit
def activated(
    gate, up, dtype: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr, CUBIC: gl.constexpr
):  # fmt: skip
    """The activation in float32, of sums that are first rounded to dtype. LIMIT 0: no limit."""
    if LIMIT == 0.0 and ALPHA == 1.0 and OFFSET == 0.0 and CUBIC == 0.0:
        return _gated(gate, up, dtype)
    else:
        gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
        if LIMIT > 0.0:
            gate = gl.minimum(gate, LIMIT)
            up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
        inner = gate
        if CUBIC != 0.0:
            inner = gate + CUBIC * gate * gate * gate
        return gate / (1.0 + gl.exp(-ALPHA * inner)) * (up + OFFSET)
