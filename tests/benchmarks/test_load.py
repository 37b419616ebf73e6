"""The load generator: its arithmetic, what it reads of a stream however it is split, and a whole load against its sink."""

import asyncio
import json

import numpy as np
import pytest
from load_generator import Load, Options, body_of, run_load
from load_stats import RequestResult, percentiles, summarise
from servers import engine_command
from sse_client import Answer, Body, Connection, Events, Target
from sse_sink import TEXT, Sink, chunk, last_events

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Transport:
    """What a connection needs of one."""

    def __init__(self):
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close


def answer_to(*pieces, end=False):
    """What a connection makes of a response that arrives in these pieces."""

    async def run():
        connection, transport = Connection(), Transport()
        connection.connection_made(transport)
        answer, done = connection.send(b"GET")
        for piece in pieces:
            connection.data_received(piece)
        if end:
            connection.connection_lost(None)
        return answer, done.done(), connection

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------------------------ arithmetic
def test_percentiles_are_between_order_statistics():
    found = percentiles(range(1, 102))
    assert found == {"mean": 51.0, "p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 101.0}
    assert percentiles([1.0, 2.0])["p90"] == 1.9
    assert all(np.isnan(v) for v in percentiles([]).values())


def test_a_summary_counts_what_succeeded_from_first_send_to_last_end():
    good = RequestResult(due=10.0, sent=10.1, first=10.5, last=12.5, prompt_tokens=100, output_tokens=5, error="")
    other = RequestResult(due=11.0, sent=11.0, first=11.25, last=14.1, prompt_tokens=50, output_tokens=1, error="")
    failed = RequestResult(due=10.0, sent=10.1, first=0.0, last=0.0, prompt_tokens=9, output_tokens=9, error="503: full")
    found = summarise([good, other, failed], np.asarray([0.5, 0.5, 0.5, 0.5]))
    assert (found["requests"], found["failures"], found["errors"]) == (3, 1, ["503: full"])
    assert found["duration_s"] == 4.0 and found["output_tok_s"] == 1.5 and found["total_tok_s"] == 39.0
    assert found["ttft_ms"]["max"] == 500.0 and found["e2e_ms"]["max"] == 3100.0 and found["send_lag_ms"]["max"] == 100.0
    assert found["tpot_ms"]["mean"] == 500.0  # of the one that had more than one token
    assert found["itl_ms"]["p99"] == 500.0


def test_a_load_is_the_same_each_time_and_within_its_bounds():
    load = Load.parse("poisson:50:400", 100, 20, 0.5)
    lengths, due = load.lengths(3), load.due(3)
    assert lengths == load.lengths(3) and due == load.due(3) and load.lengths(4) != lengths
    assert {50, 150} <= {n for n, _ in lengths} <= set(range(50, 151)) and {m for _, m in lengths} == set(range(10, 31))
    assert due == sorted(due) and 6.5 < due[-1] < 9.5  # 8 s at 50 requests/s
    assert Load.parse("single:1:12:7:9", 100, 20, 0.5).lengths(0) == [(7, 9)] * 12
    assert Load.parse("closed:256:2000", 1, 1, 0.0).due(0) == []


@pytest.mark.parametrize("text", ["closed:2", "open:1:2", "closed:0:5", "poisson:x:3", "closed:1:2:3"])
def test_a_malformed_load_is_refused(text):
    with pytest.raises(ValueError):
        Load.parse(text, 1, 1, 0.0)


def test_prompts_are_token_ids_below_the_vocabulary_or_words_for_chat():
    options = Options("http://h", "m", vocab_size=50)
    body = json.loads(body_of(options, 1, 30, 7))
    assert len(body["prompt"]) == 30 and set(body["prompt"]) <= set(range(10, 50)) and body["max_tokens"] == 7
    assert body["prompt"] != json.loads(body_of(options, 2, 30, 7))["prompt"]
    chat = json.loads(body_of(Options("http://h", "m", endpoint="chat"), 1, 30, 7))
    assert len(chat["messages"][0]["content"].split()) == 30 and "prompt" not in chat


def test_a_target_is_read_from_any_spelling_of_the_url():
    for url in ("http://h:81", "h:81", "http://h:81/v1/", "http://h:81/v1"):
        assert Target.of(url, "/v1/completions")[:3] == ("h", 81, "/v1/completions")
    with pytest.raises(ValueError, match="http"):
        Target.of("ftp://h", "/x")
    assert b"Authorization: Bearer k\r\n" in Target.of("http://h", "/x", "k").request(b"{}")


def test_engines_get_the_same_settings():
    settings = {"port": 9, "load_format": "dummy", "max_model_len": 128, "memory": 0.5, "site": "/s"}
    quire, vllm = (engine_command(e, "M", **settings) for e in ("quire", "vllm"))
    assert quire.arguments[3:] == vllm.arguments[3:] and vllm.env["PYTHONPATH"] == "/s" and "PYTHONPATH" not in quire.env
    with pytest.raises(ValueError):
        engine_command("other", "M", **settings)


# --------------------------------------------------------------------------------------------------------------- reading
RESPONSE = HEAD + TEXT * 3 + last_events(3)


def test_a_stream_may_be_split_anywhere():
    for cut in range(len(RESPONSE)):
        answer, done, connection = answer_to(RESPONSE[:cut], RESPONSE[cut : cut + 7], RESPONSE[cut + 7 :])
        assert done and answer.error == "" and answer.status == 200
        assert len(answer.gaps) == 2 and answer.output_tokens == 3 and answer.finished == 1
        assert 0 < answer.sent <= answer.first <= answer.last <= answer.end
        assert connection.usable


def test_a_stream_may_come_byte_by_byte():
    answer, done, _ = answer_to(*(RESPONSE[i : i + 1] for i in range(len(RESPONSE))))
    assert done and answer.error == "" and len(answer.gaps) == 2


def test_events_may_have_any_line_end_and_any_other_line():
    raw = b': ping\r\n\r\ndata: {"a":1}\r\n\r\nevent: x\r\ndata: 2\r\n\r\n'
    for cut in range(len(raw)):
        events = Events()
        assert events.feed(raw[:cut]) + events.feed(raw[cut:]) == [b'{"a":1}', b"2"]


def test_a_chunk_without_text_is_no_output_but_an_end_is_one():
    head = HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"error":null}\n\n'
    answer, done, _ = answer_to(head + role)
    assert not done and answer.first == 0.0
    answer, done, _ = answer_to(head + role + end, end=True)
    assert done and answer.error == "" and answer.first == answer.end > 0 and answer.gaps == []


def test_token_ids_are_output_without_text_and_cached_tokens_are_read():
    head = HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
    events = (b'{"choices":[{"text":"","token_ids":%s,"finish_reason":null}]}' % ids for ids in (b"[5]", b"[6,7]", b"null"))
    usage = b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}'
    lines = [b"data: " + event + b"\n\n" for event in (*events, usage, b"[DONE]")]
    answer, done, _ = answer_to(head + lines[0], *lines[1:], end=True)
    assert done and (answer.token_ids, answer.cached_tokens, len(answer.gaps)) == ([5, 6, 7], 8, 1)


def test_an_answer_may_be_whole_sized_refused_or_cut_off():
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    answer, done, connection = answer_to(whole[:-1], whole[-1:])
    assert done and (answer.body, answer.error) == (b"{}", "") and not connection.usable
    answer, done, _ = answer_to(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull")
    assert done and answer.error == "503: full"
    answer, done, _ = answer_to(HEAD + TEXT, end=True)
    assert done and answer.error == "the connection was lost"
    answer, done, _ = answer_to(HEAD + chunk(b'data: {"error":{"message":"x"}}\n\n') + b"0\r\n\r\n")
    assert done and "message" in answer.error


def test_a_chunked_body_may_have_extensions_and_trailers():
    raw = b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: 1\r\n\r\n"
    for cut in range(len(raw)):
        body = Body(chunked=True, length=None)
        assert body.feed(raw[:cut]) + body.feed(raw[cut:]) == b"abcde" and body.done


def test_an_aborted_request_says_so_and_its_connection_is_gone():
    async def run():
        connection, transport = Connection(), Transport()
        connection.connection_made(transport)
        answer, done = connection.send(b"GET")
        answer.on_chunk = connection.abort
        connection.data_received(HEAD + TEXT * 2)
        return await done, transport.closed

    answer, closed = asyncio.run(run())
    assert isinstance(answer, Answer) and answer.error == "aborted" and closed


# --------------------------------------------------------------------------------------------------------------- the sink
@pytest.mark.parametrize("kind", ["closed:4:12", "poisson:40:12"])
def test_a_load_on_the_sink_streams_at_the_sinks_rate(kind):
    sink = Sink(interval_s=0.01, processes=1)
    try:
        found = run_load(Load.parse(kind, 8, 20, 0.0), Options(sink.url, "sink", processes=2))
    finally:
        about = sink.stop()
    assert found["failures"] == 0 and found["output_tokens"] == 240 and found["generator"]["processes"] == 2
    assert about["step_ms"] > 9.0
    assert found["itl_ms"]["mean"] == pytest.approx(about["step_ms"], rel=0.3)


def test_several_urls_share_a_load():
    sinks = [Sink(interval_s=0.01, processes=1) for _ in range(3)]
    try:
        options = Options("http://127.0.0.1:9", "sink", processes=1, urls=tuple(sink.url for sink in sinks))
        found = run_load(Load.parse("closed:6:12", 8, 20, 0.0), options)
    finally:
        steps = [sink.stop()["step_ms"] for sink in sinks]
    assert found["failures"] == 0 and found["requests"] == 12 and found["generator"]["processes"] == 3
    assert all(step > 9.0 for step in steps)  # each has streamed


def test_a_server_that_is_not_there_is_a_failure_of_each_request():
    found = run_load(Load.parse("closed:1:2", 8, 20, 0.0), Options("http://127.0.0.1:9", "m", processes=1))
    assert found["failures"] == 2 and "cannot connect" in found["errors"][0]
