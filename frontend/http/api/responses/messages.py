"""From a response's items to the messages of a chat, as chat templates know them.

What a model says in one turn comes as several items (a thought, a message, calls) and is one message there. Items are those of
items.py: checked, complete.
"""

from collections.abc import Sequence

from quire.frontend.http.api.bodies.schemas import Json


def messages_of(items: Sequence[Json], instructions: str | None, knows_developer: bool) -> list[Json]:
    """knows_developer: whether the chat template has a role of that name; else the developer is its system."""
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        match item["type"]:
            case "reasoning":
                _add_thought(messages, item)
            case "function_call":
                _add_call(messages, item)
            case "function_call_output":
                content = _content(item["output"]) if isinstance(item["output"], list) else item["output"]
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case _:
                _add_message(messages, item, knows_developer)
    for message in messages:
        if "content" not in message:
            message["content"] = None if "tool_calls" in message else ""
    return messages


def is_unfinished(items: Sequence[Json]) -> bool:
    """Whether the last item is a message of the assistant's that the model is to go on with."""
    last = items[-1] if items else {}
    return last.get("role") == "assistant" and last["status"] != "completed" and bool(last["content"])


def _add_thought(messages: list[Json], item: Json) -> None:
    parts = item["content"] or item["summary"]
    if thought := "\n".join(part["text"] for part in parts):
        messages.append({"role": "assistant", "reasoning_content": thought})


def _add_call(messages: list[Json], item: Json) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _add_message(messages: list[Json], item: Json, knows_developer: bool) -> None:
    role = "system" if item["role"] == "developer" and not knows_developer else item["role"]
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == role and "content" not in last and "tool_calls" not in last:
        last["content"] = _content(item["content"])  # what a thought led to
    else:
        messages.append({"role": role, "content": _content(item["content"])})


def _content(parts: Sequence[Json]) -> str | list[Json]:
    """One part as a text, several as parts: where they are joined is the template's to say."""
    texts = [part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
