"""Route: one line of the table of routes, and `RouteTable`, which finds it by a request's raw path.

A line has all that is known of a route before its handler runs: whether it needs a key (app.py), how large a body may be, and
its description for /openapi.json (openapi.py). The table itself is routes.py.
"""

import functools
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ErrorResponse
from quire.frontend.http.protocol.exchange import Request, Response

Handler = Callable[[Services, Request, Response], Awaitable[None]]

JSON = "application/json"
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


class Route(NamedTuple):
    """A method on a path. In a path, {name} stands for one segment and {name:path} for all that follow.

    body, answer: structs of JSON. streams: "stream": true asks for a stream of type stream_type. query: name -> JSON Schema.
    form: fields of a form -> JSON Schema; those without brackets are required.
    is_open: needs no API key. is_admin: it changes the server or shows its inside, so it needs an admin key, if there is one.
    prompt_field: the field that an error names if a prompt is too long. media_type: the body's.
    max_body: bytes; replaces the server's own limit. missing: the reason for answering 501 to every request. error: its struct.
    any_type: the body is JSON whatever its header content-type says, as `curl -d` sends it.
    has_media: its messages may hold images, so its bodies may be larger if the model takes them.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str = "service"
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    answer_type: str = JSON
    streams: bool = False
    example: Mapping[str, Any] | None = None
    query: Mapping[str, Mapping[str, Any]] = {}
    form: Mapping[str, Mapping[str, Any]] = {}
    is_open: bool = False
    is_admin: bool = False
    prompt_field: str | None = None
    media_type: str = JSON
    max_body: int | None = None
    missing: str = ""
    error: type[msgspec.Struct] = ErrorResponse
    any_type: bool = False
    stream_type: str = "text/event-stream"
    has_media: bool = False

    @property
    def name(self) -> str:
        """The route's label in metrics."""
        return _name_of(self.path)

    @property
    def generates(self) -> bool:
        """Whether it needs a model that writes text."""
        return self.method == "POST" and self.tag in ("generate", "responses")

    @property
    def parameters(self) -> list[str]:
        """Names of the path's parameters."""
        return [match[1] for match in _PARAMETER.finditer(self.path)]


@functools.cache
def _name_of(path: str) -> str:  # called with every answer
    return path.partition("{")[0].rstrip("/") or "/"


class RouteTable:
    """Routes by path; a path has one for each of its methods."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[bytes, dict[str, Route]] = {}
        self._patterns: dict[str, tuple[re.Pattern[bytes], dict[str, Route]]] = {}
        for route in self.routes:
            self._methods(route)[route.method] = route

    def _methods(self, route: Route) -> dict[str, Route]:
        if "{" not in route.path:
            return self._exact.setdefault(route.path.encode(), {})
        parts = _PARAMETER.split(route.path)  # text, name, ":path" or None, text, ...
        pattern = re.escape(parts[0])
        for name, rest, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            pattern += f"(?P<{name}>{'.+' if rest else '[^/]+'})" + re.escape(text)
        return self._patterns.setdefault(route.path, (re.compile(pattern.encode(), re.DOTALL), {}))[1]

    def find(self, path: bytes) -> tuple[Mapping[str, Route], dict[str, str]]:
        """The routes of a path by method, none if there is no such path; and the values of its parameters."""
        found = self._exact.get(path)
        if found is not None:
            return found, {}
        for pattern, methods in self._patterns.values():
            if (match := pattern.fullmatch(path)) is not None:
                return methods, {name: unquote(value.decode("latin-1")) for name, value in match.groupdict().items()}
        return {}, {}

    @property
    def paths(self) -> Iterable[bytes]:
        """The paths without parameters."""
        return self._exact.keys()
