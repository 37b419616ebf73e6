"""Items of a response's input: checks them, gives them ids, and completes them to the shapes in OpenAI's reference.

The input may be any JSON. The result is kept, listed by /v1/responses/{id}/input_items, and translated into messages
(messages.py). An item's id contains the id of its response, so a reference to it needs no index (`response_of_item`).
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.frontend.http.api.bodies.schemas import Json
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.media.parts import PLACE

MAX_REFERENCES = 64  # of one request: each is read from the store
_MAX_ID = 256
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_KINDS = "message, function_call, custom_tool_call and their outputs, reasoning and item_reference"
# Items of tools that OpenAI's servers or their clients run, which are left out here (tools/left_out.py), and of contexts that
# they compact. A conversation that began elsewhere has them; they are not kept, and the model does not see them.
PASSED_OVER = frozenset(
    (
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "context_compaction",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    )
)
_CALLS, _OUTPUTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")
_STATUSES = ("in_progress", "completed", "incomplete")
_SEALED = "quire1."


def item_id(response_id: str, kind: str, number: int | str) -> str:
    return f"{_PREFIXES[kind]}_{response_id.partition('_')[2]}_{number}"


def response_of_item(id: str) -> str:
    """The id of the response that an item was made for, taken from the item's id."""
    return "resp_" + id.partition("_")[2].rpartition("_")[0]


def referenced_ids(items: Sequence[Json]) -> list[str]:
    """The ids in items of type item_reference. Raises ApiError 400."""
    ids = [_text(item.get("id"), f"input[{i}].id") for i, item in enumerate(items) if _kind_of(item) == "item_reference"]
    if len(ids) > MAX_REFERENCES:
        raise invalid(f"input may hold at most {MAX_REFERENCES} items of type item_reference", "input")
    return ids


def completed_items(given: str | Sequence[Json], known: Mapping[str, Json], response_id: str) -> list[Json]:
    """The input's items, checked and complete. known: the items for references, by id. Raises ApiError 400, naming the item."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: list[Json] = []
    passed_over: set[Any] = set()  # calls; their outputs may have another type
    for i, item in enumerate(given):
        kind = _kind_of(item)
        if isinstance(kind, str) and kind in PASSED_OVER:
            passed_over |= {item["call_id"]} if isinstance(item.get("call_id"), str) else set()
            continue
        if kind in _OUTPUTS and passed_over and isinstance(item.get("call_id"), str) and item["call_id"] in passed_over:
            continue
        if kind == "item_reference":
            items.append(_referred(item, known, f"input[{i}].id"))
            continue
        if not isinstance(kind, str) or kind not in _ITEMS:
            raise ApiError(
                400,
                f"input[{i}].type: items of type {str(kind)[:40]!r} are not supported by this server; {_KINDS} are.",
                param=f"input[{i}].type",
                code="unsupported_value",
            )
        place = f"input[{i}]"
        id = item.get("id")
        id = _text(id, f"{place}.id") if id is not None else item_id(response_id, kind, f"in{i}")
        if len(id) > _MAX_ID:
            raise invalid(f"{place}.id may have at most {_MAX_ID} characters", f"{place}.id")
        status = item.get("status")
        if status is not None and status not in _STATUSES:
            raise invalid(f"{place}.status must be one of {', '.join(_STATUSES)}", f"{place}.status")
        items.append({"id": id, "type": kind, "status": status or "completed", **_ITEMS[kind](item, place)})
    return items


def _kind_of(item: Json) -> Any:
    """An item's type. If it has none: an item with a role is a message, one with only an id a reference."""
    kind = item.get("type")
    if kind is not None:
        return kind
    return "message" if "role" in item else "item_reference" if "id" in item else None


def _referred(item: Json, known: Mapping[str, Json], place: str) -> Json:
    id = _text(item.get("id"), place)
    found = known.get(id)
    if found is None:
        raise ApiError(400, f"{place}: there is no item {id[:80]!r} in a kept response.", param=place, code="item_not_found")
    return found


def check_calls(items: Sequence[Json]) -> None:
    """Check that every output of a call comes after its call. Raises ApiError 400."""
    calls: set[str] = set()
    for item in items:
        if item["type"] in _CALLS:
            calls.add(item["call_id"])
        elif item["type"] in _OUTPUTS and item["call_id"] not in calls:
            raise invalid(
                f"input: there is no {item['type'].removesuffix('_output')} with the call_id {item['call_id'][:80]!r} before "
                f"its {item['type']}; send both, or the call's response as previous_response_id",
                "input",
            )


# ------------------------------------------------------------------------------------------------------- item by item
def _message(item: Json, place: str) -> Json:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise invalid(f"{place}.role must be user, assistant, system or developer", f"{place}.role")
    if content is None and role == "assistant":  # one that has only called tools, or was cut off before its first token
        content = []
    elif isinstance(content, str):
        content = [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"{place}.content must be a text or a list of parts", f"{place}.content")
    parts = [_part(part, f"{place}.content[{i}]", role == "assistant") for i, part in enumerate(content)]
    return {"role": role, "content": parts}


def _part(part: Any, place: str, by_model: bool) -> Json:
    """A message's part. by_model: the message is the assistant's, and may have a refusal."""
    kind = part.get("type") if isinstance(part, dict) else None
    if by_model and kind == "refusal":
        return {"type": "refusal", "refusal": _text(part.get("refusal"), f"{place}.refusal", may_be_empty=True)}
    if kind in ("input_text", "output_text", "text"):
        text = _text(part.get("text"), f"{place}.text", may_be_empty=True)
        return {"type": "output_text", "text": text, "annotations": []} if by_model else {"type": "input_text", "text": text}
    if kind == "input_image" and not by_model:
        return _image(part, place)
    if kind in ("input_image", "input_file", "input_audio", "computer_screenshot"):
        raise ApiError(
            400, f"{place}.type: this server takes text and images, no {kind}.", param=f"{place}.type", code="unsupported_value"
        )
    raise invalid(f"{place}.type must be input_text or, of the assistant's, output_text or refusal", f"{place}.type")


def _image(part: Json, place: str) -> Json:
    """An image by its address or its file's id; whether the model takes it, its chat tells."""
    url, file_id = part.get("image_url"), part.get("file_id")
    if url is None and file_id is None:
        raise invalid(f"{place} needs an image_url or a file_id", place)
    name, value = ("image_url", url) if url is not None else ("file_id", file_id)
    given = {name: _text(value, f"{place}.{name}"), PLACE: place}
    return {"type": "input_image", "detail": part.get("detail") or "auto", **given}


def _function_call(item: Json, place: str) -> Json:
    return _call(item, place, "arguments")


def _custom_tool_call(item: Json, place: str) -> Json:
    return _call(item, place, "input")


def _call(item: Json, place: str, what: str) -> Json:
    call = {name: _text(item.get(name), f"{place}.{name}", may_be_empty=name == what) for name in ("call_id", "name", what)}
    space = item.get("namespace")
    return call if space is None else {**call, "namespace": _text(space, f"{place}.namespace")}


def _function_call_output(item: Json, place: str) -> Json:
    output = item.get("output")
    if isinstance(output, list):
        output = [_part(part, f"{place}.output[{i}]", False) for i, part in enumerate(output)]
    elif not isinstance(output, str):
        raise invalid(f"{place}.output must be a text or a list of parts", f"{place}.output")
    return {"call_id": _text(item.get("call_id"), f"{place}.call_id"), "output": output}


def _reasoning(item: Json, place: str) -> Json:
    result: Json = {"summary": _texts(item.get("summary"), "summary_text", f"{place}.summary")}
    result["content"] = _texts(item.get("content"), "reasoning_text", f"{place}.content")
    sealed = item.get("encrypted_content")
    if sealed is not None:
        result["encrypted_content"] = _text(sealed, f"{place}.encrypted_content")
        if not result["content"] and sealed.startswith(_SEALED):  # another server's cannot be read
            result["content"] = [{"type": "reasoning_text", "text": unsealed(sealed, f"{place}.encrypted_content")}]
    return result


def _texts(value: Any, kind: str, place: str) -> list[Json]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"{place} must be a list", place)
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in (None, kind):
            raise invalid(f"{place}[{i}] must be an object of type {kind}", f"{place}[{i}]")
        texts.append({"type": kind, "text": _text(part.get("text"), f"{place}[{i}].text", may_be_empty=True)})
    return texts


def _text(value: Any, place: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise invalid(f"{place} must be a text{'' if may_be_empty else ' that is not empty'}", place)
    return value


_ITEMS: dict[Any, Callable[[Json, str], Json]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": _function_call_output,
    "reasoning": _reasoning,
}


# ------------------------------------------------------------------------------------------------- encrypted_content
def sealed(reasoning: str) -> str:
    """Reasoning as an opaque text that a client sends back (OpenAI's encrypted_content). It is encoded but not encrypted,
    because the answer contains the reasoning itself."""
    return _SEALED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unsealed(text: str, place: str) -> str:
    """The reasoning in a text from `sealed`. Raises ApiError 400 for any other text."""
    try:
        if not text.startswith(_SEALED):
            raise ValueError
        return base64.b64decode(text.removeprefix(_SEALED), altchars=b"-_", validate=True).decode()
    except ValueError:  # or a binascii.Error, which is one
        raise invalid(f"{place} was not made by this server; send the item's content instead", place) from None
