"""The Messages API where something is wrong: refused fields, errors in Anthropic's shape, failing and silent streams, keys."""

import json

import fake_client as http
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from anthropic.types.shared import ErrorResponse
from fake_http import settle
from loop_gap import MOST_S, LoopGap
from messages_cases import CLOCK, COUNT, HELLO, PATH, TOOLS, accumulated, api_of, parse_named, run
from messages_fields import FIELDS

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import EngineDown, EngineError, InvalidRequest, Overloaded
from quire.frontend.http.api.messages import stream
from quire.frontend.http.api.messages.schemas import CountTokensRequest, MessagesRequest, NotHere
from quire.frontend.http.api.output_plan import ParserNames


def media(kind):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, "source": {}}]}]}


def said(*blocks, role="user"):
    content = blocks[0] if isinstance(blocks[0], str) else list(blocks)
    return {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": content}]}


CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    *((media(kind), "messages[0].content[1]") for kind in ("image", "document", "search_result", "nonsense")),
    (said({"type": "tool_result"}), "messages[1].content[0].tool_use_id"),
    (said({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}), "messages[1].content[0].content[0]"),
    (said({"type": "tool_use"}), "messages[1].content[0]"),
    (said({"type": "text"}), "messages[1].content[0].text"),
    (said({**CALL, "name": None}, role="assistant"), "messages[1].content[0].name"),
    (said({"type": "tool_result", "tool_use_id": "x"}, role="assistant"), "messages[1].content[0]"),
    (said(CALL, role="assistant"), "tool_result"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"tools": [{"type": "robot", "name": "x"}]}, "tools[0].type"),
    (
        {
            "tools": [CLOCK, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "tool_choice.name",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**CLOCK, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
    ({"tools": [{**CLOCK, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 60}}, "max_tokens"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
    (
        {**said("b", role="assistant"), "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format",
    ),
    ({**said("b", role="assistant"), "thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
]


@pytest.mark.parametrize(("extra", "named"), REFUSED, ids=[json.dumps(e)[:60] for e, _ in REFUSED])
def test_what_is_refused_is_named(extra, named):
    async def main():
        for streamed in (False, True):
            api = api_of()
            status, answer = await api.json("POST", PATH, {**HELLO, **extra, "stream": streamed})
            error = ErrorResponse.model_validate(answer, strict=True)
            assert status == 400 and error.error.type == "invalid_request_error" and named in error.error.message, answer
            assert not api.client.streams

    run(main)


def test_what_the_engine_says_of_a_schema_names_its_place():
    async def main():
        api = api_of()
        api.client.speak = lambda s: s.end(InvalidRequest("response_format.json_schema.schema: bad"))
        status, answer = await api.json("POST", PATH, HELLO)
        assert (status, answer["error"]["message"]) == (400, "output_config.format.schema: bad.")

    run(main)


def test_what_is_large_keeps_nobody_waiting():
    """What messages have that chats have not; decoding, templates and tokens are theirs."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "text", "text": "y"}]}] * 8000
    large = {**CALL, "input": {"x": [1] * 500_000}}
    cases = [
        ({"messages": turns}, "prompt is too long"),
        (said(large, role="assistant"), "tool_result"),
        ({"container": [1] * 900_000}, "container"),
        ({"output_config": {"effort": "x" * 3_000_000}}, "output_config.effort"),
    ]

    async def main():
        api = api_of()
        for extra, named in cases:
            body = json.dumps({**HELLO, **extra}).encode()
            async with LoopGap() as gap:
                status, answer = await api.json("POST", PATH, body)
            assert status == 400 and named in answer["error"]["message"] and len(answer["error"]["message"]) < 2000
            assert gap.worst_s < MOST_S

    run(main)


def test_fields_are_those_of_the_table_and_of_the_package():
    here = {f.name: f for f in FIELDS}
    assert len(here) == len(FIELDS) and here.keys() >= set(MessagesRequest.__struct_fields__)
    assert here.keys() >= set(MessageCreateParamsBase.__annotations__) - {"user_profile_id", "workspace_id"}  # headers
    assert here.keys() >= set(MessageCountTokensParams.__annotations__) - {"user_profile_id", "workspace_id"}
    assert {f.name for f in FIELDS if f.routes == "both"} == set(CountTokensRequest.__struct_fields__)
    assert {f.name for f in FIELDS if f.treatment == "refused"} == set(NotHere.__struct_fields__)

    async def main():
        api = http.Api()
        for name in NotHere.__struct_fields__:
            for path in (PATH, COUNT):
                status, answer = await api.json("POST", path, {**HELLO, name: {"some": ["value"]}})
                assert status == 400 and name in answer["error"]["message"]
                assert (await api.json("POST", path, {**HELLO, name: {}}))[0] == 200
                for odd in (b"1e400", b'"\\ud800"', b"[[1e400]]"):  # JSON in form, and no value
                    raw = json.dumps({**HELLO, name: "@"}).encode().replace(b'"@"', odd)
                    assert (await api.json("POST", path, raw))[0] == 400, (name, odd)
        keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        harmless = {"context_management": keep, "speed": "standard", "metadata": {"user_id": "u"}, "service_tier": "auto",
                    "cache_control": {"type": "ephemeral"}, "container": None, "mcp_servers": []}  # fmt: skip
        assert (await api.json("POST", PATH + "?beta=true", {**HELLO, **harmless}))[0] == 200

    run(main)


def test_errors_have_anthropics_shape_wherever_they_come_from():
    async def main():
        api = http.Api(api_keys=["k"])
        key = {"x-api-key": "k"}
        cases = [
            (401, "authentication_error", "POST", PATH, HELLO, {}),
            (401, "authentication_error", "POST", COUNT, HELLO, {"x-api-key": "j"}),
            (404, "not_found_error", "POST", PATH, {**HELLO, "model": "other"}, key),
            (404, "not_found_error", "POST", PATH + "/batches", {}, key),
            (405, "invalid_request_error", "GET", PATH, None, key),
            (400, "invalid_request_error", "POST", PATH, b"{", key),
            (413, "request_too_large", "POST", PATH, b"x" * (1 << 25), key),
            (415, "invalid_request_error", "POST", PATH, HELLO, {**key, "Content-Type": "text/plain"}),
        ]
        for status, kind, method, path, body, headers in cases:
            answer = await api.ask(method, path, body, headers)
            error = json.loads(answer.body)
            assert (answer.status, error["type"], error["error"]["type"]) == (status, "error", kind), answer
            assert error["error"]["message"] and error["request_id"] == answer.headers["request-id"]
            assert error.keys() == {"type", "error", "request_id"} and error["error"].keys() == {"type", "message"}
        raised = [
            (EngineDown("x"), 503, "api_error"),
            (ValueError("x"), 500, "api_error"),
            (Overloaded("x"), 529, "overloaded_error"),  # the last one: for a moment a refused key is refused at once
        ]
        for failure, status, kind in raised:
            api.client.submit_error = failure
            answer = await api.ask("POST", PATH, HELLO, key)
            assert (answer.status, json.loads(answer.body)["error"]["type"]) == (status, kind)
        assert "request-id" not in (await api.ask("POST", http.CHAT, {}, key)).headers

    run(main)


def test_either_header_brings_a_key():
    async def main():
        api = http.Api(api_keys=["k", "other"])
        right, wrong = {"Authorization": "Bearer k"}, {"Authorization": "Bearer x"}
        for path, body in ((PATH, HELLO), (http.CHAT, http.HELLO)):
            for headers in ({"x-api-key": "k"}, right, {**wrong, "x-api-key": "k"}, {**right, "x-api-key": "x"}):
                assert (await api.ask("POST", path, body, headers)).status == 200, headers
            for headers in ({}, wrong, {"x-api-key": ""}, {"x-api-key": "kk"}, {"Authorization": "Basic k"}):
                assert (await api.ask("POST", path, body, headers)).status == 401, headers
        empty = http.Api(api_keys=[""])
        assert (await empty.ask("POST", PATH, HELLO)).status == 401

    run(main)


def test_a_prompt_too_long_says_what_clients_look_for():
    async def main():
        api = http.Api()
        for size, path in ((300, PATH), (400_000, PATH), (400_000, COUNT)):
            body = {**HELLO, "messages": [{"role": "user", "content": "x" * size}]}
            status, answer = await api.json("POST", path, body)
            assert status == 400 and answer["error"]["message"].startswith("prompt is too long: "), answer
        status, answer = await api.json("POST", COUNT, {"messages": [{"role": "user", "content": "x" * 300}]})
        assert status == 200 and answer["input_tokens"] > 300

    run(main)


async def begun(api, body):
    """A request whose answer has begun, and its stream."""
    wire = api.wire()
    wire.feed(api.encode("POST", PATH, body))
    await api.client.until(lambda: api.client.streams)
    return wire, api.client.streams[0]


def test_a_failure_amid_a_stream_is_its_last_event():
    async def main():
        api = http.Api()
        api.client.speak = None
        wire, sent = await begun(api, {**HELLO, "stream": True})
        sent.push(Delta(0, "One", [5], None, None, None, 1))
        sent.end(EngineError("broken"))
        await settle()
        (answer,) = wire.answers()
        events = parse_named(answer.body)
        assert answer.complete and events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
        assert events[-1]["request_id"] == answer.headers["request-id"]

    run(main)


def test_a_server_that_stops_says_so_amid_a_stream():
    async def main():
        api = http.Api()
        api.client.speak = None
        wire, sent = await begun(api, {**HELLO, "stream": True})
        sent.push(Delta(0, "One", [5], None, None, None, 1))
        await settle()
        wire.connection.cancel()
        await settle()
        events = parse_named(wire.answers()[0].body)
        assert events[-1]["error"] == {"type": "api_error", "message": "The server is shutting down."} and sent.cancelled

    run(main)


def test_threads_are_refused_so_that_clients_go_on_without():
    async def main():
        status, answer = await http.Api().json("POST", PATH, {**HELLO, "thread": {"type": "create"}})
        assert status == 400 and answer["error"]["details"] == {"error_code": "thread_unsupported_request"}

    run(main)


def test_a_client_that_goes_ends_its_request():
    async def main():
        for streamed in (False, True):
            api = http.Api()
            api.client.speak = None
            wire, sent = await begun(api, {**HELLO, "stream": streamed})
            sent.push(Delta(0, "One", [5], None, None, None, 1))
            await settle()
            wire.transport.close()
            await settle()
            assert sent.cancelled

    run(main)


def test_a_silent_stream_pings(monkeypatch):
    async def main():
        api = http.Api()
        api.client.speak = None
        wire, sent = await begun(api, {**HELLO, "stream": True})
        sent.push(Delta(0, "One", [5], None, None, None, 1))
        while wire.transport.sent.count(stream.PING) < 3:  # the first follows the beginning
            wire.transport.written.clear()
            await wire.transport.written.wait()
        sent.push(Delta(0, " two", [6], None, "stop", None, 2))
        sent.end()
        await settle()
        (answer,) = wire.answers()
        assert accumulated(parse_named(answer.body)).content[0].text == "One two"

    monkeypatch.setattr(stream, "PING_S", 0.01)
    run(main)


def test_tools_need_a_parser_and_say_so():
    async def main():
        status, answer = await api_of(parsers=ParserNames("none")).json("POST", PATH, TOOLS)
        assert status == 400 and "--tool-call-parser" in answer["error"]["message"]
        assert "tool_choice of type 'any' or 'tool'" in answer["error"]["message"]

    run(main)
