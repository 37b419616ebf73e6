"""The HTTP/1.1 protocol, fed by bytes: order, deadlines, back-pressure, streams, shutdown."""

import asyncio
import logging

import fake_http as http
import pytest
from fake_http import CHUNKED, GET, POST
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.http.server_state import Limits

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
