"""`quire serve` over TLS and at a unix socket, by one process and by several, and how it tells balancers of its end."""

import http.client
import os
import signal
import socket
import ssl
import stat

import pytest
from certificates import authority, certified
from deadlines import DEADLINE_S
from fake_core import FakeCore
from served import ROOMY, Served, request, say_hi
from serving import until


def get(connection: http.client.HTTPConnection, path: str) -> int:
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    return response.status


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(self._path)


def ready_line(served: Served) -> str:
    return served.process.stdout.readline().decode()


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_unix_socket(tmp_path, count):
    path = str(tmp_path / "quire.sock")
    arguments = ("--uds", path, "--uds-mode", "600", "--frontends", str(count))
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, *arguments) as served:
        assert ready_line(served) == f"Quire serves toy at unix:{path}\n"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with Served("--engine", core.address, "--uds", path) as second:
            code, err = second.wait()
            assert code == 1 and f"--uds {path}: another process listens there" in err
        for _ in range(2 * count):
            connection = UnixConnection(path)
            assert get(connection, "/health") == 200
            connection.close()
        code, err = served.end()
        assert code == 0 and not os.path.exists(path), err


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tls(tmp_path, count):
    certificate, key = certified().write(tmp_path, "server")
    (tmp_path / "authority.pem").write_bytes(authority())
    arguments = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--enable-ssl-refresh", "--frontends", str(count))
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, *arguments) as served:
        url = ready_line(served).split()[-1]
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        context.check_hostname = False  # it is for localhost, and asked by address

        def serial() -> str:
            connection = http.client.HTTPSConnection(url.removeprefix("https://"), timeout=DEADLINE_S, context=context)
            assert get(connection, "/health") == 200
            number = connection.sock.getpeercert()["serialNumber"]
            connection.close()
            return number

        first = serial()
        certified().write(tmp_path, "server")
        until(lambda: serial() != first)
        code, err = served.end()
        assert code == 0, err


def test_wrong_certificates_are_said_before_anything_starts(tmp_path):
    with Served("--engine", f"ipc://{tmp_path}/none.sock", "--ssl-certfile", str(tmp_path / "none.pem")) as served:
        code, err = served.wait()
        assert code == 1 and "--ssl-certfile" in err and "No such file" in err
    with Served("--engine", f"ipc://{tmp_path}/none.sock", "--enable-ssl-refresh") as served:
        code, err = served.wait()
        assert code == 2 and "--enable-ssl-refresh: TLS needs --ssl-certfile" in err


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_turns_ready_first_and_is_hurried_by_a_second_one(count):
    arguments = ("--drain-delay-s", "600", "--frontends", str(count))
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, *arguments) as served:
        url = served.url()
        assert request(url, "GET", "/ready")[0] == 200
        served.process.send_signal(signal.SIGTERM)
        until(lambda: request(url, "GET", "/ready")[0] == 503)
        assert request(url, "GET", "/live")[0] == 200
        assert request(url, "POST", "/v1/completions", {"prompt": "a"})[0] == 200  # still taken
        code, err = served.end()
        assert code == 0 and "stopping: /ready says so" in err, err
