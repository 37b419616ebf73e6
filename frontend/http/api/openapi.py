"""/openapi.json: the table of routes and its structs as an OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1).

msgspec describes bodies and answers from the structs that decode and encode them, so code and description agree. A field that
may be null may be left out. A process makes the document once, at the first request for it.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.frontend.http.api.route import JSON, Route
from quire.ipc.version import VERSION

_REF = "#/components/schemas/{name}"
_TEXT = {"type": "string"}
_KEYS = {
    "api_key": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def document(routes: Iterable[Route], root_path: str = "") -> dict[str, Any]:
    """The whole document. root_path: the server's prefix of every path."""
    routes = tuple(routes)
    types = [kind for route in routes for kind in (route.body, route.answer, route.error) if kind is not None]
    unique = list({repr(kind): kind for kind in types}.values())
    refs, schemas = msgspec.json.schema_components(unique, ref_template=_REF)
    schema_of = {repr(kind): ref for kind, ref in zip(unique, refs, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":path\}", "}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": VERSION, "description": "An OpenAI-compatible server for language models."},
        "servers": [{"url": root_path or "/"}],
        "security": [{}, {"api_key": []}, {"x_api_key": []}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
    }


def _operation(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    error = {"description": "What is wrong, and what would work", "content": _content(JSON, schema_of[repr(route.error)])}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "tags": [route.tag],
        "responses": {"501": error} if route.missing else {"200": _answer(route, schema_of), "default": error},
    }
    if route.is_open:
        operation["security"] = []
    if parameters := [*map(_path_parameter, route.parameters), *_query_parameters(route)]:
        operation["parameters"] = parameters
    if body := _request_body(route, schema_of):
        operation["requestBody"] = body
    return operation


def _answer(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "Done"}
    if route.answer is not None:
        answer["content"] = _content(JSON, schema_of[repr(route.answer)])
    elif route.answer_type != JSON:
        answer["content"] = _content(route.answer_type, _TEXT)
    if route.streams:
        answer["content"][route.stream_type] = {}  # 3.1 cannot describe a stream of events
    return answer


def _request_body(route: Route, schema_of: dict[str, Any]) -> dict[str, Any] | None:
    if route.media_type != JSON:
        required = [name for name in route.form if "[" not in name]
        form = {"type": "object", "properties": dict(route.form), "required": required}
        return {"required": True, "content": _content(route.media_type, form if route.form else {"type": "object"})}
    if route.body is None:
        return None
    content = _content(JSON, schema_of[repr(route.body)])
    if route.example is not None:
        content[JSON]["example"] = dict(route.example)
    return {"required": True, "content": content}


def _content(media_type: str, schema: Any) -> dict[str, Any]:
    return {media_type: {"schema": schema}}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in route.query.items()]
