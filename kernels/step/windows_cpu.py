"""Sharing a step's drafts out among its decode rows: the CPU worker's path and the oracle of `windows`."""

import numpy as np
import torch

from quire.ipc.step.sections import HEADER, MAX_WINDOW, SLOT
from quire.kernels.step.tables import SlotTables, StepBuffers

_NUM_DECODE, _MICRO_BATCH = HEADER.at["num_decode_rows"], HEADER.at["micro_batch"]
_WINDOW, _DRAFT_TOKENS = HEADER.at["window"], HEADER.at["draft_tokens"]
_MAX_WINDOW, _FINAL_LEN = SLOT.at["max_window"], SLOT.at["final_len"]


def share_drafts(plan: torch.Tensor, tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
    """Write how many tokens each decode row has, step.row_tokens [num_rows]: its last one and its drafts; 0 for other rows.

    The plan's changes must be in the tables. A row has at most its valid drafts, the plan's window and its own, and none whose
    sample would lie behind its last token. Together they have at most the plan's draft_tokens: every row's first draft comes
    before any second one, and rows in order where not all get one more.
    """
    words, state, out = plan.numpy(), tables.host, step.host["row_tokens"]
    count, most = int(words[_NUM_DECODE]), int(words[_DRAFT_TOKENS])
    slots = state["decode_slots"][words[_MICRO_BATCH], :count]
    params = state["params"][slots]
    bounds = (
        state["num_drafts"][slots],
        np.minimum(params[:, _MAX_WINDOW], words[_WINDOW]) - 1,
        params[:, _FINAL_LEN] - 2 - state["seq_len"][slots],
    )
    possible = np.maximum(np.minimum.reduce(bounds), 0)
    totals = np.minimum(possible[:, None], np.arange(MAX_WINDOW)).sum(0)  # of all rows, if each has at most so many
    level = int(np.searchsorted(totals, most, "right")) - 1
    drafts = np.minimum(possible, level)
    drafts[np.flatnonzero(possible > level)[: most - totals[level]]] += 1
    out[:count], out[count:num_rows] = 1 + drafts, 0
