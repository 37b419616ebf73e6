"""A whole server with --limits: what keys may have, deadlines, and prefixes that no other key hears of."""

import contextlib
import hashlib
import http.client
import re
from collections.abc import Iterator

import pytest
from deadlines import DEADLINE_S
from serving import Answer, Served, encoded, until

from quire.frontend.http.limits.limits_file import read_limits

pytestmark = pytest.mark.slow

KEYS = "key-a", "key-b", "key-c"
NAMES = {"key-a": "crowd", "key-b": "few", "key-c": "slow"}
A, B, C = (hashlib.sha256(key.encode()).hexdigest() for key in KEYS)
LIMITS = f"""
{A}: {{name: crowd}}
{B}: {{name: few, max_running: 1, max_waiting: 0}}
{C}: {{name: slow, tokens_per_minute: 60}}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("limits")
    (folder / "keys").write_text("\n".join(KEYS))
    (folder / "limits.yaml").write_text(LIMITS)
    assert read_limits(str(folder / "limits.yaml")).has_file
    arguments = "--api-key-file", str(folder / "keys"), "--limits", str(folder / "limits.yaml"), "--max-num-seqs", "4"
    with Served(*arguments, "--request-timeout-s", "100") as served:
        yield served.ready()
        assert served.end() == 0


def complete(served: Served, key: str, prompt: str = "Once", **fields) -> Answer:
    body = {"prompt": prompt, "ignore_eos": True, "max_tokens": 4, **fields}
    return served.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})


@contextlib.contextmanager
def long_requests(served: Served, key: str, count: int) -> Iterator[None]:
    """Requests that run until the end of the context, when their client goes."""
    connections = [http.client.HTTPConnection(*served.address, timeout=DEADLINE_S) for _ in range(count)]
    for i, connection in enumerate(connections):
        body = {"prompt": f"{i} then", "max_tokens": 1900, "ignore_eos": True}
        connection.request("POST", "/v1/completions", *encoded(body, {"Authorization": f"Bearer {key}"}))
    try:
        until(lambda: tenants(served, "running").get(NAMES[key], 0) > 0)
        yield
    finally:
        for connection in connections:
            connection.close()
    until(lambda: NAMES[key] not in tenants(served, "running"))


def tenants(served: Served, what: str) -> dict[str, float]:
    text = served.ask("GET", "/metrics", None, {"Authorization": "Bearer key-a"}).body.decode()
    found = re.findall(rf'^quire:tenant_requests_{what}{{.*tenant="([^"]*)"}} (\S+)$', text, re.M)
    return {name: float(number) for name, number in found}


def test_a_key_gets_a_slot_beside_one_that_has_all(served):
    with long_requests(served, "key-a", 12):
        until(lambda: tenants(served, "running") == {"crowd": 4})
        answer = complete(served, "key-b")
        assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert tenants(served, "waiting")["crowd"] >= 8, "none of them has ended"


def test_what_a_key_may_not_have_is_429_with_a_time(served):
    with long_requests(served, "key-b", 1):
        answer = complete(served, "key-b")
        assert answer.status == 429 and 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.error["type"] == "rate_limit_error"
    while (answer := complete(served, "key-c", max_tokens=50)).status == 200:
        pass
    assert answer.status == 429 and "tokens a minute" in answer.error["message"]


def test_a_deadline_ends_a_request_and_is_not_tried_again(served):
    answer = complete(served, "key-a", max_tokens=1900, timeout=0.2)
    assert answer.status == 504 and answer.headers["x-should-retry"] == "false"
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer key-a", "X-Request-Timeout-S": "1.5"}
    answer = served.ask("POST", "/v1/completions", body, headers)
    assert b"deadline_exceeded" in answer.body


def test_no_key_hears_of_anothers_prefixes(served):
    prompt = "the patient has a secret illness and lives in the green house " * 8
    told = [
        complete(served, key, prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for key in ("key-a", "key-a", "key-b", "key-b")
    ]
    assert told[0] == told[2] == 0 and min(told[1], told[3]) > 0


def test_metrics_name_tenants_and_reasons(served):
    complete(served, "key-a", max_tokens=1900, timeout=0.1)
    text = served.ask("GET", "/metrics", None, {"Authorization": "Bearer key-a"}).body.decode()
    assert 'quire:requests_refused_total{model_name="quire-tiny",engine="0",reason="deadline_exceeded"}' in text
    assert not any(digest in text for digest in (A, B, C)) and not any(key in text for key in KEYS)


def test_an_error_in_the_file_is_said_at_the_start(tmp_path):
    (tmp_path / "limits.yaml").write_text(f"{A}: {{max_runing: 3}}")
    with Served("--limits", str(tmp_path / "limits.yaml")) as served:
        served.line("'max_runing' is none of name, weight")
        assert served.wait() == 2
