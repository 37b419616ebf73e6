"""HAProxy and nginx with deploy/'s configurations, in front of a test's servers, on free ports; and a load through them.

Only addresses, certificates and output paths are changed in the files.
"""

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from certificates import authority, certified
from deadlines import DEADLINE_S
from serving import until

ROOT = Path(__file__).parents[2]


def program(name: str) -> str:
    """The path of an installed program; without it, the test fails."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert found is not None, f"{name} is not installed: the tests of deploy/ run it (see the Makefile, test-deploy)"
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """Each of these, which must be there, by its other."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


class Balancer:
    """One before these servers, with TLS at `port`."""

    def __init__(self, name: str, folder: Path, servers: list[tuple[str, int]]) -> None:
        self.name, self._folder = name, folder
        plain, self.port = free_ports(2)
        certificate, key = certified().write(folder, "quire")
        places = [(f"10.0.0.1{i}:8000", f"{host}:{port}") for i, (host, port) in enumerate(servers, 1)]
        make = {"haproxy": self._haproxy, "nginx": self._nginx}[name]
        self.command = make(folder, places, (plain, self.port), (certificate, key))

    def _haproxy(
        self, folder: Path, places: list[tuple[str, str]], ports: tuple[int, int], certificate: tuple[str, str]
    ) -> list[str]:
        both = folder / "both.pem"
        both.write_bytes(b"".join(Path(path).read_bytes() for path in certificate))
        text = replaced(
            (ROOT / "deploy/haproxy/haproxy.cfg").read_text(),
            *places,
            ("bind :80\n", f"bind 127.0.0.1:{ports[0]}\n"),
            ("bind :443 ", f"bind 127.0.0.1:{ports[1]} "),
            ("/etc/haproxy/certs/quire.pem", str(both)),
        )
        file = folder / "haproxy.cfg"
        file.write_text(text)
        return [program("haproxy"), "-f", str(file)]

    def _nginx(
        self, folder: Path, places: list[tuple[str, str]], ports: tuple[int, int], certificate: tuple[str, str]
    ) -> list[str]:
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
        text = replaced(
            (ROOT / "deploy/nginx/nginx.conf").read_text(),
            *places,
            ("listen 80;", f"listen 127.0.0.1:{ports[0]};"),
            ("listen 443 ", f"listen 127.0.0.1:{ports[1]} "),
            ("/etc/nginx/certs/quire.pem", certificate[0]),
            ("/etc/nginx/certs/quire.key", certificate[1]),
            ("/run/nginx.pid", f"{folder}/nginx.pid"),
            ("worker_processes auto;", "worker_processes 1;\ndaemon off;" + ("\nuser root;" if os.geteuid() == 0 else "")),
            ("/dev/stdout", f"{folder}/access.log"),
            ("http {\n", f"http {{\n{temporary}"),
        )
        file = folder / "nginx.conf"
        file.write_text(text)
        return [program("nginx"), "-p", str(folder), "-c", str(file)]

    def check(self) -> None:
        """By the program itself."""
        flag = {"haproxy": "-c", "nginx": "-t"}[self.name]
        done = subprocess.run([*self.command, flag], capture_output=True, text=True)
        said = done.stdout + done.stderr
        assert done.returncode == 0 and not re.search(r"\[(warn|emerg|WARNING|ALERT)", said), said

    @contextlib.contextmanager
    def running(self) -> Iterator["Balancer"]:
        with open(self._folder / "log", "wb") as log:
            process = subprocess.Popen(self.command, stdout=log, stderr=log)
        try:
            until(lambda: self._answers(process))
            yield self
        finally:
            process.terminate()
            process.wait(DEADLINE_S)

    def _answers(self, process: "subprocess.Popen[bytes]") -> bool:
        assert process.poll() is None, (self._folder / "log").read_text()
        with contextlib.suppress(OSError):
            return self.ask("GET", "/ready")[0] == 200
        return False

    def connection(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cadata=authority().decode())
        return http.client.HTTPSConnection("localhost", self.port, timeout=DEADLINE_S, context=context)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        with contextlib.closing(self.connection()) as connection:
            return request(connection, method, path, body, headers)


def request(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    return response.status, response.read()


class Load:
    """Clients, each of which asks again and again on one connection, streamed and not, until `stop`; what failed of it."""

    def __init__(self, balancer: Balancer, num_clients: int) -> None:
        self.failures: list[str] = []
        self.num_answers = 0
        self._balancer = balancer
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), name=f"client-{i}") for i in range(num_clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def until_more(self, count: int) -> None:
        """So many answers more."""
        before = self.num_answers
        until(lambda: self.num_answers >= before + count)

    def _run(self, client: int) -> None:
        connection = self._balancer.connection()
        for turn in itertools.count():
            if self._stopping.is_set():
                break
            try:
                self._ask(connection, stream=bool(turn % 2), session=f"{client}-{turn // 4}")
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.failures.append(repr(error))
                connection.close()
            self.num_answers += 1
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, stream: bool, session: str) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 40, "min_tokens": 40, "ignore_eos": True, "stream": stream}
        status, answer = request(connection, "POST", "/v1/completions", body, {"X-Session-Id": session})
        assert status == 200, (status, answer)
        assert answer.endswith(b"data: [DONE]\n\n") if stream else json.loads(answer)["usage"]["completion_tokens"] == 40, (
            answer
        )
