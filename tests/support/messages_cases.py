"""The Messages API over the real application: requests, and answers and streams parsed as by the anthropic package."""

import asyncio
import json

import fake_client as http
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

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
