"""Target: the HTTP reader (frontend/http/protocol/). Any bytes, in any pieces, on a connection over a fake wire.

The pieces in which bytes come must not matter, nothing may leave `data_received` as an exception, every answer is well
formed, and what the connection held is free in the end. The application echoes; tests/support/fake_http.py.
"""

import asyncio
import re
from collections.abc import Sequence

from fake_http import CHUNKED, GET, POST, EchoApp, Wire, parse_answers, settle
from fuzz.case import Case, Draw, Target, must
from fuzz.mutate import mutated_bytes

from quire.frontend.http.server_state import Limits

_DATE = re.compile(rb"\r\ndate: [^\r]*\r\n")
# Bounds of bytes in flight depend on how fast they come; these do not.
_LIMITS = Limits(max_body_bytes=3000, max_headers=20, max_target_bytes=500, max_pipelined=1 << 20)
_CUTS = 10  # into two pieces, besides byte by byte
_BYTE_BY_BYTE = 1500

SEEDS = [
    GET,
    POST,
    CHUNKED,
    POST + GET + CHUNKED,
    b"HEAD /a?b=%20c HTTP/1.0\r\nConnection: keep-alive\r\nHost: x\r\n\r\n" + GET,
    b"POST /small HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nExpect: 100-continue\r\n\r\n" + b"x" * 12,
    b"POST /b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab" + GET,
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\nOrigin: https://a\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    b"GET http://x/a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /error HTTP/1.1\r\nHost: [::1]:80\r\nX-Request-Timeout-S: 1\r\nX-Request-Id: a\r\n\r\n" + POST,
    b"GET /nothing HTTP/1.1\r\nHost: x\r\nCookie: a=b\r\nCookie: c=d\r\nConnection: close\r\n\r\n" + GET,
    b"POST /refuse HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
]
WORDS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b'5;a="b"\r\n',
    b"Content-Length: 3\r\n",
    b"Content-Length: +3\r\n",
    b"Content-Length: 18446744073709551616\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding:\tchunked\r\n",
    b" folded\r\n",
    b"Host: y\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b"Connection: close, keep-alive\r\n",
    b"HTTP/1.1",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\n",
    b"GET ",
    b"M-SEARCH ",
    b"\x00",
    b"\xff",
    b" ",
    b"\t",
    b":",
    b"%00",
    b"/../",
    b"x" * 600,
    b"A: b\r\n" * 30,
    b"\x16\x03\x01\x02\x00\x01",
    GET,
    POST,
    CHUNKED,
]


def seeds() -> Sequence[Case]:
    return [Case({"seed": i}, data) for i, data in enumerate(SEEDS)]


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    data = mutated_bytes(draw, case.payload, WORDS)
    if draw.random() < 0.2:
        data += draw.choice(others).payload
    return Case({"seed": draw.randrange(1 << 30)}, data[:8000])


def check(case: Case) -> None:
    asyncio.run(_check(case))


async def _check(case: Case) -> None:
    draw, data = Draw(case.head["seed"]), case.payload
    whole = await _answers([data])
    if b"HEAD" not in data:  # whose answers have no body
        must(all(answer.complete for answer in parse_answers(whole)), "an answer is not complete:", whole)
    cuts = [[data[:at], data[at:]] for at in (draw.randrange(len(data) + 1) for _ in range(_CUTS))]
    if len(data) <= _BYTE_BY_BYTE:
        cuts.append([data[i : i + 1] for i in range(len(data))])
    for pieces in cuts:
        sent = await _answers(pieces)
        must(
            _compared(sent) == _compared(whole), f"in pieces of {[len(piece) for piece in pieces[:9]]}:", sent, "whole:", whole
        )


def _compared(sent: bytes) -> bytes:
    """The answers, without the reason of a last one that refuses what is no request: it may have several."""
    answers, separator, last = sent.rpartition(b"HTTP/1.1 ")
    refused = (last[:1] == b"4" and b'"code":"bad_request"' in last) or b'"code":"target_too_long"' in last
    return answers + separator + (b"4" if refused else last)


async def _answers(pieces: Sequence[bytes]) -> bytes:
    """The answers to a client that sends these pieces and then goes; without their dates, and without the word to go on."""
    app = EchoApp()
    app.release.set()
    wire = Wire(app, _LIMITS)
    for piece in pieces:
        if wire.transport.closed:
            break
        wire.feed(piece)
        await settle(2)
    size = -1
    while size < (size := len(wire.transport.sent)):
        await settle(6)
    wire.server.check()
    wire.transport.close()
    await settle(4)
    must(wire.server.held_bytes == 0 and not wire.server.connections, "something of the connection is left")
    return _DATE.sub(b"\r\n", bytes(wire.transport.sent)).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


TARGET = Target("http_reader", seeds, mutate, check)
