"""The features that a head's pass reads of the step before it, in torch: the CPU worker's path and the oracle of `features`.

A head's entry for a token needs the feature of the token before it. Within a step that is among the step's features. For the
first token of a row it is kept from before: of each KV block, the feature of its last computed token.
"""

import torch

from quire.kernels.step.tables import SlotTables, StepBuffers


def read_features(
    tables: SlotTables,
    step: StepBuffers,
    inputs: StepBuffers,
    of_step: torch.Tensor,
    kept: torch.Tensor,
    group: int,
    num_tokens: int,
    num_rows: int,
    block_size: int,
) -> torch.Tensor:
    """[num_tokens, D]: for each token of a pass with its inputs built, the feature of the token before it.

    of_step: [n, D], those of the step before the pass, of which the tokens are in the tables. kept: [num_blocks, D], by KV
    block; it then gets the step's features of tokens that end a block, or that are the last computed ones of their row.
    A sequence's first token has no feature, which is zeros here, and its entry is hidden.
    """
    row = torch.searchsorted(inputs.query_start[1 : num_rows + 1], _numbers(num_tokens), right=True)
    row = row.clamp_(max=num_rows - 1)
    begin = step.query_start[row]
    first = step.seq_lens[row] - (step.query_start[row + 1] - begin)  # position of the row's first token in the step
    before = inputs.positions[:num_tokens] - 1
    at = (begin + before - first).clamp_(0, len(of_step) - 1).long()
    block = tables.block_table[group, inputs.row_slots[row].long(), before.clamp(min=0).long() // block_size].long()
    found = torch.where((before >= first).unsqueeze(1), of_step[at], kept[block])
    found.masked_fill_((before < 0).unsqueeze(1), 0.0)
    _keep(tables, step, of_step, kept, group, num_rows, block_size)
    return found


def _keep(
    tables: SlotTables,
    step: StepBuffers,
    of_step: torch.Tensor,
    kept: torch.Tensor,
    group: int,
    num_rows: int,
    block_size: int,
) -> None:
    i = _numbers(len(of_step))
    ends = step.query_start[1 : num_rows + 1]
    ends = ends.masked_fill(_numbers(num_rows) >= step.num_rows, 1 << 30)
    row = torch.searchsorted(ends, i, right=True).clamp_(max=num_rows - 1)
    begin, end = step.query_start[row], step.query_start[row + 1]
    first = step.seq_lens[row] - (end - begin)
    last = begin + tables.seq_len[step.row_slots[row].long()] - 1 - first  # behind it are drafts that were rejected
    slot = step.slot_mapping[group, : len(i)]
    is_kept = (row < step.num_rows) & (i <= last) & (i < end) & (slot >= 0)
    is_kept &= (i == last) | (slot % block_size == block_size - 1)
    kept.index_copy_(0, slot // block_size * is_kept, of_step)  # the null block, 0, takes the others


def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)
