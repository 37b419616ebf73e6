"""Chats with tools over the chat route, against a fake client: tools, what a model says, and checks of what comes back."""

import json

import fake_client as http
from fake_client import CHAT, HELLO
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

HERMES = http.TEMPLATE + "{# <tool_call></tool_call> #}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = {**HELLO, "tools": [WEATHER, CLOCK]}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn ✓"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
TWO = f'{ONE}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'


def api_of(template=HERMES, output=ONE, special=(), **options):
    client = http.FakeClient(template=template, special=special)
    client.OUTPUT = output
    return http.Api(client, **options)


def accumulated(events):
    """The completion that OpenAI's client makes of a stream's chunks."""
    state = ChatCompletionStreamState()
    for event in events:
        if event != "[DONE]":
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
    return state.get_final_completion()


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


async def both(api, body):
    """The first choice of an answer in one piece and of a stream, which must be alike."""
    status, answer = await api.json("POST", CHAT, body)
    assert status == 200, answer
    whole = ChatCompletion.model_validate(answer)
    events = await api.events(CHAT, body)
    streamed = accumulated(events)
    for a, b in zip(whole.choices, streamed.choices, strict=True):
        assert a.finish_reason == b.finish_reason
        assert (a.message.content or None) == (b.message.content or None)
        assert calls_of(a.message) == calls_of(b.message)
        assert getattr(a.message, "reasoning", None) == getattr(b.message, "reasoning", None)
    return answer["choices"][0], events


def params_of(api):
    return api.client.streams[-1].params


async def check_calls(api, extra, content, calls, reason):
    choice, events = await both(api, {**TOOLS, **extra, "n": 2})
    message = choice["message"]
    assert (message["content"] or None) == content and choice["finish_reason"] == reason
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]] == calls
    assert all(c["type"] == "function" and c["id"] for c in message["tool_calls"])
    begun = [c for e in events[:-1] for c in (e["choices"][0]["delta"].get("tool_calls") or []) if "id" in c]
    assert len(begun) == 2 * len(calls) == 2 * len({c["index"] for c in begun})  # of two choices
    assert len({c["id"] for c in begun}) == len(begun)
