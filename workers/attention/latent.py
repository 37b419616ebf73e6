"""Latent attention (MLA, arXiv:2405.04434): its input, and how a CPU computes it.

A token has one entry in the cache for all heads: 64 rotated elements, then a normed latent of 512, from which weights make
every head's key and value. Instead, the weights for keys are multiplied into the queries, and those for values into the output:
so attention has many queries and one key of 576, of which the last 512 elements are the value.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.kernels.elementwise import norm_cpu


class Latents(NamedTuple):
    """Takes qkv's place. N: elements of a head's query that are not rotated; R: those that are; L: elements of the latent."""

    q: torch.Tensor  # [T, Hq, N + R], as projected
    q_latent: torch.Tensor  # [Hq, T, L]: the N elements, times the weight that makes keys of latents
    kv: torch.Tensor  # [T, L + R], as projected: the latent before its norm, and the elements to rotate
    norm_weight: torch.Tensor  # [L]
    eps: float
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None  # applied to the normed latent; not on a GPU

    def queries_and_keys(self) -> torch.Tensor:
        """Queries and keys before rotation: [T, (Hq + 1) (R + L)], for devices without a latent kernel."""
        latent = self.q_latent.shape[2]
        c = norm_cpu.rms_norm(self.kv[:, :latent], self.norm_weight, self.eps)
        c = c if self.rounded is None else self.rounded(c)
        rotary = self.kv.shape[1] - latent
        q = torch.cat((self.q[:, :, -rotary:], self.q_latent.transpose(0, 1)), -1)
        k = torch.cat((self.kv[:, latent:], c), -1)
        return torch.cat((q.flatten(1), k), -1)
