"""Features: what an EAGLE-3 head knows of the tokens before the one that it embeds, made of the target's hidden states.

The head's entry for a token needs the feature of the token before it. Within a step that is in the taps' buffer. For the first
token of a row it is kept from before: of each KV block, the feature of its last computed token. So a sequence goes on behind a
chunk, behind a step, and behind a prefix that another sequence has computed, and no hit is cut for it. torch, on any device:
shapes depend on padded sizes alone and no number comes from the host, so all of it can be captured.
"""

from collections.abc import Callable

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
        tables: SlotTables,
        step: StepBuffers,
        inputs: StepBuffers,
        group: int,
        num_tokens: int,
        num_rows: int,
        most_tokens: int,
        block_size: int,
    ) -> torch.Tensor:
        """[num_tokens, D]: for each token of a pass, whose inputs are built, the feature of the token before it.

        The pass is behind a step of at most most_tokens tokens, whose features are kept then; its tokens are in the tables.
        """
        of_step = self._combine(self._taps[: min(most_tokens, step.max_tokens)])
        row = torch.searchsorted(inputs.query_start[1 : num_rows + 1], _numbers(num_tokens, inputs), right=True)
        row = row.clamp_(max=num_rows - 1)
        begin = step.query_start[row]
        first = step.seq_lens[row] - (step.query_start[row + 1] - begin)  # position of the row's first token in the step
        before = inputs.positions[:num_tokens] - 1
        at = (begin + before - first).clamp_(0, len(of_step) - 1).long()
        block = tables.block_table[group, inputs.row_slots[row].long(), before.clamp(min=0).long() // block_size].long()
        found = torch.where((before >= first).unsqueeze(1), of_step[at], self._kept[block])
        found.masked_fill_((before < 0).unsqueeze(1), 0.0)  # a sequence's first token has none, and its entry is hidden
        self._keep(tables, step, group, of_step, num_rows, block_size)
        return found

    def _keep(
        self, tables: SlotTables, step: StepBuffers, group: int, of_step: torch.Tensor, num_rows: int, block_size: int
    ) -> None:
        """Keep those of the step's tokens that are the last ones of a block, or the last computed ones of their row."""
        i = _numbers(len(of_step), step)
        ends = step.query_start[1 : num_rows + 1]
        ends = ends.masked_fill(_numbers(num_rows, step) >= step.num_rows, 1 << 30)
        row = torch.searchsorted(ends, i, right=True).clamp_(max=num_rows - 1)
        begin, end = step.query_start[row], step.query_start[row + 1]
        first = step.seq_lens[row] - (end - begin)
        last = begin + tables.seq_len[step.row_slots[row].long()] - 1 - first  # behind it are drafts that were rejected
        slot = step.slot_mapping[group, : len(i)]
        is_kept = (row < step.num_rows) & (i <= last) & (i < end) & (slot >= 0)
        is_kept &= (i == last) | (slot % block_size == block_size - 1)
        self._kept.index_copy_(0, slot // block_size * is_kept, of_step)  # the null block, 0, takes the others


def _numbers(count: int, step: StepBuffers) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=step.input_ids.device)
