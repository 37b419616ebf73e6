"""HAProxy and nginx, as deploy/ has them, before two real servers: affinity, streams, and a drain without a failed request."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from balancers import Balancer, Load
from serving import SMALL, Served, until

pytestmark = pytest.mark.deploy

BOTH = pytest.mark.parametrize("name", ["haproxy", "nginx"])
STORY = {"prompt": "Once upon a time", "ignore_eos": True}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Served]]:
    with Served(*SMALL) as one, Served(*SMALL) as two:
        yield [one.ready(), two.ready()]


def answered(served: Served, path: str = "/v1/completions") -> float:
    text = served.ask("GET", "/metrics").body.decode()
    found = re.findall(rf'^http_requests_total{{handler="{path}".*?}} (\S+)$', text, re.M)
    return sum(map(float, found))


@BOTH
def test_the_file_is_right_by_the_programs_own_judgement(name: str, tmp_path: Path) -> None:
    Balancer(name, tmp_path, [("127.0.0.1", 1), ("127.0.0.1", 2)]).check()


@BOTH
def test_sessions_and_keys_stay_and_others_are_spread(name: str, tmp_path: Path, servers: list[Served]) -> None:
    with Balancer(name, tmp_path, [s.address for s in servers]).running() as balancer:

        def spread(*headers: dict[str, str]) -> list[float]:
            before = [answered(s) for s in servers]
            for some in headers:
                assert balancer.ask("POST", "/v1/completions", {**STORY, "max_tokens": 1}, **some)[0] == 200
            return [answered(s) - b for s, b in zip(servers, before, strict=True)]

        for session in ("a", "b", "c"):
            assert sorted(spread(*[{"X-Session-Id": session}] * 6)) == [0, 6]
        assert sorted(spread(*[{"Authorization": "Bearer k"}] * 6)) == [0, 6]
        assert min(spread(*[{}] * 40)) > 0
        assert min(spread(*[{"X-Session-Id": str(i)} for i in range(40)])) > 0


@BOTH
def test_tokens_come_as_they_are_made_and_large_bodies_pass(name: str, tmp_path: Path, servers: list[Served]) -> None:
    with Balancer(name, tmp_path, [s.address for s in servers]).running() as balancer:
        connection, began = balancer.connection(), time.monotonic()
        body = b'{"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "stream": true}'
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        first_s = time.monotonic() - began
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert first_s < (time.monotonic() - began) / 2
        connection.close()
        status, answer = balancer.ask("POST", "/v1/completions", {"prompt": "a " * 3_000_000})
        assert (status == 400 and b"context_length_exceeded" in answer) or status == 413, answer
        assert balancer.ask("GET", "/metrics")[0] == 404


@BOTH
def test_without_a_server_it_says_so_in_openais_form(name: str, tmp_path: Path) -> None:
    with Served(*SMALL) as only, Balancer(name, tmp_path, [only.ready().address, ("127.0.0.1", 9)]).running() as balancer:
        assert only.end() == 0
        until(lambda: balancer.ask("POST", "/v1/completions", STORY)[0] != 200)
        status, answer = balancer.ask("POST", "/v1/completions", STORY)
        assert status == 503 and json.loads(answer)["error"]["code"] == "overloaded"


@BOTH
def test_a_server_drains_under_load_and_no_request_fails(name: str, tmp_path: Path, servers: list[Served]) -> None:
    with (
        Served(*SMALL, "--drain-delay-s", "3") as leaving,
        Balancer(name, tmp_path, [leaving.ready().address, servers[0].address]).running() as balancer,
        Load(balancer, 6) as load,
    ):
        load.until_more(30)
        assert answered(leaving) > 0
        assert leaving.end() == 0
        load.until_more(30)
    assert load.failures == []
    assert load.num_answers > 60
