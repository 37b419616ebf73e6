"""Room for tokens: what is left after a prompt, and how far a request may go in it."""

import pytest

from quire.ipc.limits import longest_prompt, output_limit, output_room


@pytest.mark.parametrize("max_model_len", [2, 3, 4096])
def test_the_longest_prompt_is_the_last_with_room(max_model_len):
    longest = longest_prompt(max_model_len)
    assert output_room(longest, max_model_len) == 1
    assert output_room(longest + 1, max_model_len) < 1
    assert output_room(1, max_model_len) == max_model_len - 1


def test_a_single_token_may_follow_a_prompt_that_fills_the_context():
    assert output_room(64, 64, 1) == 1 and output_room(65, 64, 1) < 1
    assert output_room(64, 64, 2) == output_room(64, 64, None) == 0 and output_room(60, 64, 1) == 4


@pytest.mark.parametrize(("max_tokens", "room", "limit"), [(None, 5, 5), (4, 5, 4), (5, 5, 5), (2**40, 5, 5)])
def test_a_request_goes_as_far_as_it_asks_and_there_is_room(max_tokens, room, limit):
    assert output_limit(max_tokens, room) == limit
