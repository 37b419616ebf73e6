"""Which recurrent states the rows of a step read and write: the CPU worker's path and the oracle of `step_states`."""

import torch

from quire.ipc.step.sections import HEADER, NO_STATE, PREFILL, SLOT
from quire.kernels.step.tables import SlotTables, StateRows, StepBuffers

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
