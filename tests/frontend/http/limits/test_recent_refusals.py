"""RecentRefusals: a key that was refused is refused for a moment without asking the engine, and no other key is."""

import asyncio

import fake_client as http
import pytest
from fake_client import CHAT, HELLO

from quire.frontend.client.stream import Overloaded
from quire.frontend.http.limits.recent_refusals import HOLD_S, MOST_KEYS, RecentRefusals
from quire.frontend.http.protocol.errors import ApiError

FULL = ApiError(503, "full", code="overloaded", retry_after_s=7)


def test_a_refusal_holds_for_a_moment_and_for_its_key_alone():
    now = [10.0]
    refusals = RecentRefusals(lambda: now[0])
    refusals.check("a")
    refusals.note("a", FULL)
    refusals.check("b")
    for _ in range(3):
        with pytest.raises(ApiError) as error:
            refusals.check("a")
        assert (error.value.status, error.value.code, error.value.retry_after_s) == (503, "overloaded", 7)
    now[0] += HOLD_S
    refusals.check("a")


def test_it_remembers_a_bounded_number_of_keys():
    refusals = RecentRefusals(lambda: 0.0)
    for i in range(3 * MOST_KEYS):
        refusals.note(str(i), FULL)
    refusals.check("0")


def test_the_engine_is_not_asked_again_at_once():
    async def main():
        api = http.Api(api_keys=["key-a", "key-b"])
        error = Overloaded("full")
        error.retry_after_s = 9
        api.client.speak = lambda stream: stream.end(error)
        for _ in range(5):
            answer = await api.ask("POST", CHAT, HELLO, {"Authorization": "Bearer key-a"})
            assert (answer.status, answer.headers["retry-after"]) == (503, "9")
        assert len(api.client.streams) == 1
        assert 'reason="overloaded"} 5.0' in (await api.ask("GET", "/metrics", None, {"x-api-key": "key-a"})).body.decode()
        api.client.speak = api.client.say_output
        assert (await api.ask("POST", CHAT, HELLO, {"Authorization": "Bearer key-b"})).status == 200

    asyncio.run(main())
