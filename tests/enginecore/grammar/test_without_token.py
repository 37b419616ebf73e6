"""Requests whose parameters leave no token: they end with an error that names them, and their neighbours do not notice."""

import pytest

from quire.enginecore.grammar.without_token import nothing_left
from quire.ipc.messages.frontend import RequestError
from quire.ipc.sampling import SamplingParams


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **fields})


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_p": 0.5, "n": 2}], ids=str)
def test_bans_that_leave_nothing_end_their_request_alone(engine, sampling):
    neighbours = [("Hello", params()), ("Count", params(bad_words_token_ids=[[7]], temperature=1.0, seed=2))]
    alone = [engine.run(*neighbour)[0].ids for neighbour in neighbours]
    ends = sorted(engine.eos)
    two = "allowed_token_ids and bad_words leave"
    for fields, words in (
        ({"allowed_token_ids": [300], "bad_words_token_ids": [[300]]}, two),
        ({"allowed_token_ids": [300], "bad_words_token_ids": [[300, 300]]}, two),  # the second token
        (
            {"allowed_token_ids": [300, *ends], "bad_words_token_ids": [[300]], "min_tokens": 3},
            "allowed_token_ids, bad_words and min_tokens leave",
        ),
    ):
        failed, *others = engine.run_all([("Say it", params(**fields, **sampling)), *neighbours])
        assert isinstance(failed, RequestError) and failed.code == "invalid" and words in failed.message, failed
        assert "no token" in failed.message and [other[0].ids for other in others] == alone
    engine.until(lambda: engine.core.scheduler.is_idle)


def test_a_bias_bans_nothing(engine):
    [output] = engine.run("Say it", params(allowed_token_ids=[300], logit_bias={300: -100.0}))
    assert output.ids == [300] * 8


def test_what_leaves_nothing_is_named():
    assert nothing_left(SamplingParams(min_tokens=1)) == "min_tokens leaves no token that the output may go on with"
    assert nothing_left(SamplingParams(allowed_token_ids=[1], bad_words=["a"], min_tokens=2)).startswith(
        "allowed_token_ids, bad_words and min_tokens leave no token"
    )
    assert nothing_left(SamplingParams(logit_bias={5: -100.0})).startswith("the request leaves")
