"""Fetching by HTTP, from servers of the test's own on a loopback address that a domain's network allows."""

import asyncio
import contextlib

import pytest

from quire.frontend.media.errors import MediaBusy, MediaError
from quire.frontend.media.fetch import Fetcher
from quire.frontend.media.options import Domain, parse_domain

BODY = b"\x89PNG" + bytes(range(256)) * 40
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


@contextlib.asynccontextmanager
async def server(answer, pause_s=0.0):
    """Answers every request with these bytes; yields the port and the requests."""
    requests = []

    async def handle(reader, writer):
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        await asyncio.sleep(pause_s)
        writer.write(answer)
        with contextlib.suppress(OSError):
            await writer.drain()
        await closed(writer)

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1], requests
    finally:
        listening.close()
        await ended()


async def closed(writer):
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def ended():
    """Until the servers' connections are closed."""
    mine = asyncio.current_task()
    await asyncio.wait([task for task in asyncio.all_tasks() if task is not mine] or [asyncio.ensure_future(asyncio.sleep(0))])


def fetched(answer, most=1 << 20, path="/a.png?b=c", network="127.0.0.0/8", pause_s=0.0, **more):
    async def run():
        async with server(answer, pause_s) as (port, requests):
            fetcher = Fetcher((Domain("localhost", port, network),), **more)
            try:
                return await fetcher.fetch(f"http://localhost:{port}{path}", "me", most), requests
            except MediaError as error:
                error.requests = requests
                raise

    return asyncio.run(run())


def test_a_file_comes_whole():
    data, (request,) = fetched(PLAIN)
    assert data == BODY
    assert request.startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: localhost:")
    assert b"identity" in request and b"cookie" not in request.lower() and b"authorization" not in request.lower()


@pytest.mark.parametrize(
    "head",
    [b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), b"connection: close\r\n\r\n" + BODY],
)
def test_chunks_and_the_end_of_the_connection(head):
    assert fetched(b"HTTP/1.1 200 OK\r\n" + head)[0] == BODY


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n",
     b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\nabc",
     b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nabc", b"nonsense\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000],
)  # fmt: skip
def test_other_answers_are_errors(answer):
    with pytest.raises(MediaError) as caught:
        fetched(answer)
    assert "127.0.0.1" not in str(caught.value) and len(caught.value.requests) == 1


def test_bytes_are_counted_as_they_come():
    assert fetched(PLAIN, most=len(BODY))[0] == BODY
    for answer in (PLAIN, b"HTTP/1.1 200 OK\r\n\r\n" + BODY):
        with pytest.raises(MediaError, match="more than the"):
            fetched(answer, most=len(BODY) - 1)


def test_no_connection_to_a_private_address():
    with pytest.raises(MediaError, match="not a public one") as caught:
        fetched(PLAIN, network=None)
    assert caught.value.requests == []


@pytest.mark.parametrize(
    "found", [["93.184.216.34", "127.0.0.1"], ["169.254.169.254"], ["::ffff:127.0.0.1"], ["100.64.0.1"], []]
)
def test_no_connection_if_one_address_of_a_name_is_not_public(found):
    assert _with_names([found]) == (1, [])


def test_a_name_is_resolved_once_and_that_address_is_dialed():
    """A name that has another address the next time gains nothing by it."""
    asked, dialed = _with_names([["93.184.216.34"], ["127.0.0.1"]])
    assert asked == 1 and dialed == ["93.184.216.34"]


def _with_names(answers):
    """How often a name was resolved while a file was fetched, and the addresses that were dialed; none of them answers."""

    async def run():
        loop, asked, dialed = asyncio.get_running_loop(), [], []

        async def getaddrinfo(host, port, **_):
            asked.append(host)
            return [(2, 1, 6, "", (address, port)) for address in answers[len(asked) - 1]]

        async def create_connection(protocol, host, port, **_):
            dialed.append(host)
            raise ConnectionRefusedError

        loop.getaddrinfo, loop.create_connection = getaddrinfo, create_connection
        with pytest.raises(MediaError):
            await Fetcher((Domain("images.example.org"),)).fetch("http://images.example.org/a.png", "me", 1 << 20)
        return len(asked), dialed

    return asyncio.run(run())


def test_it_does_not_wait_for_long():
    with pytest.raises(MediaError, match="within"):
        fetched(PLAIN, pause_s=5.0, seconds=0.05)


def test_a_key_has_a_few_at_once():
    async def run():
        async with server(PLAIN, 0.1) as (port, requests):
            fetcher = Fetcher((Domain("localhost", port, "127.0.0.0/8"),), most_of_key=1)
            url = f"http://localhost:{port}/"
            first = asyncio.create_task(fetcher.fetch(url, "me", 1 << 20))
            await asyncio.sleep(0)
            with pytest.raises(MediaBusy):
                await fetcher.fetch(url, "me", 1 << 20)
            assert await fetcher.fetch(url, "other", 1 << 20) == await first == BODY
            assert await fetcher.fetch(url, "me", 1 << 20) == BODY
            assert len(requests) == 3

    asyncio.run(run())


def test_tls_is_no_plain_http():
    with pytest.raises(MediaError, match="could not be fetched"):
        asyncio.run(_plain_for_tls())


async def _plain_for_tls():
    async def handle(reader, writer):
        writer.write(PLAIN)
        await closed(writer)

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        await Fetcher((parse_domain(f"localhost:{port}=127.0.0.0/8"),)).fetch(f"https://localhost:{port}/", "", 1 << 20)
    finally:
        listening.close()
        await ended()
