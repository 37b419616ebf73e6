"""Rotary position embeddings: the cos|sin table, one row per position, by which attention rotates queries and keys.

Computed once at start, in float32 on the CPU, with transformers' order of operations, so that both agree to the last bit.
Types: default (RoFormer, arXiv:2104.09864), linear (position interpolation, arXiv:2306.15595), llama3 (Llama 3.1's
interpolation by wavelength), proportional (Gemma 4's: it rotates some of the pairs, with the frequencies of a whole head), yarn
(arXiv:2309.00071, section 3.4), longrope (arXiv:2402.13753: factors for short or long sequences, chosen by the length served).
`dynamic` depends on the length of the sequence being run, and models/fields.py refuses it. Only attention sees the tables.
"""

import math

import torch

from quire.workers.models.config import AttentionSpec, RopeConfig


def cos_sin_table(spec: AttentionSpec, max_positions: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [max_positions, R] for R rotated elements: cosines of R/2 pairs, then sines, times the attention factor.

    A pair (x1, x2) = (x[i], x[i + R/2]) becomes (x1 cos - x2 sin, x2 cos + x1 sin). R is 0 if nothing is rotated.
    """
    if spec.rope is None:
        return torch.zeros(max_positions, 0, device=device)
    inverse_frequency = inverse_frequencies(spec.rope, spec.rope.rotary_dim or spec.head_dim, max_positions)
    angles = torch.arange(max_positions).float()[:, None] * inverse_frequency
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(spec.rope)).to(device)


def query_scales(spec: AttentionSpec, max_positions: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """float32 [max_positions]: factors of queries by position; None for no factors."""
    if spec.temperature is None:
        return None
    t = spec.temperature
    periods = torch.floor((torch.arange(max_positions) + t.first) / t.original_max_position_embeddings)
    return (1 + t.beta * torch.log(1 + periods)).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int = 0) -> torch.Tensor:
    """float32 [head_dim/2]: radians per position of each pair of dimensions, scaled by rope.type.

    head_dim: the number of rotated elements. max_positions, the length served, chooses longrope's factors.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers = rope.theta**exponents
    if rope.type == "proportional":
        rotated = torch.arange(head_dim // 2) < int(rope.proportion * head_dim // 2)
        return torch.where(rotated, 1.0 / powers / rope.factor, 0.0)
    if rope.type == "default":
        return 1.0 / powers
    if rope.type == "linear":
        return 1.0 / powers / rope.factor
    if rope.type == "llama3":
        return _llama3(1.0 / powers, rope)
    if rope.type == "yarn":
        return _yarn(powers, rope, head_dim)
    if rope.type == "longrope":
        is_long = max_positions > rope.original_max_position_embeddings
        return 1.0 / (torch.tensor(rope.long_factor if is_long else rope.short_factor) * powers)
    raise AssertionError(rope.type)


def attention_factor(rope: RopeConfig) -> float:
    """The factor of cos and sin: yarn's and longrope's temperature, 1.0 for the other types."""
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        return (
            math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings)) if rope.factor > 1 else 1.0
        )
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Keep short wavelengths, interpolate long ones, and blend the two for those in between."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    long = wavelengths > original / low
    short = wavelengths < original / high
    scaled = torch.where(long, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~short & ~long, blended, scaled)


def _yarn(powers: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """A ramp over the dimensions, from unchanged frequencies (many rotations in the context) to interpolated ones."""

    def dimension(rotations: float) -> float:  # the dimension that makes `rotations` rotations in the original context
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference does, against division by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    stay = 1 - ramp
    return (1.0 / (rope.factor * powers)) * (1 - stay) + (1.0 / powers) * stay
