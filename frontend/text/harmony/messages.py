"""A conversation in the form that gpt-oss's chat template takes: one call in a message, one text beside it, one system message.

The template reads only the first call of a message, refuses reasoning and a text beside a call, and drops system messages after
the first one, without a word. So calls become messages of their own, each before its result; what is said beside a call goes
behind the reasoning, where the template would put it; and later system messages become users'. chat_template.py calls this.
"""

from typing import Any

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def harmony_messages(messages: list[Message]) -> list[Message]:
    """Messages as chat_template.py has prepared them."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    head, rest = messages[:first], messages[first:]
    result: list[Message] = []
    if head:
        result.append({**head[0], "content": "\n\n".join(text for m in head if (text := m.get("content") or ""))})
    results = _results_by_call(rest)
    taken: set[int] = set()
    for message in rest:
        if id(message) in taken:
            continue
        if message["role"] in _SYSTEM:
            result.append({"role": "user", "content": f"<system>\n{message.get('content') or ''}\n</system>"})
        elif message.get("tool_calls"):
            for part in _with_one_call(message):
                result.append(part)
                answer = results.get(_id_of(part))
                if answer is not None and len(message["tool_calls"]) > 1 and id(answer) not in taken:
                    taken.add(id(answer))
                    result.append(answer)
        elif message["role"] == "assistant":
            result.append({"content": "", **message})
        else:
            result.append(message)
    return result


def harmony_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools with a description each, which the template writes."""
    if not tools:
        return tools
    described = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("description") is None:
            tool = {**tool, "function": {**function, "description": ""}}
        described.append(tool)
    return described


def harmony_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Variables with an effort that the model knows: low, medium or high."""
    effort = variables.get("reasoning_effort")
    return {**variables, "reasoning_effort": _EFFORTS[effort]} if isinstance(effort, str) and effort in _EFFORTS else variables


def _results_by_call(messages: list[Message]) -> dict[Any, Message]:
    """Results of tools by the ids of their calls."""
    found = {}
    for message in messages:
        call = message.get("tool_call_id")
        if message["role"] == "tool" and isinstance(call, str):
            found[call] = message
    return found


def _id_of(message: Message) -> Any:
    call = message["tool_calls"][0].get("id")
    return call if isinstance(call, str) else None


def _with_one_call(message: Message) -> list[Message]:
    """The message once for each of its calls. The first has its thoughts and its text, both as thoughts."""
    rest = {
        key: value for key, value in message.items() if key not in ("content", "thinking", "reasoning_content", "reasoning")
    }
    thoughts = [message.get(key) or "" for key in ("thinking", "content")]
    said = "\n".join(text for text in thoughts if isinstance(text, str) and text)
    parts = [{**rest, "tool_calls": [call]} for call in message["tool_calls"]]
    if said:
        parts[0]["thinking"] = said
    return parts
