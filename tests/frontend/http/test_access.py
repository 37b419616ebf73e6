"""Who may ask, and how requests are told apart: keys, origins of pages, request ids and their log."""

import asyncio
import hashlib
import json
import logging
import re

import fake_client as http
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO, NUM_TOKENS
from fake_http import settle

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import EngineError
from quire.frontend.http.api.access import LOCAL_NAMES
from quire.frontend.http.api.keys import ApiKeys
from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.limits.key_limits import KeyLimit, KeyLimits
from quire.frontend.http.protocol.cors import Cors

# ------------------------------------------------------------------------------------------------------------------ keys
EVERY_ROUTE = [
    ("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("GET", "/version"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("GET", "/load"), ("GET", "/openapi.json"),
    ("POST", "/v1/embeddings"), ("GET", "/live/"), ("GET", "/docs/"),
    ("GET", "/metrics"), ("GET", "/nope"), ("OPTIONS", CHAT),
    ("GET", "//health"), ("GET", "/health/"), ("GET", "/%68ealth"), ("GET", "http://x/version"), ("GET", "/Health"),
    ("GET", "http://x/health/"), ("GET", "http://a@x/health"),
    ("GET", "/health/../v1/models"), ("GET", "/v1/models?/health"), ("GET", "/health;x"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
def test_every_path_but_health_needs_a_key(method, path):
    async def main():
        api = http.Api(api_keys=["first-key", "second-key"])
        body = HELLO if method == "POST" else None
        for headers in (
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer first-ke"}, {"Authorization": "first-key"},
            {"Authorization": "Basic first-key"}, {"Authorization": "Bearer "},
            {"Authorization": "Bearer first-key,second-key"},
            {"X-Api-Key": "first-ke"}, {"Host": "/health"},
        ):  # fmt: skip
            answer = await api.ask(method, path, body, headers)
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer", headers
            assert b"first" not in answer.body
        for key in ("first-key", "second-key"):
            assert (await api.ask(method, path, body, {"Authorization": f"Bearer {key}"})).status != 401
        assert (await api.ask(method, path, body, {"authorization": "bearer first-key"})).status != 401

    asyncio.run(main())


def test_health_and_optionally_metrics_are_open():
    async def main():
        closed, opened = http.Api(api_keys=["k"]), http.Api(api_keys=["k"], metrics_open=True)
        for path in ("/health", "/ping", "/live", "/ready", "/docs"):
            assert (await closed.ask("GET", path)).status == 200
        assert (await closed.ask("POST", "/ping")).status == 200
        assert (await opened.ask("GET", "/health?x=1")).status == 200
        assert (await closed.ask("GET", "/metrics")).status == 401
        assert (await opened.ask("GET", "/metrics")).status == 200

    asyncio.run(main())


def test_without_a_key_no_body_is_read():
    async def main():
        api = http.Api(api_keys=["k"])
        wire = api.wire()
        head = api.encode("POST", CHAT, HELLO).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").partition(b"{")[0]
        (answer,) = await wire.talk(head)
        assert answer.status == 401 and wire.server.held_bytes == 0

    asyncio.run(main())


ADMIN_ROUTES = [
    *(("GET", path) for path in ("/metrics", "/server_info")),
    *(("POST", path) for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile")),
]
ADAPTER_ROUTES = [("POST", f"/v1/{verb}_lora_adapter") for verb in ("load", "unload")]  # they need a body


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_routes_for_the_operator_need_an_admin_key_where_there_is_one(method, path):
    async def main():
        async def ask(api, key=None, **headers):
            return await api.ask(method, path, None, {**({"X-Api-Key": key} if key else {}), **headers})

        for keys in (["k"], []):
            api = http.Api(api_keys=keys, admin_keys=["first-admin", "admin"])
            assert (await ask(api)).status == (await ask(api, "wrong")).status == 401
            refused = await ask(api, "k")
            assert (refused.status, b"--admin-api-key" in refused.body) == ((403, True) if keys else (401, False))
            assert (await ask(api, "admin")).status == (await ask(api, Authorization="Bearer first-admin")).status == 200
        assert (await ask(http.Api(api_keys=["k"]), "k")).status == 200  # without an admin key
        opened = http.Api(api_keys=["k"], admin_keys=["admin"], metrics_open=True)
        assert (await ask(opened)).status == (200 if path == "/metrics" else 401)

    asyncio.run(main())


def test_a_file_of_limits_may_make_a_key_an_admins():
    async def main():
        limits = KeyLimits(by_digest={hashlib.sha256(b"boss").hexdigest(): KeyLimit(admin=True)}, has_file=True)
        api = http.Api()
        api.access.use(ApiKeys(["boss", "k"], limits=limits))
        for key, status in (("boss", 200), ("k", 403), ("other", 401)):
            assert (await api.ask("GET", "/server_info", None, {"X-Api-Key": key})).status == status

    asyncio.run(main())


def test_an_admin_key_opens_what_other_keys_open_and_every_admin_route_is_one():
    async def main():
        api = http.Api(api_keys=["k"], admin_keys=["admin"])
        for key, status in (("k", 200), ("admin", 200), ("other", 401)):
            assert (await api.ask("GET", "/v1/models", None, {"X-Api-Key": key})).status == status
        open_api = http.Api(admin_keys=["admin"])
        assert (await open_api.ask("GET", "/v1/models")).status == 200
        api.access.use(ApiKeys(["new"], ["new-admin"]))
        for key, status in (("k", 401), ("admin", 401), ("new", 200), ("new-admin", 200)):
            assert (await api.ask("GET", "/v1/models", None, {"X-Api-Key": key})).status == status

    asyncio.run(main())
    assert {(route.method, route.path) for route in ROUTES.routes if route.is_admin} == {*ADMIN_ROUTES, *ADAPTER_ROUTES}
    assert {route.path for route in ROUTES.routes if route.tag == "admin"} <= {
        path for _, path in (*ADMIN_ROUTES, *ADAPTER_ROUTES)
    }


# ----------------------------------------------------------------------------------------------------------------- hosts
ADDRESSES = ["127.0.0.1", "127.0.0.1:8000", "10.1.2.3", "[::1]:80", "[fe80::1]"]
LOCAL = [*ADDRESSES, "localhost", "LocalHost:8000", "a.localhost", "a.b.localhost.", "quire"]
REBOUND = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "a.xlocalhost"]
REBOUND += ["1.2.3.4.5", "127.0.0.1:80:80", "[::1].evil.example", "example.org.evil.example"]


@pytest.mark.parametrize("host", REBOUND)
def test_a_page_on_a_rebound_name_is_refused_on_every_path(host):
    async def main():
        api = http.Api(allowed_hosts=LOCAL_NAMES)
        for method, path in (("GET", "/live"), ("POST", CHAT), ("OPTIONS", CHAT), ("GET", "/nope"), ("POST", "/v1/messages")):
            answer = await api.ask(method, path, HELLO if method == "POST" else None, {"Host": host})
            assert (answer.status, b"--allowed-hosts" in answer.body) == (421, True)

    asyncio.run(main())


def test_names_that_are_allowed_and_addresses_pass():
    async def statuses(api, hosts, target="/live"):
        return [(await api.ask("GET", target, None, {"Host": host})).status for host in hosts]

    async def main():
        api = http.Api(allowed_hosts=LOCAL_NAMES)
        assert await statuses(api, LOCAL) == [200] * len(LOCAL)
        assert await statuses(api, ["localhost"], "http://evil.example/live") == [421]
        assert await statuses(api, ["localhost"], "http://127.0.0.1:1/live") == [200]
        given = http.Api(allowed_hosts=("example.org", "*.example.org"))
        good = ["example.org", "EXAMPLE.ORG.:1", "a.example.org", "10.0.0.1:8000"]
        assert await statuses(given, good) == [200] * len(good)
        assert await statuses(given, [*REBOUND, "localhost", "quire"]) == [421] * (len(REBOUND) + 2)
        assert await statuses(http.Api(), REBOUND) == [200] * len(REBOUND)

    asyncio.run(main())


# --------------------------------------------------------------------------------------------------------------- origins
PAGE = {"Origin": "https://page.example"}
PREFLIGHT = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_a_page_may_ask_before_it_sends_without_a_key():
    async def main():
        api = http.Api(api_keys=["k"])
        for path in (CHAT, "/v1/models", "/nope"):
            answer = await api.ask("OPTIONS", path, headers=PREFLIGHT)
            assert answer.status == 200 and answer.body == b""
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        strange = {**PREFLIGHT, "Access-Control-Request-Headers": "a;b"}
        assert "access-control-allow-headers" not in (await api.ask("OPTIONS", CHAT, headers=strange)).headers
        assert (await api.ask("OPTIONS", CHAT, headers=PAGE)).status == 401  # no question of a browser's

    asyncio.run(main())


def test_every_answer_says_which_pages_may_read_it():
    async def main():
        one_page, nobody = http.Api(cors=Cors([PAGE["Origin"], "http://other"])), http.Api(cors=Cors([]))
        for method, path, body, status in [
            ("POST", CHAT, HELLO, 200), ("POST", CHAT, {**HELLO, "stream": True}, 200), ("POST", CHAT, {**HELLO, "n": 0}, 400),
            ("GET", "/v1/models", None, 200), ("GET", "/nope", None, 404), ("GET", CHAT, None, 405), ("POST", CHAT, b"{", 400),
            ("OPTIONS", CHAT, None, 200),
        ]:  # fmt: skip
            asked = PREFLIGHT if method == "OPTIONS" else PAGE
            for api, allowed, vary in ((http.Api(), "*", None), (one_page, PAGE["Origin"], "origin"), (nobody, None, "origin")):
                answer = await api.ask(method, path, body, asked)
                assert answer.status == status
                assert answer.headers.get("access-control-allow-origin") == allowed and answer.headers.get("vary") == vary
            answer = await one_page.ask(method, path, body, {**asked, "Origin": "https://page.example.evil"})
            assert "access-control-allow-origin" not in answer.headers
        assert "access-control-allow-origin" not in (await http.Api().ask("GET", "/health")).headers

    asyncio.run(main())


def test_what_browsers_send_unasked_is_refused_to_other_pages():
    """A POST without a body, or with one that has no type, is sent across origins before anybody is asked."""

    async def main():
        api, data = http.Api(cors=Cors([PAGE["Origin"]])), json.dumps(HELLO).encode()
        for path in (CHAT, "/reset_prefix_cache", "/v1/responses/resp_0/cancel"):
            for page, status in ((PAGE["Origin"], 200), (None, 200), ("https://evil.example", 403), ("null", 403)):
                origin = f"Origin: {page}\r\n" if page else ""
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{origin}Content-Length: {len(data)}\r\n\r\n"
                wire = api.wire()
                wire.feed(head.encode() + data)
                while wire.connection._task is not None:
                    await asyncio.wait([wire.connection._task])
                (answer,) = wire.answers()
                assert (answer.status == 403) == (status == 403), (path, page)
        await api.services.storage.close()

    asyncio.run(main())


# --------------------------------------------------------------------------------------------------- names and their log
def test_a_request_may_bring_its_name():
    async def main():
        api = http.Api()
        for path, body, prefix in [(CHAT, HELLO, "chatcmpl-"), (COMPLETIONS, {"prompt": "a"}, "cmpl-")]:
            answer = await api.ask("POST", path, body, {"X-Request-Id": "job:7_a.b-c"})
            assert answer.headers["x-request-id"] == "job:7_a.b-c"
            assert json.loads(answer.body)["id"] == api.client.streams[-1].request_name == f"{prefix}job:7_a.b-c"
            answer = await api.ask("POST", path, {**body, "stream": True}, {"X-Request-Id": "s"})
            assert answer.headers["x-request-id"] == "s"
            assert http.parse_events(answer.body)[0]["id"] == f"{prefix}s"
            for bad in ("", "x" * 129, "a b", 'a"b', "ä"):
                answer = await api.ask("POST", path, body, {"X-Request-Id": bad})
                assert answer.status == 200 and "x-request-id" not in answer.headers
                assert len(json.loads(answer.body)["id"]) == len(prefix) + 32
        answer = await api.ask("POST", CHAT, {**HELLO, "n": 0}, {"X-Request-Id": "wrong"})
        assert answer.status == 400 and answer.headers["x-request-id"] == "wrong"

    asyncio.run(main())


def test_requests_are_logged_by_the_names_that_clients_see(caplog, monkeypatch):
    def said() -> list[str]:
        lines = [re.sub(r"\d+\.\d+ s$", "T", record.getMessage()) for record in caplog.records]
        caplog.clear()
        return lines

    async def main():
        silent, api = http.Api(), http.Api(log_requests=True)
        await silent.json("POST", CHAT, HELLO)
        assert said() == []
        _, answer = await api.json("POST", CHAT, {**HELLO, "temperature": 0.5, "stop": ["secret"]})
        name = answer["id"]
        assert said() == [
            f"request {name}: 19 prompt tokens, max_tokens=181, temperature=0.5",
            f"request {name}: stop, 19 prompt tokens, {NUM_TOKENS} output tokens, T",
        ]
        await api.ask("POST", COMPLETIONS, {"prompt": ["a", "bc"], "stream": True}, {"X-Request-Id": "x"})
        assert said() == [
            "request cmpl-x: 3 tokens in 2 prompts, max_tokens=16, streamed",
            f"request cmpl-x: stop, 3 tokens in 2 prompts, {2 * NUM_TOKENS} output tokens, T",
        ]
        api.client.speak = lambda stream: stream.end(EngineError("broken"))
        await api.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 5}, {"X-Request-Id": "x"})
        assert said()[1] == "request cmpl-x: error, 1 prompt tokens, 0 output tokens, T"
        api.client.speak = lambda stream: stream.push(Delta(0, "a", [1], num_tokens=1))
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True}, {"X-Request-Id": "gone"}))
        wire.connection.connection_lost(None)
        await settle()
        assert said()[1] == "request chatcmpl-gone: abort, 19 prompt tokens, 1 output tokens, T"

    caplog.set_level(logging.INFO, logger="quire.http")
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    asyncio.run(main())
