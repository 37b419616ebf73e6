"""A proxy on this machine between a program and the server, which keeps what the program sends and what it is answered.

Used for programs that say little about their requests (coding_agents.py). `change` may edit the body of a request before it is
sent on. The proxy has one request per connection, and passes streams on as they come.
"""

import http.client
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

TIMEOUT_S = 600
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host", "accept-encoding", "keep-alive"}

Change = Callable[[str, Any, int], Any]


class Seen(NamedTuple):
    """A request and its answer. body: what the program sent; None for a request without a body. sent: what was sent on."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    sent: Any
    status: int
    answer: str


class RecordingProxy:
    """Listens on a port of its own from __enter__ to __exit__. `seen` grows with each answered request."""

    def __init__(self, target: str, change: Change = lambda path, body, count: body) -> None:
        self.seen: list[Seen] = []
        self._target, self._change = urlsplit(target).netloc, change
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.forward(self)

            do_POST = do_HEAD = do_DELETE = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="recording-proxy")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        data = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        body = json.loads(data) if data else None
        path = urlsplit(handler.path).path
        with self._lock:
            count = self._counts[path] = self._counts.get(path, 0) + 1
        changed = self._change(path, body, count)
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in HOP_BY_HOP}
        connection = http.client.HTTPConnection(self._target, timeout=TIMEOUT_S)
        try:
            connection.request(handler.command, handler.path, None if changed is None else json.dumps(changed), headers)
            response = connection.getresponse()
            answer = self._pass_on(handler, response)
        finally:
            connection.close()
        self.seen.append(Seen(handler.command, path, dict(handler.headers), body, changed, response.status, answer))

    def _pass_on(self, handler: BaseHTTPRequestHandler, response: http.client.HTTPResponse) -> str:
        handler.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP_BY_HOP:
                handler.send_header(name, value)
        handler.send_header("Connection", "close")
        handler.end_headers()
        parts = []
        while part := response.read1(65536):
            parts.append(part)
            try:
                handler.wfile.write(part)
            except OSError:  # the program has hung up, and so does the proxy
                break
        handler.close_connection = True
        return b"".join(parts).decode(errors="replace")
