"""The terms of a request on every generating route: its deadline, its key's tenant and salt, and whether it may wait."""

import asyncio
import hashlib
import json
import math
import time

import fake_client as http
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO

from quire.frontend.client.stream import DeadlineExceeded, InvalidRequest
from quire.frontend.client.terms import Terms, share_of
from quire.frontend.http.batches.in_process import ask
from quire.frontend.http.batches.lines import Line
from quire.frontend.http.limits.limits_file import parse_limits
from quire.ipc.messages.frontend import Tenant

MESSAGE = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
ROUTES = [
    (CHAT, HELLO),
    (COMPLETIONS, {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi", "store": False}),
    ("/v1/messages", MESSAGE),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}}),
]
OLLAMAS = [
    ("/api/chat", {**HELLO, "stream": False}),
    ("/api/generate", {"prompt": "hi", "raw": True, "stream": False}),
]  # without fields of vLLM's

A, B = (hashlib.sha256(key).hexdigest() for key in (b"key-a", b"key-b"))
FILE = f"{A}: {{name: a, max_running: 2}}".encode()


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def terms(api, path, body, headers=None) -> Terms:
    status, answer = await api.json("POST", path, body, headers)
    assert status == 200, answer
    return api.client.streams[-1].options["terms"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_deadline_is_the_soonest_of_body_header_and_flag(path, body):
    async def main():
        api, capped = http.Api(), http.Api(request_timeout_s=5.0)
        cases = [
            (api, {}, None, math.inf),
            (api, {"timeout": 30}, None, 30),
            (api, {}, "20.5", 20.5),
            (api, {"timeout": 30}, "20", 20),
            (capped, {}, None, 5),
            (capped, {"timeout": 30}, "20", 5),
            (capped, {"timeout": 0.5}, None, 0.5),
        ]
        for which, more, header, expected in cases:
            before = time.monotonic()
            headers = {"X-Request-Timeout-S": header} if header else None
            found = await terms(which, path, {**body, **more}, headers)
            assert found.deadline == math.inf or before + expected <= found.deadline <= time.monotonic() + expected
            assert (found.deadline == math.inf) == (expected == math.inf) and found.is_bounded

    asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_timeout_that_is_none_is_refused_by_name(path, body):
    async def main():
        api = http.Api()
        for value in (0, -1, 1e400, "soon"):
            raw = json.dumps({**body, "timeout": value}).replace("Infinity", "1e400").encode()
            answer = await api.ask("POST", path, raw, {"Content-Type": "application/json"})
            assert answer.status == 400 and b"timeout" in answer.body, answer
        for value in ("0", "-1", "inf", "nan", "soon", ""):
            answer = await api.ask("POST", path, body, {"X-Request-Timeout-S": value})
            assert answer.status == 400 and b"x-request-timeout-s" in answer.body, answer
        assert not api.client.streams

    asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), [*ROUTES, *OLLAMAS])
def test_each_key_is_a_tenant_and_with_a_file_has_a_salt_of_its_own(path, body):
    async def main():
        keys = {"api_keys": ["key-a", "key-b"]}
        plain, limited = (
            http.Api(**keys),
            http.Api(**keys, key_limits=parse_limits(FILE)),
        )
        a, b = [await terms(plain, path, body, bearer(key)) for key in ("key-a", "key-b")]
        assert (a.tenant.name, b.tenant.name) == (A, B) and a.salt is b.salt is None
        a, b = [await terms(limited, path, body, bearer(key)) for key in ("key-a", "key-b")]
        assert a.tenant == Tenant("name a", "a", max_running=2) and b.tenant.max_running is None
        assert a.salt != b.salt and a.salted("x") != b.salted("x") != "x"
        assert (await terms(http.Api(), path, body)).tenant is None

    asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_priority_that_a_key_may_not_ask_for_is_refused(path, body):
    async def main():
        api = http.Api(api_keys=["key-a"], key_limits=parse_limits(b"'*': {best_priority: 0}"))
        status, answer = await api.json("POST", path, {**body, "priority": -1}, bearer("key-a"))
        assert status == 400 and "at least 0 for this API key" in answer["error"]["message"]
        assert (await terms(api, path, {**body, "priority": 1}, bearer("key-a"))).tenant.best_priority == 0

    asyncio.run(main())


def test_a_line_of_a_batch_may_wait():
    async def main():
        api = http.Api(api_keys=["key-a"], request_timeout_s=9.0)
        reply = await ask(api.app, Line("1", COMPLETIONS, b'{"prompt": "hi"}'), A)
        found = api.client.streams[-1].options["terms"]
        assert reply.status == 200 and not found.is_bounded and found.tenant.name == A

    asyncio.run(main())


def test_refusals_are_counted_by_their_code():
    async def main():
        api = http.Api()
        api.client.submit_error = DeadlineExceeded("too late")
        for _ in range(3):
            assert (await api.ask("POST", COMPLETIONS, {"prompt": "hi"})).status == 504
        text = (await api.ask("GET", "/metrics")).body.decode()
        assert 'quire:requests_refused_total{model_name="tiny",engine="0",reason="deadline_exceeded"} 3.0' in text
        assert 'reason="rate_limit_exceeded"} 0.0' in text

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------------- the struct
def test_a_salt_never_meets_that_of_another():
    own, other, shared = Terms(salt="key a"), Terms(salt="key b"), Terms(salt="shared x")
    salts = [terms.salted(text) for terms in (own, other, shared) for text in ("", "x", "key a\0", "\0x")]
    assert len(set(salts)) == len(salts) and all(len(salt) == 32 for salt in salts)
    assert own.salted("x") == Terms(salt="key a").salted("x") and Terms().salted("x") == "x"
    with pytest.raises(InvalidRequest, match="Unicode"):
        own.salted("\ud800")


def test_what_is_left_of_the_time():
    assert Terms().timeout_s() == 0.0
    assert 8.0 < Terms(deadline=time.monotonic() + 9.0).timeout_s() <= 9.0
    with pytest.raises(DeadlineExceeded):
        Terms(deadline=time.monotonic() - 0.1).timeout_s()


def test_each_of_several_engines_gets_its_share_of_the_limits():
    limits = Tenant("a", "a", 2.0, 10, 0, 600.0, 1)
    assert share_of(limits, 4) == Tenant("a", "a", 2.0, 3, 0, 150.0, 1)
    assert share_of(Tenant("b"), 4) == Tenant("b")
