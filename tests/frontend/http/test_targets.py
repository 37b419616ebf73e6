"""Which path a request means: the absolute form, a root path, and bodies of routes with a limit of their own."""

import asyncio

import fake_client as http
import pytest
from fake_client import COMPLETIONS

from quire.frontend.http.api import app as app_module
from quire.frontend.http.api.app import without_root
from quire.frontend.http.api.route import RouteTable
from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.protocol.head import split_target


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/a/b?c=d?e", b"/a/b", b"c=d?e"),
        (b"http://host/a?b", b"/a", b"b"),
        (b"HTTPS://host:8000/a/http://x", b"/a/http://x", b""),
        (b"http://host", b"/", b""),
        (b"http://[::1]:80?b", b"/", b"b"),
        (b"*", b"*", b""),
        (b"http:///a", b"http:///a", b""),
        (b"http://user@host/health", b"http://user@host/health", b""),
        (b"ftp://host/a", b"ftp://host/a", b""),
        (b"//host/a", b"//host/a", b""),
    ],
)
def test_a_target_is_split_raw(target, path, query):
    assert split_target(target) == (path, query)


def test_the_absolute_form_means_its_path():
    async def main():
        api = http.Api(api_keys=["k"])
        assert (await api.ask("GET", "http://anywhere/health")).status == 200
        assert (await api.ask("GET", "http://anywhere/v1/models")).status == 401
        answer = await api.ask("GET", "https://anywhere:99/v1/models", headers={"Authorization": "Bearer k"})
        assert answer.status == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "route"),
    [
        (b"/llm/health", b"/health"),
        (b"/health", b"/health"),
        (b"/llm", b"/llm"),
        (b"/llm/", b"/"),
        (b"/llmhealth", b"/llmhealth"),
        (b"/llm/llm/health", b"/llm/health"),
    ],
)
def test_a_root_path_is_whole_segments(path, route):
    assert without_root(path, b"/llm") == route
    assert without_root(path, b"") == path


def test_paths_are_served_with_the_root_path_and_without():
    async def main():
        api = http.Api(api_keys=["k"], root_path="/llm")
        for path in ("/health", "/llm/health", "http://x/llm/health"):
            assert (await api.ask("GET", path)).status == 200
        answer = await api.ask("GET", "/llm")  # a browser finds the page's files below the slash only
        assert (answer.status, answer.headers["location"]) == (307, "/llm/")
        for path in ("/llm/v1/models", "/llmx", "/llm/llm/health"):
            assert (await api.ask("GET", path)).status == 401
        for path in ("/v1/models/tiny", "/llm/v1/models/tiny", "/llm/v1/models/org%2Ftiny"):
            assert (await api.ask("GET", path, headers={"Authorization": "Bearer k"})).status == 200
        for asked in (api, http.Api()):  # clients made from the description ask below the root path, too
            _, spec = await asked.json("GET", "/openapi.json", headers={"Authorization": "Bearer k"})
            assert spec["servers"] == [{"url": "/llm" if asked is api else "/"}]

    asyncio.run(main())


def test_a_route_may_have_a_limit_of_its_own(monkeypatch):
    routes = [route._replace(max_body=64) if route.path == COMPLETIONS else route for route in ROUTES.routes]
    monkeypatch.setattr(app_module, "ROUTES", RouteTable(routes))

    async def main():
        api = http.Api()
        assert (await api.ask("POST", COMPLETIONS, {"prompt": "x"})).status == 200
        answer = await api.ask("POST", COMPLETIONS, {"prompt": "x" * 64})
        assert answer.status == 413 and b"64 bytes" in answer.body
        assert (await api.ask("POST", "/tokenize", {"prompt": "x" * 64})).status == 200

    asyncio.run(main())


def test_readiness_ends_before_anything_else_does():
    async def main():
        api = http.Api(api_keys=["k"])
        for path in ("/ready", "/health", "/live"):
            assert (await api.ask("GET", path)).status == 200
        api.app._services.state.draining = True
        answer = await api.ask("GET", "/ready")
        assert answer.status == 503 and answer.headers["retry-after"]
        assert (await api.ask("GET", "/live")).status == 200
        answer = await api.ask("POST", COMPLETIONS, {"prompt": "x"}, {"Authorization": "Bearer k"})
        assert answer.status == 200

    asyncio.run(main())
