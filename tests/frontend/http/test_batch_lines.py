"""The parts of a batch by themselves: lines, requests without a connection, patience, and room for interactive requests."""

import asyncio
import json

import fake_client as http
import pytest
from fake_http import settle
from loop_gap import MOST_S, LoopGap
from replayed import Replayed

from quire.frontend.client.stream import EngineDown, EngineError, Overloaded
from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.batches.in_process import RetryingApp, ask
from quire.frontend.http.batches.lines import ENDPOINTS, MAX_LINE_BYTES, BadLine, Line, answer_line, parse_line
from quire.frontend.http.batches.runner import BatchRunner
from quire.frontend.http.batches.window import Window
from quire.ipc.messages.frontend import Heartbeat

CHAT = "/v1/chat/completions"


def chat(custom_id, **body):
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {**http.HELLO, **body}}


# ------------------------------------------------------------------------------------------------------------- requests
def test_a_request_waits_for_an_engine_with_room(tmp_path):
    async def main():
        api = http.Api()
        line = Line("a", CHAT, json.dumps(http.HELLO).encode())
        for error in (Overloaded("full"), EngineDown("gone")):
            api.client.submit_error, api.client.is_connected = error, False
            asking = asyncio.create_task(RetryingApp(api.app, api.client).ask(line))
            await settle()
            assert not asking.done()
            api.client.submit_error, api.client.is_connected = None, True
            assert (await asking).status == 200

    asyncio.run(main())


@pytest.mark.parametrize(("error", "num_asked"), [(EngineError("broken"), 1), (EngineDown("gone"), 3)])
def test_a_request_that_kills_the_engine_is_not_asked_for_ever(error, num_asked):
    async def main():
        api = http.Api()
        api.client.speak = lambda stream: stream.end(error)
        reply = await RetryingApp(api.app, api.client).ask(Line("a", CHAT, json.dumps(http.HELLO).encode()))
        assert reply.status >= 500 and len(api.client.streams) == num_asked

    asyncio.run(main())


def test_a_request_in_process_is_answered_as_over_http():
    async def main():
        api = http.Api()
        for body in ({**http.HELLO, "seed": 1}, {**http.HELLO, "n": 0}, b"{", []):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply, answer = await ask(api.app, Line("a", CHAT, data)), await api.ask("POST", CHAT, data)
            assert reply.status == answer.status
            ours, theirs = json.loads(reply.body), json.loads(answer.body)
            assert {**ours, "id": 0, "created": 0} == {**theirs, "id": 0, "created": 0}

    asyncio.run(main())


def test_endpoints_of_batches_are_routes():
    assert all("POST" in ROUTES.find(url.encode())[0] for url in ENDPOINTS)


def test_interactive_requests_find_room():
    async def main():
        client = http.FakeClient()  # 8 slots: 6 are for batches if nobody else wants them
        window = Window(client)

        def heartbeat(running, waiting):
            client.heartbeat = Heartbeat(1, 0.0, running, waiting, 0.25, 100, 40, 50, 2, 1, True)
            client.heartbeat_time += 1.0

        async def enter_while_there_is_room() -> int:
            count = 0
            while True:
                entering = asyncio.create_task(window.enter())
                await settle()
                if not entering.done():
                    entering.cancel()
                    return count
                count += 1

        heartbeat(0, 0)
        assert await enter_while_there_is_room() == 6
        for _ in range(6):
            window.leave()
        heartbeat(4, 0)  # others'
        assert await enter_while_there_is_room() == 2
        heartbeat(6, 0)
        assert await enter_while_there_is_room() == 0
        window.leave()
        heartbeat(5, 3)
        assert await enter_while_there_is_room() == 0
        window.leave()
        heartbeat(8, 3)
        assert await enter_while_there_is_room() == 1  # one always
        heartbeat(1, 0)
        assert await enter_while_there_is_room() == 5
        heartbeat(2, 4)  # all that waits is ours
        window.leave()
        assert await enter_while_there_is_room() == 1

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------------- lines
def test_lines():
    line = parse_line(json.dumps(chat("a", seed=5)).encode())
    assert (line.custom_id, line.url) == ("a", CHAT) and json.loads(line.body) == {**http.HELLO, "seed": 5}
    for data, code, custom_id in [
        (b"x", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": ' + b"[" * 100_000, "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"{}", "missing_required_parameter", None),
        (json.dumps(chat(5)).encode(), "invalid_type", None),
        (json.dumps(chat("")).encode(), "invalid_custom_id", None),
        (json.dumps({**chat("a"), "method": "GET"}).encode(), "invalid_method", "a"),
        (json.dumps({**chat("a"), "url": "/v1/files"}).encode(), "invalid_url", "a"),
        (json.dumps({**chat("a"), "body": 5}).encode(), "invalid_type", "a"),
        (json.dumps(chat("a", stream=True)).encode(), "invalid_value", "a"),
        (json.dumps(chat("a", background=True)).encode(), "invalid_value", "a"),
        (b'{"method": 5, "x": "\\ud800"}', "invalid_json_line", None),  # broken where the first error keeps it from being read
        (bytes(MAX_LINE_BYTES + 1), "line_too_long", None),
    ]:
        with pytest.raises(BadLine) as bad:
            parse_line(data)
        assert (bad.value.code, bad.value.custom_id) == (code, custom_id), bad.value.message


def test_an_answer_that_is_too_long_to_be_held_is_refused_and_holds_nobody_up():
    async def main():
        api = http.Api(Replayed(30_000))
        runner = BatchRunner(api.app, api.services.storage, api.client)
        body = {**http.HELLO, "logprobs": True, "top_logprobs": 20, "max_tokens": 30_000}
        async with LoopGap() as gap:
            reply = await runner._app.ask(Line("long", http.CHAT, json.dumps(body).encode()))
            answer_line("long", reply.request_id, reply.status, reply.body)
        assert reply.status == 400 and b"response_too_large" in reply.body and gap.worst_s < MOST_S
        assert (await api.ask("POST", http.CHAT, body)).status == 200  # over HTTP it goes in pieces
        await api.services.storage.close()

    asyncio.run(main())


def test_the_next_line_is_one_of_the_key_with_the_fewest_that_run():
    async def main():
        client = http.FakeClient()  # 6 of 8 slots are for batches
        window, entered = Window(client), []
        client.heartbeat = Heartbeat(1, 0.0, 0, 0, 0.25, 100, 40, 50, 2, 1, True)

        async def enter(owner):
            await window.enter(owner)
            entered.append(owner)

        tasks = [asyncio.create_task(enter("a")) for _ in range(9)]
        await settle()
        assert entered == ["a"] * 6
        tasks += [asyncio.create_task(enter("b")) for _ in range(3)]
        await settle()
        assert entered == ["a"] * 6 + ["b"], "a key has one line in any case"
        for _ in range(2):
            window.leave("a")
            await settle()
        assert entered[7:] == ["b"]
        window.leave("a")
        await settle()
        assert entered[8:] == ["b"]
        for task in tasks:
            task.cancel()

    asyncio.run(main())
