"""Sharing a step's drafts out among its decode rows: the CPU worker's path and the oracle of `windows`."""

import numpy as np
import torch

from quire.ipc.step.sections import FIRST_PLACE, HEADER, MAX_WINDOW, SLOT, UNUSED
from quire.kernels.step.survival import BINS, BOUNDS
from quire.kernels.step.tables import SlotTables, StepBuffers

_NUM_DECODE, _MICRO_BATCH = HEADER.at["num_decode_rows"], HEADER.at["micro_batch"]
_WINDOW, _DRAFT_TOKENS = HEADER.at["window"], HEADER.at["draft_tokens"]
_NUM_ROW_WINDOWS, _ROW_WINDOWS = HEADER.at["num_row_windows"], HEADER.at["row_windows"]
_STEP, _MASK_WINDOW = HEADER.at["step"], HEADER.at["mask_window"]
_MAX_WINDOW, _FINAL_LEN = SLOT.at["max_window"], SLOT.at["final_len"]


def share_drafts(plan: torch.Tensor, tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
    """Write how many tokens each decode row has, step.row_tokens [num_rows]: its last one and its drafts; 0 for other rows.

    The plan's changes must be in the tables. A row has at most its valid drafts, the window of the plan, of its slot and of the
    plan's row_windows, and none whose sample would lie behind its last token. Together they have at most the plan's
    draft_tokens: those of the greatest survival (survival.py), by bins, and rows in order where a bin does not fit whole.
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
    if narrow := int(words[_NUM_ROW_WINDOWS]):
        at = int(words[_ROW_WINDOWS])
        possible = np.minimum(possible, words[at : at + narrow] - 1)
    survives = np.where(np.arange(MAX_WINDOW) < possible[:, None], state["survival"][slots, MAX_WINDOW:], -1)
    counts = (survives[:, :, None] >= BOUNDS).sum(1)  # drafts of each row down to each bound
    level = int(np.searchsorted(counts.sum(0), most, "right")) - 1
    drafts, more = counts[:, level], counts[:, min(level + 1, BINS - 1)] - counts[:, level]
    drafts = drafts + np.clip(most - drafts.sum() - (more.cumsum() - more), 0, more)
    out[:count], out[count:num_rows] = 1 + drafts, 0


def write_drafts(plan: torch.Tensor, step: StepBuffers, words: torch.Tensor, num_padded: int) -> None:
    """Write the draft before each sample, if the plan's mask_window is above 1; the step's inputs must be built.

    words: int64 [depth, at least num_padded], of which the record is row step % depth, and each word is step << 32 | id: of a
    sample at a row's first place FIRST_PLACE, and UNUSED from the last sample on up to the plan's number of them.
    """
    header, out = plan.numpy(), step.host
    if header[_MASK_WINDOW] <= 1:
        return
    number, count = int(header[_STEP]), int(out["num_samples"][0])
    num_words = min(int(out["num_rows"][0]) + int(header[_DRAFT_TOKENS]), num_padded)
    values = np.full(num_words, UNUSED, np.int32)
    values[:count] = np.where(out["sample_places"][:count] > 0, out["input_ids"][:count], FIRST_PLACE)
    words.numpy()[number % len(words), :num_words] = np.int64(number << 32) | values.view(np.uint32)
