"""POST /v1/messages over the real application: answers and streams as the anthropic package reads them, and what is refused."""

import asyncio
import json

import fake_client as http
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from anthropic.types.shared import ErrorResponse
from fake_http import settle
from pydantic import TypeAdapter

from quire.frontend.client.async_client import EngineDown, Overloaded
from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import EngineError
from quire.frontend.http.api.defaults import RequestDefaults
from quire.frontend.http.api.messages import stream
from quire.frontend.http.api.messages.field_table import FIELDS
from quire.frontend.http.api.messages.schemas import CountTokensRequest, MessagesRequest, NotHere
from quire.frontend.http.api.output_plan import ParserNames

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
SAID = {"messages": [{"role": "user", "content": "hi"}]}
HELLO = {"model": "tiny", "max_tokens": 60, **SAID}
HERMES = http.TEMPLATE + "{# <tool_call></tool_call> #}"
QWEN3 = (
    HERMES
    + "{# <think></think> #}{% if enable_thinking is false %}<think></think>{% endif %}{% if opens %}<think>\n{% endif %}"
)
WEATHER = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}}
TOOLS = {**HELLO, "tools": [WEATHER, CLOCK]}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn ✓"}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
_EVENT = TypeAdapter(RawMessageStreamEvent)


def run(main) -> None:
    asyncio.run(main())


def api_of(template=HERMES, output=ONE, special=(), **options):
    client = http.FakeClient(template=template, special=special)
    client.OUTPUT = output
    return http.Api(client, **options)


def parse_named(body: bytes) -> list[dict]:
    """Server-sent events with names, each that of its JSON."""
    events = []
    *texts, end = body.decode().split("\n\n")
    assert end == ""
    for text in texts:
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}" and "\r" not in text
    return events


async def events_of(api, body) -> list[dict]:
    answer = await api.ask("POST", PATH, {**body, "stream": True})
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer
    return parse_named(answer.body)


def accumulated(events: list[dict]) -> Message:
    """The message that Anthropic's client makes of a stream; every event must be of its types, and blocks well nested."""
    message, buffers, opened = None, {}, None
    for event in events:
        if event["type"] == "ping":
            continue
        typed = _EVENT.validate_python(event)
        match event["type"]:
            case "content_block_start":
                assert opened is None and event["index"] == len(message.content)
                opened = event["index"]
            case "content_block_delta" | "content_block_stop":
                assert opened == event["index"]
                opened = None if event["type"] == "content_block_stop" else opened
        message = accumulate_event(event=typed, current_snapshot=message, json_bufs=buffers)
    assert [e["type"] for e in events[:1] + events[-2:]] == ["message_start", "message_delta", "message_stop"]
    assert opened is None
    return message


def plain(message: Message) -> dict:
    data = {**message.model_dump(exclude_none=True), "id": ""}
    data["usage"].pop("service_tier")
    for block in data["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            assert block["id"].startswith("toolu_")
            block["id"] = ""
    return data


async def both(api, body) -> Message:
    """An answer in one piece and a stream, which must be alike."""
    status, answer = await api.json("POST", PATH, body)
    assert status == 200, answer
    whole = Message.model_validate(answer, strict=True)
    assert plain(accumulated(await events_of(api, body))) == plain(whole)
    return whole


def chat_of(api) -> str:
    """The prompt that the engine got."""
    return api.client.tokenizer.decode(api.client.streams[-1].ids, skip_special_tokens=False)


def params_of(api):
    return api.client.streams[-1].params


# ------------------------------------------------------------------------------------------------------------- answers
def test_an_answer_and_a_stream_in_anthropics_shape():
    async def main():
        api = http.Api()
        message = await both(api, HELLO)
        assert [(b.type, b.text) for b in message.content] == [("text", http.FakeClient.OUTPUT)]
        assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "end_turn")
        usage = message.usage
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 0)
        assert usage.input_tokens == len(api.client.streams[-1].ids) - 4 and usage.output_tokens == http.NUM_TOKENS
        answer = await api.ask("POST", PATH, HELLO, {"X-Request-Id": "abc", "anthropic-version": "2023-06-01"})
        assert answer.headers["request-id"] == "req_abc" and json.loads(answer.body)["id"] == "msg_abc"

    run(main)


@pytest.mark.parametrize(
    ("output", "extra", "content", "reason"),
    [
        (ONE, {}, [("weather", {"city": "Bonn ✓"})], "tool_use"),
        ("Let me see.\n" + ONE, {}, ["Let me see.\n", ("weather", {"city": "Bonn ✓"})], "tool_use"),
        (TWO, {}, [("weather", {"city": "Bonn ✓"}), ("clock", {})], "tool_use"),
        (TWO + " So.", {}, [("weather", {"city": "Bonn ✓"}), ("clock", {}), " So."], "tool_use"),
        (TWO, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, [("weather", {"city": "Bonn ✓"})],
         "tool_use"),
        (ONE, {"tool_choice": {"type": "none"}}, [ONE], "end_turn"),
        ("It is noon.", {"tool_choice": {"type": "auto"}}, ["It is noon."], "end_turn"),
        ('{"city": "X"}', {"tool_choice": {"type": "tool", "name": "weather"}}, [("weather", {"city": "X"})], "tool_use"),
        ('[{"name": "clock", "parameters": {}}]', {"tool_choice": {"type": "any"}}, [("clock", {})], "tool_use"),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "B", "x": [1, 2', {}, [("weather", {"city": "B", "x": [1, 2]})],
         "tool_use"),
        (" \n", {}, [], "end_turn"),
        ("\n Yes", {}, ["\n Yes"], "end_turn"),
    ],
)  # fmt: skip
def test_calls_and_texts_are_blocks(output, extra, content, reason):
    async def main():
        message = await both(api_of(output=output), {**TOOLS, **extra})
        assert [b.text if b.type == "text" else (b.name, b.input) for b in message.content] == content
        assert message.stop_reason == reason

    run(main)


def test_input_streams_as_it_comes():
    async def main():
        events = await events_of(api_of(), TOOLS)
        pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
        assert len(pieces) > 10 and json.loads("".join(pieces)) == {"city": "Bonn ✓"}
        assert events[0]["message"]["content"] == [] and events[1] == {"type": "ping"}

    run(main)


def test_thoughts_are_blocks_with_a_signature():
    async def main():
        api = api_of(QWEN3, THOUGHT + "Yes.", special=("</think>",))
        message = await both(api, HELLO)
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "\nhm\n", "\n\nYes.") and thought.signature
        assert message.usage.output_tokens_details.thinking_tokens > 3
        hidden = await both(api, {**HELLO, "thinking": {"type": "adaptive", "display": "omitted"}})
        assert (hidden.content[0].thinking, hidden.content[0].signature) == ("", thought.signature)
        message = await both(api_of(QWEN3, THOUGHT + ONE), TOOLS)
        assert [b.type for b in message.content] == ["thinking", "tool_use"]
        message = await both(api_of(QWEN3, "<think>for ever"), HELLO)
        assert [b.type for b in message.content] == ["thinking"]

    run(main)


def test_thinking_reaches_the_template_and_the_engine():
    async def main():
        api = api_of(QWEN3, "Yes.", special=("</think>",))
        (end,) = api.client.tokenizer.encode("</think>", add_special_tokens=False)
        status, _ = await api.json("POST", PATH, {**HELLO, "thinking": {"type": "enabled", "budget_tokens": 7}})
        assert status == 200
        assert (params_of(api).thinking_token_budget, params_of(api).reasoning_end_token_ids) == (7, [end])
        await api.json("POST", PATH, {**HELLO, "thinking": {"type": "disabled"}})
        assert chat_of(api).endswith("<think></think>") and params_of(api).thinking_token_budget is None
        await api.json("POST", PATH, {**HELLO, "thinking": {"type": "adaptive"}})
        assert "<think>" not in chat_of(api) and params_of(api).thinking_token_budget is None
        stubborn = api_of("{# </think><think> #}<think>\n", "x</think>Yes.", special=("</think>",))
        await stubborn.json("POST", PATH, {**HELLO, "thinking": {"type": "disabled"}})
        assert params_of(stubborn).thinking_token_budget == 0
        own = api_of(QWEN3, "Yes.", defaults=RequestDefaults(chat_template_kwargs={"enable_thinking": False}))
        await own.json("POST", PATH, {**HELLO, "thinking": {"type": "adaptive"}})
        assert "<think>" not in chat_of(own)  # the request goes before the operator
        await own.json("POST", PATH, HELLO)
        assert chat_of(own).endswith("<think></think>")

    run(main)


def ending(reason, stop_reason=None):
    def speak(stream):
        stream.push(Delta(0, "One", [5], None, reason, stop_reason, 1))
        stream.end()

    return speak


@pytest.mark.parametrize(
    ("end", "extra", "stop"),
    [
        (("stop",), {}, ("end_turn", None)),
        (("length",), {}, ("max_tokens", None)),
        (("length",), {"max_tokens": 100_000}, ("model_context_window_exceeded", None)),
        (("stop", "two"), {"stop_sequences": ["two"]}, ("stop_sequence", "two")),
        (("stop", 7), {"stop_sequences": ["two"]}, ("end_turn", None)),
    ],
)
def test_reasons_to_stop(end, extra, stop):
    async def main():
        api = http.Api()
        api.client.speak = ending(*end)
        message = await both(api, {**HELLO, **extra})
        assert (message.stop_reason, message.stop_sequence) == stop
        assert params_of(api).stop == extra.get("stop_sequences")
        assert params_of(api).max_tokens == min(extra.get("max_tokens", 60), 200 - len(api.client.streams[-1].ids))

    run(main)


def test_sampling_and_format_reach_the_engine():
    async def main():
        api = http.Api()
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        extra = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "cache_salt": "s", "priority": 2}
        for name in ("output_config", "output_format"):
            form = {"type": "json_schema", "schema": schema}
            form = {"format": form, "effort": "max"} if name == "output_config" else form
            status, answer = await api.json("POST", PATH, {**HELLO, **extra, name: form})
            assert status == 200, answer
            params, options = params_of(api), api.client.streams[-1].options
            assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3)
            assert params.structured_outputs.kind == "json" and json.loads(params.structured_outputs.text) == schema
            assert (options["cache_salt"], options["priority"]) == ("s", 2)
        effort = api_of("{{ reasoning_effort }}")
        await effort.json("POST", PATH, {**HELLO, "output_config": {"effort": "xhigh"}})
        assert chat_of(effort) == "high"

    run(main)


def test_a_request_for_no_tokens_fills_the_cache():
    async def main():
        api = http.Api()
        status, answer = await api.json("POST", PATH, {**HELLO, "max_tokens": 0})
        message = Message.model_validate(answer)
        assert status == 200 and message.content == [] and message.stop_reason == "max_tokens"
        assert message.usage.output_tokens == 0 and params_of(api).max_tokens == 1
        assert (await api.json("POST", PATH, {**HELLO, "max_tokens": 0, "stream": True}))[0] == 400

    run(main)


def test_tokens_are_counted_as_they_are_used():
    async def main():
        api = api_of()
        bodies = ({**SAID, "system": "Be brief."}, {**SAID, "tools": [WEATHER]}, {**SAID, "thinking": {"type": "adaptive"}})
        for body in bodies:
            status, counted = await api.json("POST", COUNT, {"model": "tiny", **body})
            message = await both(api, {**HELLO, **body})
            usage = message.usage
            assert status == 200 and MessageTokensCount.model_validate(counted, strict=True)
            assert counted["input_tokens"] == usage.input_tokens + usage.cache_read_input_tokens
        assert len(api.client.streams) == 2 * len(bodies)

    run(main)


# -------------------------------------------------------------------------------------------------------------- errors
def media(kind):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, "source": {}}]}]}


def said(*blocks, role="user"):
    return {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": list(blocks)}]}


CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    *(
        (media(kind), "messages[0].content[1]")
        for kind in ("image", "document", "search_result", "nonsense", "server_tool_use")
    ),
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
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**CLOCK, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
    ({"tools": [{**CLOCK, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**CLOCK, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 60}}, "max_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),  # no model that thinks
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
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
                status, answer = await api.json("POST", path, {**HELLO, name: {"some": ["wish"]}})
                assert status == 400 and name in answer["error"]["message"]
                assert (await api.json("POST", path, {**HELLO, name: {}}))[0] == 200
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
            (Overloaded("x"), 529, "overloaded_error"),
            (EngineDown("x"), 503, "api_error"),
            (ValueError("x"), 500, "api_error"),
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
