"""Latent attention (MLA, arXiv:2405.04434): what a layer gives it, and the CPU's way.

A token's entry in the cache is one for all heads: 64 rotated elements, then a normed latent of 512, of which every head's key
and value are products. Weights that make keys of latents are multiplied into the queries instead, and those that make values
into what comes out: so attention is that of many queries with one key of 576, whose last 512 elements are the value.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.kernels.elementwise import norm_cpu


class Latents(NamedTuple):
    """What takes qkv's place. N: elements of a head's query that are not rotated, R: that are, L: of the latent."""

    q: torch.Tensor  # [T, Hq, N + R], as projected
    q_latent: torch.Tensor  # [Hq, T, L]: the N elements, times the weight that makes keys of latents
    kv: torch.Tensor  # [T, L + R], as projected: the latent, which is to be normed, and what is to be rotated
    norm_weight: torch.Tensor  # [L]
    eps: float
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = (
        None  # what becomes of the normed latent; a GPU's kernels do not ask
    )

    def queries_and_keys(self) -> torch.Tensor:
        """Queries and keys, not rotated yet: [T, (Hq + 1) (R + L)], for devices without a kernel."""
        latent = self.q_latent.shape[2]
        c = norm_cpu.rms_norm(self.kv[:, :latent], self.norm_weight, self.eps)
        c = c if self.rounded is None else self.rounded(c)
        rotary = self.kv.shape[1] - latent
        q = torch.cat((self.q[:, :, -rotary:], self.q_latent.transpose(0, 1)), -1)
        k = torch.cat((self.kv[:, latent:], c), -1)
        return torch.cat((q.flatten(1), k), -1)
