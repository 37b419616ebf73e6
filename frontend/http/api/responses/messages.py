"""Translate a response's items into the messages of a chat, for chat templates.

A model's turn is several items (reasoning, a message, calls) and becomes one message. Items come from items.py, checked and
complete.
"""

from collections.abc import Sequence

from quire.frontend.http.api.bodies.schemas import Json
from quire.frontend.http.api.responses.tools import ToolName, called_name


def messages_of(items: Sequence[Json], instructions: str | None, knows_developer: bool) -> list[Json]:
    """knows_developer: whether the chat template has the role "developer"; if not, its messages have the role "system"."""
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        match item["type"]:
            case "reasoning":
                _add_reasoning(messages, item)
            case "function_call" | "custom_tool_call":
                _add_call(messages, item)
            case "function_call_output" | "custom_tool_call_output":
                content = _content(item["output"]) if isinstance(item["output"], list) else item["output"]
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case _:
                _add_message(messages, item, knows_developer)
    for message in messages:
        if "content" not in message:
            message["content"] = None if "tool_calls" in message else ""
    return messages


def is_unfinished(items: Sequence[Json]) -> bool:
    """Whether the last item is a message of the assistant that the model should continue."""
    last = items[-1] if items else {}
    return last.get("role") == "assistant" and last["status"] != "completed" and bool(last["content"])


def _add_reasoning(messages: list[Json], item: Json) -> None:
    parts = item["content"] or item["summary"]
    if reasoning := "\n".join(part["text"] for part in parts):
        messages.append({"role": "assistant", "reasoning_content": reasoning})


def _add_call(messages: list[Json], item: Json) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    name = called_name(ToolName(item["name"], item.get("namespace")))
    if item["type"] == "function_call":
        kind, given = "function", {"name": name, "arguments": item["arguments"]}
    else:
        kind, given = "custom", {"name": name, "input": item["input"]}
    call = {"id": item["call_id"], "type": kind, kind: given}
    messages[-1].setdefault("tool_calls", []).append(call)


def _add_message(messages: list[Json], item: Json, knows_developer: bool) -> None:
    role = "system" if item["role"] == "developer" and not knows_developer else item["role"]
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == role and "content" not in last and "tool_calls" not in last:
        last["content"] = _content(item["content"])  # the message that follows its reasoning
    else:
        messages.append({"role": role, "content": _content(item["content"])})


def _content(parts: Sequence[Json]) -> str | list[Json]:
    """A single part as a text, several as a list: the template decides how to join them."""
    shown = [_part(part) for part in parts]
    return shown[0]["text"] if len(shown) == 1 and "text" in shown[0] else shown


def _part(part: Json) -> Json:
    if part["type"] == "input_image":
        return part
    return {"type": "text", "text": part["refusal"] if part["type"] == "refusal" else part["text"]}
