"""Which recurrent states the rows of a step read and write: the CPU worker's path and the oracle of `step_states`."""

import torch

from quire.ipc.step.sections import HEADER, NO_STATE, PREFILL, SLOT
from quire.kernels.step.tables import KeptTables, SlotTables, StateRows, StepBuffers

_STEP, _NUM_NEW, _NEW = (HEADER.at[name] for name in ("step", "num_slot_updates", "slot_updates"))
_NUM_PREFILL, _PREFILL = HEADER.at["num_prefill_rows"], HEADER.at["prefill_rows"]
_STATE, _FIRST, _LAST = SLOT.at["state"], PREFILL.at["first_state"], PREFILL.at["last_state"]


def prepare_states(plan: torch.Tensor, tables: SlotTables, step: StepBuffers, rows: StateRows, num_rows: int) -> None:
    """See `step_states.prepare_states`."""
    words, out = plan.numpy(), step.host
    used, decode = int(out["num_rows"][0]), int(out["num_decode_rows"][0])
    own, first, last = (ids.numpy() for ids in (rows.own, rows.first, rows.last))
    own[:used] = first[:used] = tables.host["params"][out["row_slots"][:used], _STATE]
    own[used:num_rows] = first[used:num_rows] = last[:num_rows] = NO_STATE
    count, at = int(words[_NUM_PREFILL]), int(words[_PREFILL])
    if count:
        prefill = words[at : at + count * PREFILL.width].reshape(count, PREFILL.width)
        first[decode:used], last[decode:used] = prefill[:, _FIRST], prefill[:, _LAST]


def begin_kept(plan: torch.Tensor, kept: KeptTables) -> None:
    """See `step_states.begin_kept`."""
    words = plan.numpy()
    count, at = int(words[_NUM_NEW]), int(words[_NEW])
    slots = words[at : at + count * SLOT.width].reshape(count, SLOT.width)[:, SLOT.at["slot"]]
    kept.num_kept.numpy()[slots] = kept.keep_at.numpy()[slots] = 0
    kept.base[0] = (int(words[_STEP]) & 1) * kept.half


def end_kept(step: StepBuffers, kept: KeptTables, num_rows: int) -> None:
    """See `step_states.end_kept`."""
    out = step.host
    count = int(out["num_decode_rows"][0])
    slots = out["row_slots"][:count]
    kept.num_kept.numpy()[slots] = out["accepted"][:count]
    kept.first_kept.numpy()[slots] = out["query_start"][:count] + int(kept.base[0])
