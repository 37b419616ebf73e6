"""Listening: TLS with certificates that change, unix sockets, and what is in their way."""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat

import pytest
import uvloop
from certificates import authority, certified
from fake_http import GET, EchoApp, parse_answers

from quire.frontend.http.listener import FrontendError, Listener, UnixPath, bind, bind_unix
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.tls import TlsFiles, make_context

CLOSING = GET.replace(b"Host: x", b"Host: x\r\nConnection: close")


def client_context(tmp_path, own: tuple[str, str] | None = None) -> ssl.SSLContext:
    path = tmp_path / "authority.pem"
    path.write_bytes(authority())
    context = ssl.create_default_context(cafile=str(path))
    if own is not None:
        context.load_cert_chain(*own)
    return context


async def ask(address, tls: ssl.SSLContext | None = None) -> tuple[bytes, bytes]:
    """(body, the server's certificate or b"") of one answer."""
    if isinstance(address, str):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        options = {"ssl": tls, "server_hostname": "localhost"} if tls else {}
        reader, writer = await asyncio.open_connection(*address, **options)
    tls_object = writer.get_extra_info("ssl_object")
    certificate = tls_object.getpeercert(binary_form=True) if tls_object else b""
    try:
        writer.write(CLOSING)
        (answer,) = parse_answers(await reader.read())
        return answer.body, certificate
    finally:
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


def served(main, sock: socket.socket, tls: TlsFiles | None = None):
    """Run main(listener, server) with EchoApp behind a listener."""

    async def run():
        server = ServerState(EchoApp())
        listener = Listener(sock, server, tls)
        await listener.open()
        try:
            await main(listener, server)
        finally:
            listener.close()
            await server.shut_down(1.0)

    uvloop.run(run())


def test_tls_is_spoken_and_new_connections_get_the_certificate_as_it_is_now(tmp_path, caplog):
    certificate, key = certified().write(tmp_path, "server")
    (sock,) = bind("127.0.0.1", 0)
    address = sock.getsockname()

    async def main(listener, server):
        context = client_context(tmp_path)
        body, first = await ask(address, context)
        assert body == b"GET /a "
        assert not await listener.refresh()
        (tmp_path / "server.pem").write_bytes(b"no certificate")
        assert not await listener.refresh() and "the former one stays" in caplog.text
        assert await ask(address, context) == (body, first)
        certified().write(tmp_path, "server")
        reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname="localhost")
        assert await listener.refresh()
        body, second = await ask(address, context)
        assert body == b"GET /a " and second != first
        writer.write(CLOSING)  # a connection of before goes on
        (answer,) = parse_answers(await reader.read())
        assert answer.body == b"GET /a "
        writer.close()

    served(main, sock, TlsFiles(certfile=certificate, keyfile=key, refresh=True))


def test_a_certificate_that_cannot_be_taken_up_now_is_at_the_next_look(tmp_path, caplog, monkeypatch):
    certificate, key = certified().write(tmp_path, "server")
    (sock,) = bind("127.0.0.1", 0)
    address = sock.getsockname()

    async def main(listener, server):
        context = client_context(tmp_path)
        _, first = await ask(address, context)
        certified().write(tmp_path, "server")
        listen = listener._listen

        async def without_descriptors():
            monkeypatch.setattr(listener, "_listen", listen)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(listener, "_listen", without_descriptors)
        assert not await listener.refresh() and "Too many open files" in caplog.text
        assert (await ask(address, context))[1] == first
        assert await listener.refresh() and (await ask(address, context))[1] != first

    served(main, sock, TlsFiles(certfile=certificate, keyfile=key, refresh=True))


def test_who_speaks_no_tls_is_turned_away_without_a_traceback(tmp_path, caplog):
    certificate, key = certified().write(tmp_path, "server")
    (sock,) = bind("127.0.0.1", 0)
    address = sock.getsockname()

    async def main(listener, server):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(GET)
        with contextlib.suppress(ConnectionError):
            assert not parse_answers(b"") and b"HTTP" not in await reader.read()
        writer.close()
        assert (await ask(address, client_context(tmp_path)))[0] == b"GET /a "
        assert [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []

    served(main, sock, TlsFiles(certfile=certificate, keyfile=key))


def test_clients_show_certificates_where_they_must(tmp_path):
    certificate, key = certified().write(tmp_path, "server")
    own = certified("client").write(tmp_path, "client")
    (sock,) = bind("127.0.0.1", 0)
    address = sock.getsockname()
    client_context(tmp_path)

    async def main(listener, server):
        assert (await ask(address, client_context(tmp_path, own)))[0] == b"GET /a "
        with pytest.raises((ssl.SSLError, ConnectionError, ValueError)):
            await ask(address, client_context(tmp_path))

    files = TlsFiles(certfile=certificate, keyfile=key, ca_certs=str(tmp_path / "authority.pem"), cert_reqs=2)
    served(main, sock, files)


def test_wrong_tls_files_are_said_with_their_flags(tmp_path):
    certificate, key = certified().write(tmp_path, "one")
    other, _ = certified().write(tmp_path, "other")
    locked, locked_key = certified(password=b"secret").write(tmp_path, "locked")
    (tmp_path / "nothing.pem").write_bytes(b"")
    for files, says in (
        (TlsFiles(certfile=str(tmp_path / "none.pem")), "--ssl-certfile .*none.pem: No such file"),
        (TlsFiles(certfile=certificate, keyfile=str(tmp_path / "none.key")), "--ssl-keyfile .*none.key: No such file"),
        (TlsFiles(certfile=other, keyfile=key), "the key that belongs to it"),
        (TlsFiles(certfile=certificate), "the key that belongs to it"),
        (TlsFiles(certfile=locked, keyfile=locked_key), "without a password"),
        (TlsFiles(certfile=certificate, keyfile=key, cert_reqs=2), "need --ssl-ca-certs"),
        (TlsFiles(certfile=certificate, keyfile=key, ca_certs=str(tmp_path / "nothing.pem")), "--ssl-ca-certs"),
        (TlsFiles(certfile=certificate, keyfile=key, ciphers="NO-SUCH"), "--ssl-ciphers NO-SUCH"),
    ):
        with pytest.raises(ValueError, match=says):
            make_context(files)


def test_a_unix_socket_is_served_and_replaces_only_a_dead_one(tmp_path):
    path = str(tmp_path / "quire.sock")
    (sock,) = bind_unix(path, 0o600)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(FrontendError, match=r"--uds .*quire.sock"):
        bind_unix(path, 0o600)

    async def main(listener, server):
        assert (await ask(path))[0] == b"GET /a "

    served(main, sock)
    (again,) = bind_unix(path, 0o660)  # the file of before is still there, and nobody listens
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    again.close()


def test_a_unix_sockets_file_goes_with_its_server_but_not_anothers(tmp_path):
    path = str(tmp_path / "quire.sock")
    (sock,) = bind_unix(path, 0o600)
    ours = UnixPath(path)
    os.unlink(path)
    (others,) = bind_unix(path, 0o600)
    ours.remove()
    assert os.path.exists(path)
    UnixPath(path).remove()
    assert not os.path.exists(path)
    for each in (sock, others):
        each.close()


@pytest.mark.parametrize("path", ["x" * 200, "/nowhere/at/all.sock"])
def test_a_path_that_cannot_be_a_socket(path):
    with pytest.raises(FrontendError, match="--uds"):
        bind_unix(path, 0o600)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "data"
    path.write_text("precious")
    with pytest.raises(FrontendError, match="no socket"):
        bind_unix(str(path), 0o600)
    assert path.read_text() == "precious"
