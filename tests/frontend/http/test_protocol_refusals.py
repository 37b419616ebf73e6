"""The HTTP/1.1 protocol, fed by bytes that it refuses: malformed, smuggled, too much, garbage."""

import asyncio
import json
import logging

import fake_http as http
import pytest
from fake_http import CHUNKED, GET, POST
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.http.server import connections_within
from quire.frontend.http.server_state import Limits

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


def test_a_fault_of_ours_while_a_head_is_read_is_not_the_clients(caplog):
    async def main():
        answers = await http.Wire(http.EchoApp()).talk(GET + b"GET /bug/at/head HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
        assert [a.status for a in answers] == [200, 500] and b"secret" not in answers[1].body

    asyncio.run(main())
    assert [record.message for record in caplog.records] == ["a request could not be read"]


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


@pytest.mark.parametrize(
    "rest",
    [b"Host: x\r\nHost: y\r\n\r\n", b"A: \x00\r\n\r\n", b"Content-Length: x\r\n\r\n", b"A: " + b"b" * 70_000 + b"\r\n\r\n"],
)
def test_the_answer_to_a_head_has_no_body_however_early_it_is_refused(rest):
    async def main():
        wire = http.Wire(http.EchoApp())
        (answer,) = await wire.talk(b"HEAD /a HTTP/1.1\r\n" + rest, "HEAD")
        assert answer.status in (400, 431) and answer.headers["connection"] == "close" and not answer.body

    asyncio.run(main())


@pytest.mark.parametrize("methods", [("HEAD", "POST"), ("POST", "HEAD")])
def test_a_refusals_form_follows_its_own_method_not_that_of_the_request_behind_it(methods):
    async def main():
        wire = http.Wire(http.EchoApp())
        first, second = (b"%s /a HTTP/1.1\r\nHost: x\r\n" % method.encode() for method in methods)
        (answer,) = await wire.talk(first + b"Host: y\r\n\r\n" + second + b"\r\n", methods[0])
        assert answer.status == 400 and bool(answer.body) == (methods[0] == "POST")

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


WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


def test_connections_without_a_request_make_room_for_new_ones_the_longest_rested_first():
    async def main():
        app = http.EchoApp()
        working = http.Wire(app, Limits(max_connections=4, num_reserved=1))
        await working.talk(WAIT)
        answered, half, idle = (http.Wire(app, server=working.server) for _ in range(3))
        half.feed(GET[:5])  # it keeps its place, however slowly the rest comes
        assert len(await answered.talk(GET)) == 1  # it rests from now on
        closed = list[http.Wire]()
        for first in (half, idle, answered):
            half.transport.closed or half.feed(b"x")
            new = http.Wire(app, server=working.server)
            await http.settle()
            closed.append(first)
            assert all(wire.transport.aborted for wire in closed) and not new.transport.closed
            assert len(working.server.connections) == 4
            assert len(await new.talk(GET)) == 1
        app.release.set()
        await http.settle()
        assert len(working.answers()) == 1 and not working.transport.closed

    asyncio.run(main())


def test_strangers_without_end_keep_nobody_from_being_served():
    async def main():
        app, limits = http.EchoApp(), Limits(max_connections=8, num_reserved=2)
        server = http.Wire(app, limits).server
        for n in range(100):
            http.Wire(app, server=server).feed(GET[: n % 20])
            if n % 10 == 0:
                assert len(await http.Wire(app, server=server).talk(GET)) == 1
            await http.settle(2)
            server.check()
            assert len(server.connections) <= 8

    asyncio.run(main())


def test_while_all_connections_have_requests_a_reserve_serves_open_routes():
    async def main():
        app, limits = http.EchoApp(), Limits(max_connections=2, num_reserved=2)
        first = http.Wire(app, limits)
        await first.talk(WAIT)
        await http.Wire(app, server=first.server).talk(WAIT)
        third, fourth = (http.Wire(app, server=first.server) for _ in range(2))
        (refused,) = await third.talk(GET)
        assert (refused.status, refused.headers["retry-after"], b"too_many_connections" in refused.body) == (503, "1", True)
        assert [answer.status for answer in await fourth.talk(LIVE)] == [200]
        assert [answer.status for answer in await third.talk(LIVE)] == [503, 200]
        await first.talk(WAIT)  # more on a connection that has a request is not more connections
        for wire in (third, fourth):
            wire.feed(LIVE.replace(b"/live", b"/wait-live"))
        app.release.set()
        await http.settle()
        assert [answer.status for answer in first.answers()] == [200, 200]
        assert [answer.status for answer in await third.talk(GET)][-1] == 200

    asyncio.run(main())


def test_beyond_the_reserve_a_connection_is_ended_at_once():
    async def main():
        app, limits = http.EchoApp(), Limits(max_connections=1, num_reserved=1)
        wires = [first := http.Wire(app, limits)]
        await first.talk(WAIT)
        wires.append(http.Wire(app, server=first.server))
        await wires[1].talk(LIVE.replace(b"/live", b"/wait-live"))
        wires.append(http.Wire(app, server=first.server))
        await http.settle()
        assert [wire.transport.aborted for wire in wires] == [False, False, True]

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


@pytest.mark.parametrize(
    ("max_fds", "open_fds", "most"), [(65536, 40, 8192), (4096, 40, 3480), (300, 30, 131), (64, 60, 1), (1 << 62, 40, 8192)]
)
def test_there_are_no_more_connections_than_descriptors_for_them(max_fds, open_fds, most, caplog):
    limits = connections_within(Limits(), max_fds, open_fds)
    assert limits.max_connections == most
    assert most in (1, 8192) or most + limits.num_reserved + open_fds < max_fds
