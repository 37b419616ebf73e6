"""Sums and maxima over rows' tokens: the CPU's function against torch's own, the kernel against the CPU's."""

from itertools import accumulate, pairwise

import pytest
import torch

from quire.kernels.pooling import segments_cpu


def rows(lengths, skipped=0):
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    firsts = torch.minimum(bounds[:-1] + skipped, bounds[1:])
    x = torch.randn(int(bounds[-1]) + 2, 80, generator=torch.Generator().manual_seed(1))
    return x, firsts, bounds[1:].contiguous(), bounds[:-1].contiguous()


@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("how", ["sum", "weighted", "max"])
def test_cpu_equals_torch(how, skipped):
    x, firsts, ends, origins = rows([5, 3, 40], skipped)
    got = segments_cpu.segments(x, firsts, ends, origins, how)
    for row, (begin, end) in enumerate(pairwise([0, 5, 8, 48])):
        own = x[begin:end]
        weights = torch.arange(1, len(own) + 1)[:, None]
        expected = {"sum": own, "weighted": own * weights, "max": own}[how][skipped:]
        torch.testing.assert_close(got[row], expected.amax(0) if how == "max" else expected.sum(0))


@pytest.mark.interpret
@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("how", ["sum", "weighted", "max"])
def test_interpreted_kernel_equals_cpu(how, skipped):
    from quire.kernels.pooling import segments

    given = rows([5, 1, 40, 2], skipped)
    torch.testing.assert_close(segments.segments(*given, how), segments_cpu.segments(*given, how), rtol=1e-5, atol=1e-4)


@pytest.mark.interpret
@pytest.mark.parametrize("how", ["sum", "max"])
def test_nan_is_not_lost_and_stays_in_its_row(how):
    from quire.kernels.pooling import segments

    x, *spans = rows([5, 7])
    x[3, 4] = float("nan")
    for function in (segments.segments, segments_cpu.segments):
        got = function(x, *spans, how)
        assert got[0].isnan().nonzero().tolist() == [[4]] and not got[1].isnan().any()
