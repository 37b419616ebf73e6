"""HTTP servers of the standard library as other parties in tests: a trace collector, a hub, a foreign server."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import TypeVar

Server = TypeVar("Server", bound=http.server.HTTPServer)


@contextlib.contextmanager
def answering(server: Server) -> Iterator[Server]:
    """A thread answers its requests meanwhile; then it is closed."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="test-http-server")
    with server:
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def url_of(server: http.server.HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"
