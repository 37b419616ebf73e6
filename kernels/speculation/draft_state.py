"""DraftState: what a drafter with a model of its own keeps on the device. Changed by the kernels of `draft_passes`.

A draft model has keys and values at the slots of the target's block table. `filled` says how many tokens of each KV block
they cover, whichever sequence has computed them, so a cached prefix needs no computing. `draft_len` says it for each slot's
sequence. Both count known tokens only. No triton here: CPU machines use these too.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch

from quire.ipc.step.sections import MAX_WINDOW

UNKNOWN = -1  # a draft_len: a new sequence is in the slot, and `filled` tells it


@dataclass
class DraftState:
    """S = max_num_seqs + 1. The tensors from first_position on describe one pass of R rows."""

    text: torch.Tensor  # int32 [num_blocks * block_size]: the token of each slot of the KV cache
    filled: torch.Tensor  # int32 [num_blocks]: tokens of each block, from its first one on, that are computed
    draft_len: torch.Tensor  # int32 [S]: tokens of each sequence that are computed, or UNKNOWN
    first_position: torch.Tensor  # int32 [R]: of each row's last known token
    num_drafts: torch.Tensor  # int32 [R]: how many the pass makes for each row
    ids: torch.Tensor  # int32 [R, MAX_WINDOW]: each row's last known token and its drafts
    slots: torch.Tensor  # int32 [R], of the next drafts; the dummy slot of rows that get none
    positions: torch.Tensor  # int32 [R], of the next drafts in their sequences
    places: torch.Tensor  # int32 [R], of the next drafts: the number of drafts before them
    first: torch.Tensor  # int32 [R]: the first token that each row lacks; this and the next two are the kernels' own
    wanted: torch.Tensor  # int32 [R]: how many it would compute
    reach: torch.Tensor  # int32 [R]: where its block table ends, or something else

    @classmethod
    def allocate(cls, num_blocks: int, block_size: int, max_num_seqs: int, device: torch.device | str) -> "DraftState":
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows, draft_len = max_num_seqs, ints(max_num_seqs + 1) + UNKNOWN
        of_rows = ints(rows), ints(rows), ints(rows, MAX_WINDOW), *(ints(rows) for _ in range(6))
        return cls(ints(num_blocks * block_size), ints(num_blocks), draft_len, *of_rows)

    def renew(self, num_blocks: int, block_size: int) -> None:
        """The cache was allocated anew, with so many blocks: nothing is computed."""
        self.text = self.text.new_zeros(num_blocks * block_size)
        self.filled = self.filled.new_zeros(num_blocks)
        self.draft_len.fill_(UNKNOWN)
        self.__dict__.pop("host", None)

    @cached_property
    def host(self) -> dict[str, np.ndarray]:
        """numpy views of tensors on the CPU, by name."""
        return {f.name: getattr(self, f.name).numpy() for f in fields(self)}
