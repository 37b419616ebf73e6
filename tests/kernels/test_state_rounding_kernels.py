"""Kernels round recurrent states as the CPU's path does; see test_state_rounding.py."""

import pytest
import torch
from recurrent_cases import interpreted
from state_values import values

from quire.kernels.recurrent.rounding_cpu import rounded

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from quire.kernels.recurrent import rounding  # noqa: E402


@triton.jit
def _kernel(x_ptr, positions_ptr, out_ptr, COUNT: tl.constexpr):
    from_ = tl.program_id(0) * COUNT + tl.arange(0, COUNT)[None, :]
    found = rounding.rounded(
        tl.load(x_ptr + from_),
        tl.load(positions_ptr + tl.program_id(0)),
        tl.arange(0, COUNT)[None, :],
        out_ptr.dtype.element_ty,
    )
    tl.store(out_ptr + from_, found)


def compare_kernel(device):
    x = torch.cat((values(), values() * 0.6)).clamp(-65504.0, 65504.0)[:2048].expand(5, 2048).contiguous()
    positions = torch.tensor([0, 1, 70, 4096, 1 << 30])
    out = torch.empty(x.shape, dtype=torch.float16, device=device)
    _kernel[(5,)](x.to(device), positions.int().to(device), out, COUNT=2048)
    assert torch.equal(out.cpu(), rounded(x, positions, torch.float16))


@interpreted
def test_kernels_round_as_the_cpu_interpreted():
    compare_kernel("cpu")


@pytest.mark.gpu
def test_kernels_round_as_the_cpu_on_a_gpu():
    compare_kernel("cuda")
