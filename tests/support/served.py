"""`quire serve` as a process of its own, attached to a FakeCore; its requests over HTTP, and the core's answers."""

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

from deadlines import DEADLINE_S
from fake_core import FakeCore, outputs
from serving import until
from toy_tokenizers import byte_level

from quire.ipc.messages.frontend import AddRequest, EngineLimits

ROOMY = EngineLimits(max_model_len=4096, vocab_size=400, max_num_seqs=4, max_logprobs=20)


def say_hi(request: AddRequest, child: int) -> list[int]:
    return byte_level().encode("hello world!").ids


class Served:
    """`quire serve` as a child process, from its first line to its exit code."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.lines: list[str] = []

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def url(self) -> str:
        """Waits until it is ready."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert ready, "not ready in time"
        self.lines = [self.process.stdout.readline().decode() for _ in range(3)]
        assert "http://" in self.lines[0], (self.lines, self.process.communicate())
        return "http://" + self.lines[0].strip().partition("http://")[2]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and what it had to say on stderr."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err.decode()


def request(url: str, method: str, path: str, body: dict | None = None, key: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def until_healthy(url: str, status: int) -> None:
    """Wait until /health says so."""
    until(lambda: request(url, "GET", "/health")[0] == status)


def next_of(core: FakeCore, kind: type):
    """The next message of this kind, heartbeats and greetings aside."""
    while True:
        message = core._received.get(timeout=DEADLINE_S)
        if isinstance(message, kind):
            return message


def say(core: FakeCore, key: int, token: int, reason: str | None = None) -> None:
    core.say(outputs([(key, token)], {key: reason} if reason else None, epoch=core.epoch))


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def until_it_listens(port: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port))):
            return
        os.sched_yield()
    raise AssertionError("it does not listen in time")


def wait_for_signal_handler(pid: int, number: signal.Signals) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/status") as status:
            caught = int(next(line.split()[1] for line in status if line.startswith("SigCgt")), 16)
        if caught >> (number - 1) & 1:
            return
        os.sched_yield()
    raise AssertionError("no handler in time")
