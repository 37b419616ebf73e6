"""Rounding of recurrent states to the type in which they are kept.

A state in float16 is rounded by chance: of the two values beside an element the nearer one is the likelier, so that the mean is
the element itself. A state that changes by less than half a step for each token would stand still otherwise. Chance is a hash
of the token's position in its sequence and of the element's index, so it is the same in any batch, in CUDA graphs, and wherever
a prompt was found in the prefix cache.
"""

import torch

WEYL, FIRST, SECOND = 0x9E3779B1, 0x7FEB352D, 0x846CA68B  # of the hash: 2³² / φ, and the factors of "lowbias32"
NOISE_BITS = 13  # float32 has as many digits more than float16
LARGEST = 65504.0  # of float16


def noise(positions: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Multiples of 2⁻¹³ in [0, 1), float32 [R, num_elements], for positions [R]."""
    low = (1 << 32) - 1
    x = (torch.arange(num_elements) + positions.long()[:, None] * WEYL) & low
    x = ((x ^ (x >> 16)) * FIRST) & low
    x = ((x ^ (x >> 15)) * SECOND) & low
    return ((x ^ (x >> 16)) >> (32 - NOISE_BITS)).float() / (1 << NOISE_BITS)


def rounded(states: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """states, float32 [R, ...], as dtype: float16 by chance, other types to the nearest.

    positions: int32 [R], of the last token in each state.
    """
    if dtype != torch.float16:
        return states.to(dtype)
    # Exponents of float16's steps: that of the element less 10, at least -24. Subnormal values of float16 have equal steps.
    exponent = ((states.view(torch.int32) >> 23) & 255).clamp(113, 142)
    steps = states * ((264 - exponent) << 23).view(torch.float32)
    below = (steps + noise(positions, states[0].numel()).view(states.shape)).floor() * ((exponent - 10) << 23).view(
        torch.float32
    )
    return torch.where(states.abs() < LARGEST, below, states).to(dtype)
