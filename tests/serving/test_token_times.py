"""`quire serve` counts the time between tokens in the engine: of answers in one piece as of streams, of each choice."""

from serving import SMALL, Served, until

MAX_TOKENS = 8
OPTIONS = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
GAPS = MAX_TOKENS - 1


def test_the_time_between_tokens_is_counted_however_an_answer_is_sent() -> None:
    with Served(*SMALL) as served:
        served.ready()
        body = {"prompt": ["one", "two"], "n": 2, **OPTIONS}
        assert served.ask("POST", "/v1/completions", body).status == 200
        until(lambda: served.metric("inter_token_latency_seconds_count") == 4 * GAPS)
        stream = served.stream("three", **OPTIONS)
        stream.text()
        stream.close()
        until(lambda: served.metric("inter_token_latency_seconds_count") == 5 * GAPS)
        assert 0 < served.metric("inter_token_latency_seconds_sum") < 60
        assert served.end() == 0
