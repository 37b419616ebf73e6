"""Responses that are kept: going on from them, reading and deleting them, whose they are, and those in the background."""

import asyncio
import json

import fake_client as http
import openai.types.responses as reference
import pytest
from fake_client import FakeClient
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList
from responses_cases import HERMES, RESPONSES, create, refusal, said, serving, stream

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import EngineError
from quire.frontend.http.api.responses import background, records
from quire.frontend.http.store.storage import Storage

A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
KEYS = ["a", "b"]


def path(answer, rest=""):
    return f"{RESPONSES}/{answer['id']}{rest}"


async def status_of(api, answer):
    status, found = await api.json("GET", path(answer))
    assert status == 200
    return found["status"]


def test_a_kept_response_is_read_as_it_was_answered():
    async def main():
        async with serving() as api:
            answer = await create(api, {"input": "hi", "include": ["message.output_text.logprobs"]})
            assert await api.json("GET", path(answer)) == (200, answer)
            last = (await stream(api, {"input": "hi"}))[-1]["response"]
            assert await api.json("GET", path(last)) == (200, last)
            assert await api.json("DELETE", path(answer)) == (
                200,
                {"id": answer["id"], "object": "response", "deleted": True},
            )
            for method in ("GET", "DELETE"):
                status, error = await api.json(method, path(answer))
                assert status == 404 and error["error"]["code"] == "not_found"
            unkept = await create(api, {"input": "hi", "store": False})
            assert (await api.ask("GET", path(unkept))).status == 404 and unkept["store"] is False
            assert (await api.ask("GET", path(last, "?stream=true"))).status == 400

    asyncio.run(main())


def test_a_conversation_goes_on():
    async def main():
        async with serving() as api:
            first = await create(api, {"input": "one", "instructions": "be brief"})
            second = await create(api, {"input": "two", "previous_response_id": first["id"]})
            assert said(api) == f"<user>one<assistant>{FakeClient.OUTPUT}<user>two<assistant>"  # instructions do not go on
            await api.ask("DELETE", path(first))
            last = (await stream(api, {"input": "three", "previous_response_id": second["id"], "instructions": "S"}))[-1]
            out = FakeClient.OUTPUT
            assert said(api) == f"<system>S<user>one<assistant>{out}<user>two<assistant>{out}<user>three<assistant>"
            assert last["response"]["previous_response_id"] == second["id"]
            for wrong in (first["id"], "resp_0", "x", "\n"):
                error = await refusal(api, {"input": "x", "previous_response_id": wrong})
                assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")

    asyncio.run(main())


def test_the_round_trip_of_a_call():
    async def main():
        async with serving('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', HERMES) as api:
            tools = {"tools": [{"type": "function", "name": "f"}]}
            first = await create(api, {"input": "hi", **tools})
            (call,) = first["output"]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
            await create(api, {"input": [output], "previous_response_id": first["id"], **tools})
            assert said(api) == "<user>hi<assistant><tool>42[1 tools]<assistant>"
            missing = await refusal(api, {"input": [output], **tools})
            assert "call_id" in missing["message"] and missing["param"] == "input"

    asyncio.run(main())


def test_items_are_listed_and_referred_to():
    async def main():
        async with serving() as api:
            call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            output = {"type": "function_call_output", "call_id": "c", "output": "42"}
            thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
            first = await create(api, {"input": [{"role": "developer", "content": "D"}, thought, call, output]})
            second = await create(api, {"input": "two", "previous_response_id": first["id"]})
            status, page = await api.json("GET", path(second, "/input_items?order=asc"))
            listed = ResponseItemList.model_validate(page)
            assert status == 200 and not listed.has_more
            assert [item.type for item in listed.data] == [
                "message", "reasoning", "function_call", "function_call_output", "message", "message",
            ]  # fmt: skip
            ids, seen, after = [item.id for item in listed.data], [], ""
            while True:
                _, page = await api.json("GET", path(second, f"/input_items?limit=4{after}"))
                seen += [item["id"] for item in page["data"]]
                after = f"&after={page['last_id']}"
                if not page["has_more"]:
                    break
            assert seen == ids[::-1] and len(set(ids)) == 6
            assert (await api.ask("GET", path(second, "/input_items?after=nobody"))).status == 400
            message = first["output"][0]["id"]
            refer = [{"type": "item_reference", "id": message}, {"id": ids[5]}, {"role": "user", "content": "and?"}]
            await create(api, {"input": refer})
            assert said(api) == f"<assistant>{FakeClient.OUTPUT}<user>two<user>and?<assistant>"
            again = [{"type": "item_reference", "id": ids[0]}]
            await create(api, {"input": again, "previous_response_id": second["id"]})
            assert said(api).endswith("<system>D<assistant>")

    asyncio.run(main())


def test_nobody_sees_anothers():
    async def main():
        async with serving(api_keys=KEYS) as api:
            mine = await create(api, {"input": "secret"}, A)
            assert (await api.ask("GET", path(mine), headers=A)).status == 200
            for method, rest in [("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")]:
                assert (await api.ask(method, path(mine, rest), headers=B)).status == 404, (method, rest)
            for body in ({"input": "x", "previous_response_id": mine["id"]},
                         {"input": [{"type": "item_reference", "id": mine["output"][0]["id"]}]}):  # fmt: skip
                assert (await refusal(api, body, B))["code"] in ("previous_response_not_found", "item_not_found")
            assert (await api.ask("GET", path(mine))).status == 401
            assert (await api.ask("GET", path(mine), headers=A)).status == 200

    asyncio.run(main())


def test_what_cannot_be_kept_is_answered_all_the_same(monkeypatch, caplog):
    async def main():
        async with serving() as api:
            monkeypatch.setattr(records, "_MAX_BYTES", 500)
            answer = await create(api, {"input": "hi"})
            assert answer["store"] is False and answer["status"] == "completed" and "too large" in caplog.text
            assert (await api.ask("GET", path(answer))).status == 404
            answer = await create(api, {"input": "hi" * 9, "background": False})
            assert answer["store"] is False

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------ in the background
async def until_it_ends(api, answer):
    task = api.services.state.background.get(answer["id"])
    if task is not None:
        await asyncio.wait([task])


def test_a_response_in_the_background():
    async def main():
        async with serving() as api:
            api.client.speak = None
            begun = await create(api, {"input": "hi", "background": True})
            assert begun["status"] == "queued" and begun["background"] and begun["output"] == []
            assert await status_of(api, begun) == "in_progress"
            error = await refusal(api, {"input": "x", "previous_response_id": begun["id"]})
            assert error["code"] == "response_in_progress"
            api.client.say_output(api.client.streams[0])
            await until_it_ends(api, begun)
            status, done = await api.json("GET", path(begun))
            assert status == 200 and done["status"] == "completed" and done["usage"]["output_tokens"] == http.NUM_TOKENS
            assert Response.model_validate(done).output_text == FakeClient.OUTPUT
            assert await api.json("POST", path(begun, "/cancel")) == (200, done)  # it has ended
            api.client.speak = api.client.say_output
            await create(api, {"input": "on", "previous_response_id": begun["id"]})
            assert said(api).startswith("<user>hi<assistant>Gr")
            foreground = await create(api, {"input": "hi"})
            status, error = await api.json("POST", path(foreground, "/cancel"))
            assert status == 400 and "background" in error["error"]["message"]
            assert not api.services.state.background

    asyncio.run(main())


def test_it_is_cancelled_and_deleted():
    async def main():
        async with serving() as api:
            api.client.speak = None
            gone = await create(api, {"input": "hi", "background": True})
            assert (await api.ask("DELETE", path(gone))).status == 200
            await until_it_ends(api, gone)
            assert api.client.streams.pop().cancelled and (await api.ask("GET", path(gone))).status == 404
            begun = await create(api, {"input": "hi", "background": True})
            status, answer = await api.json("POST", path(begun, "/cancel"))
            assert status == 200 and answer["status"] == "cancelled"
            await api.client.until(lambda: api.client.streams[0].cancelled)
            await until_it_ends(api, begun)
            assert await api.json("GET", path(begun)) == (200, answer)
            assert await api.json("POST", path(begun, "/cancel")) == (200, answer)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
def test_another_frontend_ends_it(how, monkeypatch, tmp_path):
    async def main():
        monkeypatch.setattr(background, "_LOOK_S", 0.01)
        async with serving(storage=Storage(str(tmp_path))) as api, serving(storage=Storage(str(tmp_path))) as other:
            api.client.speak = None
            begun = await create(api, {"input": "hi", "background": True})
            assert await status_of(other, begun) == "in_progress"
            if how == "cancelled":
                assert (await other.json("POST", path(begun, "/cancel")))[1]["status"] == "cancelled"
            else:
                assert (await other.ask("DELETE", path(begun))).status == 200
            await api.client.until(lambda: api.client.streams[0].cancelled)
            await until_it_ends(api, begun)
            status, answer = await other.json("GET", path(begun))
            assert (status, answer.get("status")) == ((200, "cancelled") if how == "cancelled" else (404, None))

    asyncio.run(main())


def test_it_fails_and_says_so():
    async def main():
        async with serving() as api:
            api.client.speak = None
            begun = await create(api, {"input": "hi", "background": True})
            api.client.streams[0].push(Delta(0, "Hal", [1], num_tokens=1))
            api.client.streams[0].end(EngineError("a worker died"))
            await until_it_ends(api, begun)
            _, answer = await api.json("GET", path(begun))
            assert answer["status"] == "failed" and answer["error"]["code"] == "server_error"
            stopped = await create(api, {"input": "hi", "background": True})
            await background.end_all(api.services)
            _, answer = await api.json("GET", path(stopped))
            assert answer["status"] == "failed" and "shutting down" in answer["error"]["message"]
            assert api.client.streams[-1].cancelled

    asyncio.run(main())


def test_one_whose_server_was_killed_has_failed(tmp_path):
    async def main():
        now = [1000.0]
        storage = Storage(str(tmp_path), clock=lambda: now[0])
        async with serving(storage=storage) as api:
            api.client.speak = None
            begun = await create(api, {"input": "hi", "background": True})
            task = api.services.state.background[begun["id"]]
            now[0] += records.ABANDONED_S - 1
            assert await status_of(api, begun) == "in_progress"
            now[0] += 2  # and nobody has touched it
            _, answer = await api.json("GET", path(begun))
            assert answer["status"] == "failed" and "stopped" in answer["error"]["message"]
            reference.Response.model_validate(answer)
            task.cancel()
            await asyncio.wait([task])
            assert await api.json("GET", path(begun)) == (200, answer)

    asyncio.run(main())


def test_only_so_many_run_in_the_background(monkeypatch):
    async def main():
        monkeypatch.setattr(background, "MAX_RUNNING", 1)
        async with serving() as api:
            api.client.speak = None
            await create(api, {"input": "hi", "background": True})
            assert (await api.ask("POST", RESPONSES, {"input": "hi", "background": True})).status == 503

    asyncio.run(main())


def test_a_batch_asks_for_responses():
    """Its answers are kept for the key that made it."""
    from quire.frontend.http.batches.in_process import ask
    from quire.frontend.http.batches.lines import parse_line

    async def main():
        async with serving(api_keys=KEYS) as api:
            line = {"custom_id": "1", "method": "POST", "url": RESPONSES, "body": {"input": "hi"}}
            reply = await ask(api.app, parse_line(json.dumps(line).encode()), "owner")
            assert reply.status == 200 and Response.model_validate_json(reply.body).output_text == FakeClient.OUTPUT
            assert await api.services.storage.get("response", "owner", json.loads(reply.body)["id"]) is not None

    asyncio.run(main())
