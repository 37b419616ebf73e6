"""Acceptance by chance, for benchmarks: drafts count with given probabilities, whatever the model says. torch, on any device.

A decode row draws a number u from its seed and its position, with a purpose of its own. Its first i + 1 drafts are accepted if
u < rates[i], so that this has the probability rates[i]. Samples are changed so that `accept` finds just that: an accepted draft
is taken for the sampled token, and the token that is to end the window is no draft.
"""

import torch

from quire.kernels.step.tables import SlotTables, StepBuffers

PURPOSE_ACCEPT = 2  # beside those of the sampler's noise
_WORD = 0xFFFFFFFF


def pretend(step: StepBuffers, tables: SlotTables, sampled: torch.Tensor, rates: torch.Tensor, vocab: int) -> None:
    """Change sampled, int32 [padded samples], of a step with windows. rates: float32 [n], falling."""
    count = len(sampled)
    places, slots = step.sample_places[:count], step.sample_slots[:count].long()
    seeds = tables.column("seed").index_select(0, slots).long() & _WORD
    bits = _noise_bits(seeds[:, 0], seeds[:, 1], (step.sample_positions[:count] - places).long() & _WORD)
    accepted = (bits.float().mul(2**-32).unsqueeze(1) < rates).sum(1)  # of each sample's row
    draft = step.input_ids[:count].roll(-1)  # the one behind each sample's token, if it has one:
    has_draft = torch.zeros_like(places, dtype=torch.bool)
    has_draft[:-1] = places[1:] > 0
    other = torch.where(sampled == draft, (sampled + 1) % vocab, sampled)
    changed = torch.where(places < accepted, draft, torch.where(places == accepted, other, sampled))
    sampled.copy_(torch.where(has_draft, changed, sampled))


def _noise_bits(seed_lo: torch.Tensor, seed_hi: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """As `sampler_cpu.noise_bits` for index 0, in int64."""
    first = _mix(_mix(_mix(seed_lo + PURPOSE_ACCEPT + 0x9E3779B9) ^ seed_hi) + position)
    second = _mix(_mix(_mix(seed_hi + PURPOSE_ACCEPT + 0x7F4A7C15) ^ position) + seed_lo)
    return _mix(_mix(first) + second)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """As in `sampler_cpu`. A product's low 32 bits are right though it may overflow."""
    x = x & _WORD
    x = x ^ (x >> 17)
    x = (x * 0xED5AD4BB) & _WORD
    x = x ^ (x >> 11)
    x = (x * 0xAC4C1B51) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x31848BAB) & _WORD
    return x ^ (x >> 14)
