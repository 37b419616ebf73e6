"""The largest step, by which a worker measures what a step takes."""

import pytest

from quire.workers.memory import largest_plan


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "max_model_len", "lengths"),
    [
        (512, 16, 4096, [512]),
        (8192, 256, 4097, [4096, 4096]),
        (8192, 256, 3001, [3000, 3000, 2192]),
        (8192, 2, 3001, [3000, 3000]),
        (5, 16, 2, [1] * 5),
        (5, 4, 1, [1] * 4),
    ],
)
def test_the_largest_step_has_all_its_tokens_in_as_few_rows_as_can_be(max_tokens, max_rows, max_model_len, lengths):
    plan = largest_plan(max_tokens, max_rows, max_model_len)
    assert plan.prefill_rows[:, 2].tolist() == lengths
    assert plan.num_tokens == len(plan.prefill_tokens) == sum(lengths)
    assert plan.max_seq_len == max(lengths) and len(set(plan.slot_updates[:, 0].tolist())) == len(lengths)
