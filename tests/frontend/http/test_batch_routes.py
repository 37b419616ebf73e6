"""Lines of batches for /v1/responses and /inference/v1/generate."""

import asyncio
import json

import fake_client as http
import pytest
from batch_api import CHAT, kept
from fake_http import settle

from quire.frontend.client.stream import EngineDown, EngineError, Overloaded
from quire.frontend.http.batches.in_process import RetryingApp
from quire.frontend.http.batches.lines import Line

RESPONSES, TOKENS = "/v1/responses", "/inference/v1/generate"
BODIES = {
    RESPONSES: ({"input": "hi"}, {"input": "hi", "temperature": -1}, "temperature"),
    TOKENS: ({"token_ids": [1, 2], "sampling_params": {}}, {"token_ids": [1], "sampling_params": {"top_p": 5}}, "top_p"),
}


@pytest.mark.parametrize("url", BODIES)
def test_other_routes_answer_lines_as_they_do_over_http(tmp_path, url):
    good, bad, param = BODIES[url]

    async def main():
        async with kept(tmp_path) as api:
            api.run()
            bodies = {"a": good, "b": bad, "c": good}
            lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, body in bodies.items()]
            batch = await api.until(await api.make(*lines, endpoint=url), "completed", "failed")
            assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1} and batch["endpoint"] == url
            output, errors = await api.lines(batch["output_file_id"]), await api.lines(batch["error_file_id"])
            _, over_http = await api.json("POST", url, good)
            changing = dict.fromkeys(("id", "request_id", "created", "created_at", "completed_at"))
            for line in output:
                answer, request_id = line["response"]["body"], line["response"]["request_id"]
                assert line["response"]["status_code"] == 200 and request_id in answer.get("id", answer.get("request_id"))
                assert without_ids({**answer, **changing}) == without_ids({**over_http, **changing})
            assert [line["custom_id"] for line in output] == ["a", "c"]
            assert [(e["custom_id"], e["response"]["status_code"]) for e in errors] == [("b", 400)]
            assert errors[0]["response"]["body"]["error"]["param"] == param
            wrong = await api.make({**lines[0], "body": {**good, "stream": True}}, lines[1] | {"url": CHAT}, endpoint=url)
            batch = await api.until(wrong, "completed", "failed")
            assert [e["code"] for e in batch["errors"]["data"]] == ["invalid_value", "mismatched_endpoint"]

    asyncio.run(main())


def without_ids(answer: dict) -> dict:
    """Items of a response have ids that are made anew."""
    return {**answer, "output": [{**item, "id": ""} for item in answer.get("output", [])]}


def test_responses_of_a_batch_are_kept_for_its_key_and_go_on_from_one_another(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            api.run()

            async def run(body):
                line = {"custom_id": "a", "method": "POST", "url": RESPONSES, "body": body}
                batch = await api.until(await api.make(line, endpoint=RESPONSES), "completed", "failed")
                return batch, (await api.lines(batch["output_file_id"] or batch["error_file_id"]))[0]["response"]

            _, first = await run({"input": "hi"})
            status, found = await api.json("GET", f"/v1/responses/{first['body']['id']}")
            assert status == 200 and found == first["body"]
            _, second = await run({"input": "and?", "previous_response_id": first["body"]["id"]})
            assert second["status_code"] == 200
            assert len(api.client.streams[-1].ids) > len(api.client.streams[0].ids)
            _, unkept = await run({"input": "hi", "store": False})
            assert (await api.ask("GET", f"/v1/responses/{unkept['body']['id']}")).status == 404
            _, lost = await run({"input": "hi", "previous_response_id": "resp_" + "0" * 32})
            assert lost["status_code"] == 400 and lost["body"]["error"]["param"] == "previous_response_id"

    asyncio.run(main())


@pytest.mark.parametrize("url", BODIES)
def test_a_line_that_the_engine_is_lost_with_is_asked_again_but_not_for_ever(url):
    async def main():
        api, error = http.Api(), EngineDown("gone")
        line, failures = Line("a", url, json.dumps(BODIES[url][0]).encode()), [error]

        def speak(stream) -> None:
            if failures:
                stream.end(failures.pop())
            else:
                http.FakeClient.say_output(api.client, stream)

        api.client.speak = speak
        assert (await RetryingApp(api.app, api.client).ask(line)).status == 200 and len(api.client.streams) == 2
        failures += [error] * 10
        reply = await RetryingApp(api.app, api.client).ask(line)
        assert reply.status >= 500 and len(api.client.streams) == 5 and b'"error"' in reply.body
        api.client.submit_error = Overloaded("full")
        asking = asyncio.create_task(RetryingApp(api.app, api.client).ask(line))
        await settle()
        assert not asking.done()
        failures.clear()
        api.client.submit_error = None
        assert (await asking).status == 200
        failures.append(EngineError("it was lost twice with this request"))
        assert (await RetryingApp(api.app, api.client).ask(line)).status == 500  # the engine has tried it again itself

    asyncio.run(main())
