"""How prompts are spread over the steps of others' tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.enginecore.scheduling.prefill_budget import SMOOTH_TOKENS, smooth_tokens, tokens_beside

BILLION = 10**9


def test_the_smaller_the_model_the_more_of_a_prompt_a_step_takes():
    assert smooth_tokens(16 * BILLION, "cuda") == smooth_tokens(140 * BILLION, "cuda") == SMOOTH_TOKENS
    assert smooth_tokens(BILLION, "cuda") == 16 * SMOOTH_TOKENS and smooth_tokens(BILLION, "cpu") == SMOOTH_TOKENS


@pytest.mark.parametrize(
    ("num_decode", "num_prompts", "num_tokens", "most", "expected"),
    [
        (12, 1, 200, 8000, 200),
        (12, 1, 268, 8000, 268),  # a tenth more than 244
        (12, 1, 270, 8000, 135),  # two equal steps
        (12, 2, 700, 8000, 350),  # half of much
        (12, 2, 700, 100, 100),
        (12, 13, 700, 8000, 8000),
        (200, 1, 130, 8000, 130),  # half of a step at least
        (1000, 1, 300, 8000, 150),
        (12, 0, 0, 8000, 244),  # nothing that could start: what may start after all has room
    ],
)
def test_how_much_goes_into_a_step_beside_decode_rows(num_decode, num_prompts, num_tokens, most, expected):
    assert tokens_beside(num_decode, num_prompts, num_tokens, most, 256) == expected


@given(*(st.integers(low, high) for low, high in ((1, 2000), (0, 2000), (0, 10**6), (1, 10**5), (0, 10**5))))
def test_a_step_takes_something_and_no_more_than_it_has_room_for(num_decode, num_prompts, num_tokens, most, smooth):
    assert 1 <= tokens_beside(num_decode, num_prompts, num_tokens, most, smooth) <= most
