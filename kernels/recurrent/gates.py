"""Functions of the kernels of recurrent layers: gates, Mamba 2's steps, normalized keys, the norm behind."""

import triton
import triton.language as tl


@triton.jit
def decay(a, a_log, dt_bias):
    """g in float32: -exp(a_log) softplus(a + dt_bias), of any shape."""
    x = a.to(tl.float32) + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(a_log) * softplus


@triton.jit
def decay_and_beta(a, b, a_log, dt_bias):
    """(g, β) in float32: the decay and sigmoid(b), of any shape."""
    return decay(a, a_log, dt_bias), tl.sigmoid(b.to(tl.float32))


@triton.jit
def l2_normed(x, eps, AXIS: tl.constexpr):
    """x, float32, divided by its norm along the axis."""
    return x * tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + eps)


@triton.jit
def gated(o, variance, weight, z, eps, SIGMOID: tl.constexpr):
    """norm(o) · silu(z), or · sigmoid(z), in float32."""
    z = z.to(tl.float32)
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate = z * gate
    return o * tl.rsqrt(variance + eps) * weight.to(tl.float32) * gate


@triton.jit
def time_steps(dt, dt_bias, a_log, dt_min, dt_max):
    """(Δ, logarithm of the decay) of Mamba 2, float32 of any shape."""
    x = dt.to(tl.float32) + dt_bias
    delta = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    delta = tl.minimum(tl.maximum(delta, dt_min), dt_max)
    return delta, -delta * tl.exp(a_log)
