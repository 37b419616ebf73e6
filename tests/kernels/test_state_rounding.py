"""How recurrent states in float16 are rounded: to one of the two values beside an element, with a mean that is the element."""

import pytest
import torch
from state_values import values

from quire.kernels.recurrent.rounding_cpu import noise, rounded

COUNT = 4096


def beside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest float16 value that is at most x, and the smallest that is at least x, in float64."""
    near, up = x.half(), torch.tensor(float("inf"), dtype=torch.half)
    low = torch.where(near.double() > x.double(), torch.nextafter(near, -up), near)
    high = torch.where(near.double() < x.double(), torch.nextafter(near, up), near)
    return low.double(), high.double()


def test_the_mean_is_the_element():
    x = values()
    x = x[x.abs() < 65504.0]
    low, high = beside(x)
    total = torch.zeros(len(x), dtype=torch.double)
    for position in range(COUNT):
        found = rounded(x[None], torch.tensor([position]), torch.float16)[0].double()
        assert bool(((found == low) | (found == high)).all())
        total += found
    error = (total / COUNT - x.double()) / torch.where(high > low, high - low, 1.0)
    assert error.abs().max() < 5 * 0.5 / COUNT**0.5 and error.mean().abs() < 4 * 0.5 / (COUNT * len(x)) ** 0.5


def test_a_state_that_changes_by_less_than_half_a_step_does_not_stand_still():
    state = nearest = torch.full((1, 512), 1.0)
    for position in range(2000):
        state = rounded(state * 0.9998, torch.tensor([position]), torch.float16).float()
        nearest = (nearest * 0.9998).half().float()
    assert state.mean() == pytest.approx(0.9998**2000, rel=0.01)
    assert nearest.mean() > 0.95  # what rounding to the nearest gives


def test_noise_is_uniform_and_of_its_place():
    u = noise(torch.arange(64), 4096)
    assert u.min() == 0.0 and u.max() == 1 - 2.0**-13
    assert u.mean() == pytest.approx(0.5, abs=0.003) and u.var() == pytest.approx(1 / 12, rel=0.01)
    for other in (u.roll(1, 0), u.roll(1, 1), u.roll(64, 1)):
        assert torch.corrcoef(torch.stack((u.flatten(), other.flatten())))[0, 1].abs() < 0.01
    assert torch.equal(noise(torch.tensor([63]), 4096)[0], u[63])


def test_what_float16_has_stays_as_it_is():
    every = torch.arange(-(1 << 15), 1 << 15).short().view(torch.float16)
    found = rounded(every.float()[None], torch.tensor([7]), torch.float16)[0]
    assert torch.equal(found.nan_to_num(1.5), every.nan_to_num(1.5)) and torch.equal(found.isnan(), every.isnan())
    assert rounded(torch.tensor([[1e6, -1e6]]), torch.tensor([7]), torch.float16).tolist() == [[float("inf"), -float("inf")]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_rounded_to_the_nearest(dtype):
    assert torch.equal(rounded(values()[None], torch.tensor([7]), dtype)[0], values().to(dtype))
