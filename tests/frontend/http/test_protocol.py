"""The HTTP/1.1 protocol, fed by bytes: order, limits, deadlines, back-pressure, refusals, shutdown."""

import asyncio
import json
import logging

import fake_http as http
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.http.server_state import Limits

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nTrailer: 1\r\n\r\n"
)
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"


def test_keep_alive_answers_one_after_the_other():
    async def main():
        wire = http.Wire(http.EchoApp())
        for data in (GET, POST, CHUNKED):
            await wire.talk(data)
        assert [a.body for a in wire.answers()] == [b"GET /a ", b"POST /b hello", b"POST /c abcde"]
        assert all(a.status == 200 and "date" in a.headers and "connection" not in a.headers for a in wire.answers())
        assert not wire.transport.closed

    asyncio.run(main())


def test_split_at_every_byte_gives_the_same():
    async def main():
        data = GET + POST + CHUNKED
        for cut in range(1, len(data)):
            wire = http.Wire(http.EchoApp())
            wire.feed(data[:cut])
            answers = await wire.talk(data[cut:])
            assert [a.body for a in answers] == [b"GET /a ", b"POST /b hello", b"POST /c abcde"], cut
        wire = http.Wire(http.EchoApp())
        for i in range(len(data)):
            wire.feed(data[i : i + 1])
        await http.settle()
        assert [a.body for a in wire.answers()] == [b"GET /a ", b"POST /b hello", b"POST /c abcde"]

    asyncio.run(main())


def test_pipelined_requests_are_answered_in_order():
    async def main():
        app = http.EchoApp()
        wire = http.Wire(app)
        await wire.talk(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + GET + POST)
        assert app.handled == [b"/wait"] and not wire.answers()
        app.release.set()
        await http.settle()
        assert [a.body for a in wire.answers()] == [b"GET /wait ", b"GET /a ", b"POST /b hello"]

    asyncio.run(main())


def test_too_many_pipelined_requests_end_the_connection():
    async def main():
        app = http.EchoApp()
        wire = http.Wire(app, Limits(max_pipelined=4))
        await wire.talk(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
        await wire.talk(GET * 10)
        app.release.set()
        await http.settle()
        answers = wire.answers()
        assert [a.status for a in answers] == [200] * 5 + [400] and answers[-1].headers["connection"] == "close"

    asyncio.run(main())


def test_reading_pauses_when_the_client_sends_far_ahead():
    async def main():
        app = http.EchoApp()
        wire = http.Wire(app)
        await wire.talk(b"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
        wire.feed(b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        wire.feed(b"x" * 60_000)
        assert not wire.transport.reading_paused
        wire.feed(b"x" * 10_000)
        assert wire.transport.reading_paused
        await wire.pass_time(1000)  # the client waits for us: no deadline
        assert not wire.answers()
        app.release.set()
        await http.settle()
        assert not wire.transport.reading_paused
        answers = await wire.talk(b"x" * 30_000)
        assert [len(a.body) for a in answers] == [13, 8 + 100_000]

    asyncio.run(main())


def test_http_1_0_closes_unless_asked_to_stay():
    async def main():
        wire = http.Wire(http.EchoApp())
        (answer,) = await wire.talk(b"GET /a HTTP/1.0\r\n\r\n")
        assert answer.headers["connection"] == "close" and wire.transport.closed
        wire = http.Wire(http.EchoApp())
        (answer,) = await wire.talk(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert answer.headers["connection"] == "keep-alive" and not wire.transport.closed

    asyncio.run(main())


def test_connection_close_is_honoured_and_the_rest_ignored():
    async def main():
        wire = http.Wire(http.EchoApp())
        (answer,) = await wire.talk(b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + GET)
        assert answer.headers["connection"] == "close" and wire.transport.closed

    asyncio.run(main())


def test_head_has_the_length_and_no_body():
    async def main():
        wire = http.Wire(http.EchoApp())
        (answer, _) = await wire.talk(b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n" + GET, "HEAD GET")
        assert answer.status == 200 and answer.headers["content-length"] == "8" and answer.body == b""

    asyncio.run(main())


def test_expect_continue_is_answered_before_the_body_and_in_turn():
    async def main():
        app = http.EchoApp()
        wire = http.Wire(app)
        head = b"POST /b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
        (first,) = await wire.talk(head)
        assert first.status == 100
        assert [a.status for a in await wire.talk(b"hello")] == [100, 200]
        wire = http.Wire(app)
        assert not await wire.talk(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + head)
        app.release.set()
        await http.settle()
        assert [a.status for a in wire.answers()] == [200, 100]
        assert [a.status for a in await wire.talk(b"hello")] == [200, 100, 200]
        wire = http.Wire(app)  # a refusal at the head needs no body and gets none
        (answer,) = await wire.talk(head.replace(b"/b", b"/refuse"))
        assert answer.status == 401 and wire.transport.eof_sent

    asyncio.run(main())


def test_upgrade_is_declined_by_an_ordinary_answer():
    async def main():
        wire = http.Wire(http.EchoApp())
        offer = b" HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        data = b"POST /b" + offer + b"Content-Length: 2\r\n\r\nhi" + b"GET /a" + offer + b"\r\n"
        data += b"POST /c" + offer + b"Transfer-Encoding: chunked\r\n\r\n2\r\nho\r\n0\r\n\r\n" + GET
        for step in (len(data), 7, 1):
            wire = http.Wire(http.EchoApp())
            for i in range(0, len(data), step):
                wire.feed(data[i : i + step])
            await http.settle()
            assert [a.body for a in wire.answers()] == [b"POST /b hi", b"GET /a ", b"POST /c ho", b"GET /a "]
        wire = http.Wire(http.EchoApp())
        (answer,) = await wire.talk(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
        assert answer.status == 405 and wire.transport.eof_sent

    asyncio.run(main())


BAD = {
    "both lengths": b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, swapped": b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "length list": b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc",
    "signed length": b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
    "length overflow": b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "coding not last": b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "two codings": b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before colon": b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "folded header": b"GET /a HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "bare line feeds": b"GET /a HTTP/1.1\nHost: x\n\n",
    "bare carriage return": b"GET /a HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
    "nul in header": b"GET /a HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "two keys": b"GET /a HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "lower-case method": b"get /a HTTP/1.1\r\nHost: x\r\n\r\n",
    "unknown method": b"FOO /a HTTP/1.1\r\nHost: x\r\n\r\n",
    "space in target": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "bad chunk size": b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "chunk size overflow": b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "chunk too long": b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
    "chunked in 1.0": b"POST /c HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_malformed_and_smuggling_shapes_get_400_and_the_connection_ends(name):
    async def main():
        app = http.EchoApp()
        wire = http.Wire(app)
        answers = await wire.talk(GET + BAD[name] + GET)
        assert [a.status for a in answers] == [200, 400]
        assert answers[1].headers["connection"] == "close" and wire.transport.eof_sent
        assert json.loads(answers[1].body)["error"]["code"] == "bad_request"
        assert app.handled == [b"/a"]
        wire.connection.eof_received()
        wire.connection.connection_lost(None)
        assert not wire.server.connections

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: x\r\nExpect: cake\r\nContent-Length: 1\r\n\r\na", 417),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 40000 + b"\r\n\r\n", 431),
        (b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n", 413),
        (b"POST /small HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nb\r\nabcdefghijk\r\n0\r\n\r\n", 413),
        (b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 401),
        (b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\n", 500),
        (b"GET /error HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n", 500),
    ],
)
@pytest.mark.parametrize("step", [1 << 20, 1000, 1])
def test_refusals_by_status_however_the_bytes_arrive(data, status, step):
    async def main():
        wire = http.Wire(http.EchoApp())
        for i in range(0, len(data), step):
            wire.feed(data[i : i + step])
        await http.settle()
        (answer,) = wire.answers()
        assert answer.status == status
        assert answer.headers["content-type"] == "application/json" and b"secret" not in answer.body
        assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}

    logging.getLogger("quire.http").disabled = True
    asyncio.run(main())
    logging.getLogger("quire.http").disabled = False


def test_a_header_that_never_ends_is_cut_off():
    async def main():
        wire = http.Wire(http.EchoApp())
        wire.feed(b"GET / HTTP/1.1\r\nHost: x\r\nA: ")
        for _ in range(100):
            wire.feed(b"b" * 1000)
        await http.settle()
        assert [a.status for a in wire.answers()] == [431]

    asyncio.run(main())


def test_a_refusal_without_a_body_keeps_the_connection():
    async def main():
        wire = http.Wire(http.EchoApp())
        answers = await wire.talk(b"GET /refuse HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
        assert [a.status for a in answers] == [401, 200] and not wire.transport.closed

    asyncio.run(main())


def test_bodies_in_memory_are_bounded_over_all_connections():
    async def main():
        app = http.EchoApp()
        first = http.Wire(app, Limits(max_held_bytes=1000))
        second = http.Wire(app, server=first.server)
        head = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
        first.feed(head + b"x" * 800)
        (answer,) = await second.talk(head + b"x" * 800)
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        (answer,) = await first.talk(b"x" * 100)
        assert answer.status == 200 and first.server.held_bytes == 0
        third = http.Wire(app, server=first.server)
        third.feed(head + b"x" * 800)
        third.connection.connection_lost(None)
        assert first.server.held_bytes == 0

    asyncio.run(main())


def test_unwanted_bytes_are_thrown_away_for_a_moment_only():
    async def main():
        wire = http.Wire(http.EchoApp())
        await wire.talk(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
        for _ in range(200):
            if wire.transport.reading_paused:
                break
            wire.feed(bytes(1 << 20))
        assert wire.transport.reading_paused
        await wire.pass_time(6)
        assert wire.transport.closed and not wire.server.connections

    asyncio.run(main())


def test_time_outs():
    async def main():
        idle = http.Wire(http.EchoApp())
        await idle.pass_time(74)
        assert not idle.transport.closed
        await idle.pass_time(2)
        assert idle.transport.closed and not idle.transport.sent

        slow_head = http.Wire(http.EchoApp())
        slow_head.feed(GET[:-3])
        await slow_head.pass_time(15)
        slow_head.feed(GET[-3:-2])  # a byte now and then does not help
        await slow_head.pass_time(6)
        assert [a.status for a in slow_head.answers()] == [408] and slow_head.transport.eof_sent

        slow_body = http.Wire(http.EchoApp())
        slow_body.feed(POST[:-1])
        await slow_body.pass_time(121)
        assert [a.status for a in slow_body.answers()] == [408]

        kept = http.Wire(http.EchoApp())
        await kept.talk(GET)
        await kept.pass_time(74)
        await kept.talk(GET)
        await kept.pass_time(74)
        assert not kept.transport.closed
        await kept.pass_time(2)
        assert kept.transport.closed and len(kept.answers()) == 2

        waiting = http.Wire(http.EchoApp())
        await waiting.talk(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await waiting.pass_time(10_000)  # our time, not the client's
        assert not waiting.transport.closed

    asyncio.run(main())


def test_streams_are_chunked_in_1_1_and_end_with_the_connection_in_1_0():
    async def main():
        app = http.EchoApp()
        app.release.set()
        wire = http.Wire(app)
        (answer,) = await wire.talk(STREAM)
        assert answer.chunks == [b"one", b"two"] and answer.complete and not wire.transport.closed
        assert answer.headers["content-type"].startswith("text/event-stream")
        wire = http.Wire(app)
        (answer,) = await wire.talk(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert answer.body == b"onetwo" and answer.headers["connection"] == "close" and wire.transport.closed

    asyncio.run(main())


def test_a_stream_that_breaks_ends_without_its_last_chunk():
    async def main():
        app = http.EchoApp()
        app.release.set()
        wire = http.Wire(app)
        (answer,) = await wire.talk(STREAM.replace(b"/stream", b"/break"))
        assert answer.body == b"onetwo" and not answer.complete and wire.transport.closed

    logging.getLogger("quire.http").disabled = True
    asyncio.run(main())
    logging.getLogger("quire.http").disabled = False


@pytest.mark.parametrize("how", ["eof", "reset"])
def test_a_gone_client_cancels_the_handler_within_a_turn(how):
    async def main():
        app = http.EchoApp()
        wire = http.Wire(app)
        await wire.talk(STREAM + GET)
        wire.connection.eof_received() if how == "eof" else wire.connection.connection_lost(ConnectionResetError())
        await asyncio.sleep(0)
        assert app.cancelled == [b"/stream"]
        await http.settle()
        assert app.handled == [b"/stream"]

    asyncio.run(main())


def test_a_client_that_does_not_read_stops_the_writer_and_is_dropped_in_time():
    async def main():
        app = http.EchoApp()
        wire = http.Wire(app)
        wire.connection.pause_writing()
        await wire.talk(GET + GET)
        assert not app.handled  # nothing starts while the last answer is not taken
        wire.connection.resume_writing()
        await http.settle()
        assert len(wire.answers()) == 2
        wire.connection.pause_writing()
        drained = asyncio.ensure_future(wire.connection.drain())
        await http.settle()
        assert not drained.done()
        wire.connection.resume_writing()
        await drained
        wire.connection.pause_writing()
        await wire.pass_time(121)
        assert wire.transport.aborted and not wire.server.connections

    asyncio.run(main())


def test_the_connection_limit_is_told():
    async def main():
        app = http.EchoApp()
        first = http.Wire(app, Limits(max_connections=1))
        second = http.Wire(app, server=first.server)
        await http.settle()
        (answer,) = second.answers()
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        third = http.Wire(app, server=first.server)
        assert third.transport.aborted

    asyncio.run(main())


def test_shut_down_lets_answers_end_and_closes_the_idle():
    async def main():
        app = http.EchoApp()
        busy = http.Wire(app)
        idle = http.Wire(app, server=busy.server)
        waiting = http.Wire(app, server=busy.server)
        await busy.talk(STREAM)
        await waiting.talk(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        stop = asyncio.create_task(busy.server.shut_down(grace_s=30.0))
        await http.settle()
        assert idle.transport.closed and not busy.transport.closed and not stop.done()
        late = http.Wire(app, server=busy.server)
        await http.settle()
        assert late.answers()[0].status == 503
        late.connection.connection_lost(None)
        app.release.set()
        await stop
        assert busy.answers()[0].complete and busy.transport.closed
        assert waiting.answers()[0].headers["connection"] == "close" and waiting.transport.closed

    asyncio.run(main())


def test_shut_down_cancels_what_outlives_the_grace_period():
    async def main():
        app = http.EchoApp()
        streaming = http.Wire(app)
        waiting = http.Wire(app, server=streaming.server)
        await streaming.talk(STREAM)
        await waiting.talk(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await streaming.server.shut_down(grace_s=0.01)
        assert sorted(app.cancelled) == [b"/stream", b"/wait"]
        assert not streaming.answers()[0].complete
        (answer,) = waiting.answers()
        assert answer.status == 503 and answer.headers["connection"] == "close"

    asyncio.run(main())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([GET, POST, CHUNKED]), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_split_gives_the_same_answers(requests, random):
    async def main():
        data, wire = b"".join(requests), http.Wire(http.EchoApp())
        while data:
            n = random.randint(1, 40)
            wire.feed(data[:n])
            data = data[n:]
            if random.random() < 0.3:
                await http.settle(3)
        await http.settle(100)
        expected = {GET: b"GET /a ", POST: b"POST /b hello", CHUNKED: b"POST /c abcde"}
        assert [a.body for a in wire.answers()] == [expected[r] for r in requests]

    asyncio.run(main())


_PIECES = [GET, POST, CHUNKED, b"\r\n", b"\x00", b"GET ", b" HTTP/1.1\r\n", b"Content-Length: 5\r\n", b"0\r\n\r\n", b"\xff" * 9]
_PIECES += [b"Transfer-Encoding: chunked\r\n", b"A: " + b"b" * 40_000, *BAD.values()]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(_PIECES), st.binary(max_size=30)), max_size=10), st.integers(1, 50))
def test_garbage_never_raises_and_is_answered_in_http(pieces, step):
    async def main():
        wire = http.Wire(http.EchoApp())
        data = b"".join(pieces)
        for i in range(0, min(len(data), 2000), step):
            if not wire.transport.closed:
                wire.feed(data[i : i + step])
        await http.settle(50)
        answers = wire.answers()
        assert all(a.complete and a.status in (100, 200, 400, 408, 413, 414, 417, 431, 501, 505) for a in answers)
        await wire.pass_time(1000)
        await wire.pass_time(1000)
        assert wire.transport.closed and not wire.server.connections and wire.server.held_bytes == 0

    asyncio.run(main())


def test_a_response_out_of_order_is_a_bug_of_the_handler():
    async def main():
        wire = http.Wire(http.EchoApp())
        response = Response(Request(), wire.connection)
        with pytest.raises(RuntimeError, match="waiting"):
            response.write(b"x")
        response.send(204)
        with pytest.raises(RuntimeError, match="done"):
            response.send(200)
        with pytest.raises(RuntimeError, match="done"):
            response.start()

    asyncio.run(main())
