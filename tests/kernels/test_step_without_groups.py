"""The inputs of a step of a model without KV groups: by the CPU path, and by the kernels."""

import pytest
import torch
from step_plans import MAX_SEQS, SIZES, make_plan, make_state

from quire.kernels.step import step_inputs_cpu


def without_groups(prepare_step):
    """The inputs of a step of a model that has no KV group, by name."""
    state, _, step = make_state(groups=0)
    plan = make_plan(1, [{"slot": 1}, {"slot": 2}], (), (), [(2, 0, [5, 6, 7], 1), (1, 4, [8], 1)])
    prepare_step(plan, state, step, 6, 3, **SIZES)
    return {name: value.tolist() for name, value in vars(step).items() if isinstance(value, torch.Tensor)}


def test_a_model_without_groups_has_all_inputs_but_a_slot_mapping():
    step = without_groups(step_inputs_cpu.prepare_step)
    assert (step["input_ids"][:6], step["positions"][:6]) == ([5, 6, 7, 8, 0, 0], [0, 1, 2, 4, 0, 0])
    assert (step["row_slots"][:3], step["seq_lens"][:3], step["slot_mapping"]) == ([2, 1, MAX_SEQS], [3, 5, 0], [])


@pytest.mark.interpret
def test_a_model_without_groups_has_the_same_inputs_in_the_interpreter():
    from quire.kernels.step import step_inputs

    assert without_groups(step_inputs.prepare_step) == without_groups(step_inputs_cpu.prepare_step)
