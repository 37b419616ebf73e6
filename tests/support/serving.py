"""Whole processes for tests/serving: `quire serve` and `enginecore` as a user starts them, and requests to them.

Every process of a launched tree holds the pipe to which the launched process writes, so the pipe's end of file is the end of
the whole tree: `tree_has_ended` waits for that, as a list of processes might miss one.
"""

import contextlib
import functools
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import psutil
import with_parent
from deadlines import DEADLINE_S

SOON_S = 2.0  # "within a second": and half of one until the Heartbeat that tells of it, and the rest for a busy machine
LOOK_S = 0.01  # between two looks at what nobody announces
SMALL = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--cpu-kv-cache-gib", "0.05")


class Launched:
    """A command of ours as a child process: its lines as they come (stdout and stderr as one), its processes, its end.

    Launch from the main thread: the child dies with the thread that started it.
    """

    def __init__(self, module: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.process = subprocess.Popen(
            [sys.executable, "-P", with_parent.__file__, str(os.getpid()), module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        self.pid = self.process.pid
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, name=f"test-lines-of-{self.pid}")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            for line in pipe:
                with self._news:
                    self.lines.append(line.decode().rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def line(self, pattern: str, count: int = 1, timeout_s: float = DEADLINE_S) -> re.Match[str]:
        """The count-th line that the pattern is found in, waited for."""

        def found() -> list[re.Match[str]]:
            return [m for line in self.lines if (m := re.search(pattern, line))]

        with self._news:
            self._news.wait_for(lambda: len(found()) >= count or self._ended, timeout_s)
            assert len(found()) >= count, f"no line {count} of {pattern!r} in:\n{self.output}"
            return found()[count - 1]

    def tree_has_ended(self, timeout_s: float = DEADLINE_S) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._ended, timeout_s)

    def kill(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit code, when the whole tree is gone."""
        code = self.process.wait(timeout_s)
        assert self.tree_has_ended(10.0), f"a process outlives its parent: {self.pids()}"
        return code

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.kill(number)
        return self.wait()

    def pids(self, module: str = "") -> list[int]:
        """Processes of the tree that run this module, the launched one left out."""
        return [p.pid for p in self.processes() if module in command_of(p)]

    def pid_of(self, module: str) -> int:
        (pid,) = self.pids(module)
        return pid

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.pids(), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        ended = self.tree_has_ended(10.0)
        self._reader.join(1.0)
        assert ended, f"processes outlive pid {self.pid}; they wrote:\n{self.output}"


def command_of(process: psutil.Process) -> list[str]:
    """Its words; none once it is gone, or dead and not waited for."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class Daemon(Launched):
    """`enginecore --listen ADDRESS`."""

    def __init__(self, address: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        super().__init__("quire.enginecore.cli", "--listen", address, *arguments, env=env)
        self.address = address

    def ready(self) -> Self:
        self.line("Quire engine ready at")
        return self


class Served(Launched):
    """`quire serve` on a free port, and HTTP requests to it."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        super().__init__("quire.frontend.cli.main", "serve", "--port", "0", *arguments, env=env)

    def ready(self) -> Self:
        self.line("Quire serves")
        return self

    @functools.cached_property
    def address(self) -> tuple[str, int]:
        host, port = self.line(r"Quire serves .* at http://([\d.]+):(\d+)").groups()
        return host, int(port)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def engine_address(self, start: int = 1) -> str:
        """Of its engine, at its start-th start."""
        return self.line(r"ready after .* s: (ipc://\S+)", start)[1]

    # ------------------------------------------------------------------------------------------------- requests
    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> "Answer":
        """body: bytes as they are, anything else as JSON."""
        with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=DEADLINE_S)) as connection:
            connection.request(method, path, *encoded(body, headers))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """/v1/completions, greedy unless told otherwise, which must succeed."""
        answer = self.ask("POST", "/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert answer.status == 200, answer
        return answer.json()

    def text(self, prompt: Any, **fields: Any) -> str:
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def stream(self, prompt: Any, **fields: Any) -> "EventStream":
        """/v1/completions with stream: true; returns when the head of the answer is there."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, **fields}
        return EventStream(self.address, "/v1/completions", body)

    def health(self) -> int:
        return self.ask("GET", "/health").status

    def metric(self, name: str) -> float:
        """A metric without labels of its own, by its name without the prefix; NaN before the engine's first Heartbeat."""
        text = self.ask("GET", "/metrics").body.decode()
        found = re.search(rf'^(?:vllm|quire):{name}{{model_name="[^"]*",engine="0"}} (\S+)$', text, re.M)
        return float(found[1]) if found else math.nan


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


def encoded(body: Any, headers: dict[str, str] | None) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, headers or {}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return data, {"Content-Type": "application/json", **(headers or {})}


class EventStream:
    """Server-sent events of one answer, one at a time."""

    def __init__(self, address: tuple[str, int], path: str, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=DEADLINE_S)
        self._connection.request("POST", path, *encoded(body, None))
        self.response = self._connection.getresponse()
        assert self.response.status == 200, self.response.read()
        self.done = False  # the end was said

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while line := self.response.readline():
            if line == b"data: [DONE]\n":
                self.done = True
            elif line != b"\n":
                assert line.startswith(b"data: "), line
                yield json.loads(line[6:])

    def text(self) -> str:
        """The rest's text. The stream must end well."""
        text = "".join(event["choices"][0]["text"] for event in self if event["choices"])
        assert self.done, "the stream broke off"
        return text

    def wait_for_text(self) -> str:
        """The first text that comes."""
        return next(text for event in self if (text := event["choices"][0]["text"]))

    def close(self) -> None:
        """Hang up, whatever the answer's state; what comes later is met with a reset."""
        sock = self._connection.sock or self.response.fp.raw._sock  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Background(threading.Thread):
    """Runs a function beside the test; `result` waits for what it returns or raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="test-background", daemon=True)
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        self.join(timeout_s)
        assert not self.is_alive(), "it has not ended in time"
        if self._error is not None:
            raise self._error
        return self._result


def error_of(stream: EventStream) -> dict[str, Any]:
    """What a stream's last event says has gone wrong."""
    with stream:
        *_, last = stream
        return last["error"]


def ends_well(stream: EventStream) -> bool:
    """Whether a stream goes on to its end, with a text."""
    with stream:
        return bool(stream.text())


def until(condition: Callable[[], Any], timeout_s: float = DEADLINE_S) -> float:
    """Look again and again until it is so; the seconds that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"it is not so after {timeout_s} s"
        time.sleep(LOOK_S)
    return time.monotonic() - started
