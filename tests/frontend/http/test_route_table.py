"""The table of routes: paths with parameters, several methods, and nothing that a strange path could break."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.http.api.page import FILES
from quire.frontend.http.api.route import Route, RouteTable
from quire.frontend.http.api.routes import ROUTES


def route(method, path) -> Route:
    return Route(method, path, None, "")


TABLE = RouteTable(
    [
        route("GET", "/v1/files"), route("POST", "/v1/files"), route("GET", "/v1/files/{file_id}"),
        route("DELETE", "/v1/files/{file_id}"), route("GET", "/v1/files/{file_id}/content"),
        route("GET", "/v1/models/{model:path}"),
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "methods", "parameters"),
    [
        (b"/v1/files", {"GET", "POST"}, {}),
        (b"/v1/files/f-1", {"GET", "DELETE"}, {"file_id": "f-1"}),
        (b"/v1/files/f%2F1/content", {"GET"}, {"file_id": "f/1"}),
        (b"/v1/models/org/name", {"GET"}, {"model": "org/name"}),
        (b"/v1/models/", set(), {}),
        (b"/v1/files/", set(), {}),
        (b"/v1/files/a/b", set(), {}),
        (b"/v1/files/a\ncontent", {"GET", "DELETE"}, {"file_id": "a\ncontent"}),
        (b"/v1/filesX", set(), {}),
    ],
)
def test_paths_are_found_by_their_raw_bytes(path, methods, parameters):
    assert TABLE.find(path) == ({m: r for m, r in TABLE.find(path)[0].items() if m in methods}, parameters)
    assert set(TABLE.find(path)[0]) == methods


def test_a_name_for_metrics_holds_no_parameter():
    assert {r.name for r in TABLE.routes} == {"/v1/files", "/v1/models"}
    assert all("{" not in r.name for r in ROUTES.routes)


@given(st.binary(max_size=300))
def test_any_bytes_have_an_answer(path):
    for table in (TABLE, ROUTES):
        table.find(path)


def test_what_is_open_is_what_may_be():
    pages = {path.decode() for path in FILES}
    assert {r.path for r in ROUTES.routes if r.is_open} == {"/health", "/live", "/ready", "/ping", "/docs"} | pages
