"""Shared by tests of experts' kernels: activations, tolerances by dtype, and shapes of real models."""

from collections.abc import Callable

import torch

from quire.kernels.experts.experts_reference import SwiGLU
from quire.kernels.experts.four_bits_weight import E2M1, in_bytes, narrowed, new_int, new_mx, put_int, put_mx

CLAMPED = SwiGLU(limit=1.0, alpha=1.702, offset=1.0)
GELU = SwiGLU(alpha=1.5957691216057308, cubic=0.044715)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# hidden, intermediate, experts, top k
QWEN, GPT_OSS, DEEPSEEK = (2048, 768, 128, 8), (2880, 2880, 32, 4), (2048, 1408, 64, 6)
NEMOTRON = (2688, 1856, 128, 6)  # without a gate
TABLE = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)
EVERY = slice(None)


def mx(shape, generator, low=112, high=122):
    """Random codes and exponents of a weight [E, N, K], and what they stand for."""
    codes = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    exponents = torch.randint(low, high, (*shape[:2], shape[2] // 32), generator=generator, dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents.int() - 127)
    return codes, exponents, TABLE[codes.long()] * scales.repeat_interleave(32, -1)


def made(form, shape, generator, device="cpu"):
    """A weight [E, N, K] in a form, and its numbers."""
    experts, n, k = shape
    if form == "mx":
        codes, exponents, values = mx(shape, generator)
        weight = new_mx(experts, n, k, device)
        put_mx(weight, EVERY, EVERY, in_bytes(codes).to(device), exponents.to(device))
    else:
        group = form or k
        q = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
        scales = (torch.rand(experts, n, -(-k // group), generator=generator) / (4 * k**0.5)).bfloat16().float()
        zeros = torch.randint(16, scales.shape, generator=generator) if form != 64 else None
        weight = new_int(experts, n, k, group, torch.float32, device)
        put_int(weight, EVERY, EVERY, q.to(device), None if zeros is None else zeros.to(device), scales.to(device))
        weight = narrowed(weight, torch.bfloat16)
        offset = 8 if zeros is None else zeros.repeat_interleave(group, -1)[..., :k]
        values = (q.double() - offset) * scales.double().repeat_interleave(group, -1)[..., :k]
    return weight, values


def check_dependent_launches(chain: Callable[[int], torch.Tensor], *, early: bool) -> None:
    """chain(mode), kernels one after the other on a GPU: dependent launches give what plain ones give, in a graph, too."""
    from quire.kernels.triton_support.dependent_launch import EARLY, LATE, PLAIN

    want = chain(PLAIN)
    assert torch.isfinite(want).all()
    for mode in (LATE, EARLY) if early else (LATE,):
        assert torch.equal(chain(mode), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(mode)
        for _ in range(3):
            graph.replay()
        assert torch.equal(captured, want)
