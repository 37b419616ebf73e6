"""How chats, responses and messages write the same things: a choice of a tool, an answer's text, calls and their results.

Read from what passed through the proxy (coding_agents.py).
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Change = Callable[[dict[str, Any]], dict[str, Any]]  # of a schema


class Call(NamedTuple):
    id: str
    name: str
    arguments: str


def events_of(answer: str) -> Iterator[dict[str, Any]]:
    for line in answer.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


class Chats:
    """/v1/chat/completions"""

    max_tokens = "max_tokens"

    def choice(self, tool: str) -> Any:
        return {"type": "function", "function": {"name": tool}}

    def text_of(self, answer: Any) -> str:
        return answer["choices"][0]["message"]["content"]

    def _deltas(self, answer: str) -> list[dict[str, Any]]:
        return [event["choices"][0]["delta"] for event in events_of(answer) if event["choices"]]

    def parts_of(self, answer: str) -> list[str]:
        return [text for delta in self._deltas(answer) if (text := delta.get("content"))]

    def calls_of(self, answer: str) -> list[Call]:
        calls: dict[int, Call] = {}
        for delta in self._deltas(answer):
            for part in delta.get("tool_calls") or ():
                call = calls.get(part["index"]) or Call(part["id"], part["function"]["name"], "")
                calls[part["index"]] = call._replace(arguments=call.arguments + (part["function"].get("arguments") or ""))
        return list(calls.values())

    def is_answered(self, call: Call, body: Any) -> bool:
        return any(message["role"] == "tool" and message["tool_call_id"] == call.id for message in body["messages"])

    def tool_schema(self, body: Any, name: str) -> Any:
        return next(tool["function"]["parameters"] for tool in body["tools"] if tool["function"]["name"] == name)

    def with_schema(self, tool: Any, name: str, change: Change) -> Any:
        function = tool["function"]
        if function["name"] != name:
            return tool
        return {**tool, "function": {**function, "parameters": change(function["parameters"])}}


class Responses:
    """/v1/responses"""

    max_tokens = "max_output_tokens"

    def choice(self, tool: str) -> Any:
        return {"type": "function", "name": tool}

    def text_of(self, answer: Any) -> str:
        return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])

    def parts_of(self, answer: str) -> list[str]:
        return [event["delta"] for event in events_of(answer) if event["type"] == "response.output_text.delta"]

    def calls_of(self, answer: str) -> list[Call]:
        items = [event["item"] for event in events_of(answer) if event["type"] == "response.output_item.done"]
        return [Call(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]

    def is_answered(self, call: Call, body: Any) -> bool:
        return any(item["type"] == "function_call_output" and item["call_id"] == call.id for item in body["input"])

    def tool_schema(self, body: Any, name: str) -> Any:
        return next(tool["parameters"] for tool in body["tools"] if tool.get("name") == name)

    def with_schema(self, tool: Any, name: str, change: Change) -> Any:
        return {**tool, "parameters": change(tool["parameters"])} if tool.get("name") == name else tool


class Messages:
    """/v1/messages"""

    max_tokens = "max_tokens"

    def choice(self, tool: str) -> Any:
        return {"type": "tool", "name": tool}

    def text_of(self, answer: Any) -> str:
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")

    def parts_of(self, answer: str) -> list[str]:
        deltas = [event["delta"] for event in events_of(answer) if event["type"] == "content_block_delta"]
        return [delta["text"] for delta in deltas if delta["type"] == "text_delta"]

    def calls_of(self, answer: str) -> list[Call]:
        calls: dict[int, Call] = {}
        for event in events_of(answer):
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                calls[event["index"]] = Call(event["content_block"]["id"], event["content_block"]["name"], "")
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
                call = calls[event["index"]]
                calls[event["index"]] = call._replace(arguments=call.arguments + event["delta"]["partial_json"])
        return list(calls.values())

    def is_answered(self, call: Call, body: Any) -> bool:
        blocks = [block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]]
        return any(block["type"] == "tool_result" and block["tool_use_id"] == call.id for block in blocks)

    def tool_schema(self, body: Any, name: str) -> Any:
        return next(tool["input_schema"] for tool in body["tools"] if tool["name"] == name)

    def with_schema(self, tool: Any, name: str, change: Change) -> Any:
        return {**tool, "input_schema": change(tool["input_schema"])} if tool.get("name") == name else tool


Shape = Chats | Responses | Messages
SHAPES: dict[str, Shape] = {
    "/v1/chat/completions": Chats(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
