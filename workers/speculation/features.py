"""Features: what an EAGLE-3 head knows of the tokens before the one that it embeds, made of the target's hidden states.

The head's entry for a token needs the feature of the token before it. Within a step that is in the taps' buffer. For the first
token of a row it is kept from before: of each KV block, the feature of its last computed token. So a sequence goes on behind a
chunk, behind a step, and behind a prefix that another sequence has computed, and no hit is cut for it. Nothing here depends on
a number from the host, so all of it can be captured. kernels/speculation/features.py does the work.
"""

from collections.abc import Callable
from types import ModuleType

import torch

from quire.kernels.step.tables import SlotTables, StepBuffers


class Features:
    """taps: [tokens of a step, several H]. combine: taps [n, several H] -> features [n, D]."""

    def __init__(self, taps: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor], size: int):
        self._taps, self._combine = taps, combine
        self._kept = taps.new_zeros(0, size)  # [num_blocks, D]

    @property
    def num_bytes(self) -> int:
        """Sizes of the taps' buffer."""
        return self._taps.nbytes

    def renew(self, num_blocks: int) -> None:
        """The cache was allocated anew."""
        self._kept = self._kept.new_zeros(num_blocks, self._kept.shape[1])

    def before(
        self,
        kernels: ModuleType,
        tables: SlotTables,
        step: StepBuffers,
        inputs: StepBuffers,
        most_tokens: int,
        *sizes: int,
    ) -> torch.Tensor:
        """[T, D]: for each token of a pass with its inputs built, the feature of the token before it.

        The pass is behind a step of at most most_tokens tokens, whose features are kept then; its tokens are in the tables.
        sizes: the KV group, the tokens and rows of the pass, and the tokens of a KV block. kernels: the device's `features`.
        """
        of_step = self._combine(self._taps[: min(most_tokens, step.max_tokens)])
        found: torch.Tensor = kernels.read_features(tables, step, inputs, of_step, self._kept, *sizes)
        return found
