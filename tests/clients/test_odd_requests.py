"""Requests that no client of a package sends: odd methods, paths of any bytes, headers of any kind, media types, broken bodies.

The real application over a fake wire, so that thousands cost seconds. Whatever is sent is answered in HTTP, as soon as it is
complete, with a status below 500 or the 501 of a route described as missing, and with OpenAI's JSON where it is refused.
"""

import asyncio
import json

import fake_client as http
import pytest
from fake_http import parse_answers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.protocol.cors import Cors

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "M-SEARCH", "PURGE", "LINK"]
PATHS = [route.path.replace("{model:path}", "tiny").replace("{", "").replace("}", "") for route in ROUTES.routes]
CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xe2\x9c\x93.jsonl"\r\n\r\n{}\r\n--b--\r\n'
BODIES = [b"", b"{}", b"[]", b"null", CHAT, CHAT[:-1], CHAT.decode().encode("utf-16"), b"\xef\xbb\xbf" + CHAT, FORM, b"a=b"]
TYPES = [
    "application/json", "APPLICATION/JSON", "application/json; charset=utf-8", "application/json;", ";", ", application/json",
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "multipart/form-data; boundary=b",
    'multipart/form-data; boundary="b', "multipart/form-data; boundary=", "application/octet-stream", "*/*", "json",
]  # fmt: skip
NAMES = [
    "Authorization", "Accept", "Accept-Encoding", "Content-Encoding", "Origin", "Access-Control-Request-Method", "Range",
    "Access-Control-Request-Headers", "X-Request-Id", "traceparent", "tracestate", "Cookie", "If-None-Match", "Upgrade",
    "X-Forwarded-For", "X-Forwarded-Proto", "Forwarded", "User-Agent", "Via", "TE", "Referer", "Idempotency-Key", "x-api-key",
]  # fmt: skip
VALUES = ["", "*", "null", "Bearer", "Bearer k", "Basic Og==", "gzip", "br, gzip;q=0", "POST", "bytes=0-", "h2c", "00-0-0-00"]

_PRINTABLE = st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f")  # as latin-1: obs-text, too
_values = st.one_of(st.sampled_from(VALUES), st.text(_PRINTABLE, max_size=40))
_headers = st.lists(st.tuples(st.sampled_from(NAMES), _values), max_size=5)
_tails = st.one_of(
    st.sampled_from(
        ["", "/", "//", "/..", "/%2e%2e/", "%00", "%", "%zz", ";x=1", "?", "?a=%ff&a&=&limit=-1", "?after=%F0%9F", "#x"]
    ),
    st.text(st.characters(min_codepoint=0x21, exclude_categories=["Cs", "Cc"]), max_size=12),
)


def request(method: str, target: bytes, media_type: str | None, headers: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [("Host", "x"), *headers, ("Content-Length", str(len(body)))]
    lines += [("Content-Type", media_type)] if media_type is not None else []
    head = "".join(f"{name}: {value}\r\n" for name, value in lines).encode("latin-1")
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method.encode(), target, head, body)


async def ask(api: http.Api, method: str, data: bytes) -> None:
    wire = api.wire()
    wire.feed(data)
    async with asyncio.timeout(20):
        while not wire.transport.sent or wire.connection._task is not None:
            await (asyncio.wait([wire.connection._task]) if wire.connection._task else asyncio.sleep(0))
    answers = parse_answers(wire.transport.sent, method)
    assert len(answers) == 1 and answers[0].complete, (data, wire.transport.sent)
    answer = answers[0]
    assert answer.status < 500 or answer.status == 501, (data, answer)
    if answer.status >= 400 and method != "HEAD":
        error = json.loads(answer.body)["error"]
        error = {"message": error, "type": "Ollama's"} if isinstance(error, str) else error
        assert error["message"] and error["type"] and "Traceback" not in error["message"], (data, answer)


def check_odd_requests(count: int) -> None:
    @settings(max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(METHODS),
        st.sampled_from(PATHS),
        _tails,
        st.booleans(),
        st.one_of(st.none(), st.sampled_from(TYPES), _values),
        _headers,
        st.one_of(st.sampled_from(BODIES), st.binary(max_size=60)),
    )
    def cases(method, path, tail, raw, media_type, headers, body):
        target = (path + tail).encode() if raw else (path + tail).encode("ascii", "xmlcharrefreplace")

        async def main():
            keys = ["k"] if headers and headers[0][0] == "Authorization" else []
            await ask(
                http.Api(api_keys=keys, cors=Cors(["https://a"])), method, request(method, target, media_type, headers, body)
            )

        asyncio.run(main())

    cases()


def test_a_few_odd_requests() -> None:
    check_odd_requests(80)


@pytest.mark.slow
def test_many_odd_requests() -> None:
    check_odd_requests(2000)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/models/ü✓", "/v1/files/ü", "/✓", "/health"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_paths_of_every_kind(method: str, path: str) -> None:
    asyncio.run(ask(http.Api(), method, request(method, path.encode(), "application/json", [], CHAT)))
