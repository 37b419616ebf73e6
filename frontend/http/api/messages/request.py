"""Translate a body of the Messages API into a ChatRequest: tools, thinking, output format and sampling.

chat_run.py prepares it like any chat. Unsupported fields are refused by name.
"""

from typing import Any

import msgspec

from quire.frontend.http.api.bodies.schemas import ChatRequest, Json
from quire.frontend.http.api.bodies.structured import JsonSchemaFormat, ResponseFormat
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.messages.conversation import chat_messages
from quire.frontend.http.api.messages.errors import THREADS
from quire.frontend.http.api.messages.schemas import (
    CountTokensRequest,
    MessagesRequest,
    NotHere,
    OutputFormat,
    ThinkingConfig,
    Tool,
    ToolChoice,
)
from quire.frontend.http.api.tools.left_out import is_left_out, leave_out
from quire.frontend.http.protocol.errors import ApiError

_KEEP_ALL = ({"type": "clear_thinking_20251015"}, {"type": "clear_thinking_20251015", "keep": "all"},
             {"type": "clear_thinking_20251015", "keep": {"type": "all"}})  # fmt: skip
# Values of NotHere's fields that have no effect and are accepted, beside null, [] and {}.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "context_management": ({"edits": []}, *({"edits": [edit]} for edit in _KEEP_ALL)),
    "diagnostics": ({"previous_message_id": None},),
    "inference_geo": ("global",),
    "speed": ("standard",),
    "watermarking": (False,),
}
_LONGEST_HARMLESS = 256  # bytes
_EFFORT = {"xhigh": "high", "max": "high"}  # templates know three levels


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The body as a chat. Raises ApiError 400."""
    check_not_here(body)
    messages = chat_messages(body)
    chat = ChatRequest(messages=messages, model=body.model)
    _take_prefill(chat, messages)
    _take_tools(chat, body.tools or [], body.tool_choice)
    if body.mcp_servers:
        leave_out("mcp_servers")
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        _take_thinking(chat, body.thinking, variables)
    chat.chat_template_kwargs = variables or None
    _take_output(chat, body)
    if isinstance(body, MessagesRequest):
        _take_sampling(chat, body)
    return chat


def check_not_here(body: NotHere) -> None:
    for name in NotHere.__annotations__:
        if not _asks_for_nothing(name, getattr(body, name)):
            code = THREADS if name == "thread" else "unsupported_value"
            raise _unsupported(name, f"{name}: this value is not supported by this server", code)
        setattr(body, name, msgspec.Raw())  # a Raw is a view of the body, and would keep that in memory until the answer ends


def _asks_for_nothing(name: str, value: msgspec.Raw) -> bool:
    if len(bytes(value)) > _LONGEST_HARMLESS:
        return False
    try:
        return not bytes(value) or msgspec.json.decode(value) in (None, [], {}, *_HARMLESS.get(name, ()))
    except msgspec.DecodeError:  # only a Raw's syntax is checked: 1e400 is too large for a number, "\ud800" is not a text
        return False


def _unsupported(name: str, text: str, code: str = "unsupported_value") -> ApiError:
    return ApiError(400, f"{text}.", param=name, code=code)


def _take_prefill(chat: ChatRequest, messages: list[Json]) -> None:
    """If the last message is the assistant's, the answer continues it."""
    last = messages[-1]
    if last["role"] != "assistant":
        return
    if "tool_calls" in last:
        raise invalid("messages: the last one calls tools; a message with a tool_result for each call must follow", "messages")
    chat.continue_final_message = True


# ----------------------------------------------------------------------------------------------------------------- tools
def _take_tools(chat: ChatRequest, tools: list[Tool], choice: ToolChoice | None) -> None:
    left_out = {tool.name for tool in tools if is_left_out(tool.type)}
    for tool in tools:
        if tool.type is not None and is_left_out(tool.type):
            leave_out(tool.type)
    chat.tools = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools) if not is_left_out(tool.type)] or None
    if choice is None or (chat.tools is None and choice.type == "auto"):
        return
    if choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name: this field is required with type 'tool'.", param="tool_choice.name",
                           code="missing_required_parameter")  # fmt: skip
        if choice.name in left_out:
            raise _unsupported("tool_choice.name", f"tool_choice.name: this server does not run {choice.name[:64]!r} itself")
        chat.tool_choice = {"type": "function", "function": {"name": choice.name}}
    else:
        chat.tool_choice = "required" if choice.type == "any" else choice.type


def _function(tool: Tool, place: str) -> Json:
    """The tool in OpenAI's form. The function's own fields are checked with those of all functions (tool_use.py)."""
    if tool.type not in (None, "custom"):
        raise _unsupported(
            f"{place}.type",
            f"{place}.type: there is no tool of type {tool.type[:64]!r}; give one of your own, of type 'custom', with an "
            "input_schema",
        )
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise _unsupported(f"{place}.allowed_callers", f"{place}.allowed_callers: only 'direct' calls are made here")
    if tool.input_schema is None:
        raise ApiError(400, f"{place}.input_schema: this field is required.", param=f"{place}.input_schema",
                       code="missing_required_parameter")  # fmt: skip
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": {**tool.input_schema, **examples},
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


# ------------------------------------------------------------------------------------------------------ thinking, output
def _take_thinking(chat: ChatRequest, thinking: ThinkingConfig, variables: Json) -> None:
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        raise invalid("thinking.type must be 'enabled', 'adaptive' or 'disabled'", "thinking.type")
    if thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None or budget < 1:
            raise invalid("thinking.budget_tokens must be at least 1 where thinking is enabled", "thinking.budget_tokens")
        if chat.continue_final_message:
            raise invalid("thinking: an answer that goes on with the last message cannot begin with a thought", "thinking")
        chat.thinking_token_budget = budget
    for name in ("enable_thinking", "thinking"):  # templates use either name
        variables.setdefault(name, thinking.type != "disabled")


def _take_output(chat: ChatRequest, body: CountTokensRequest) -> None:
    output_format: OutputFormat | None = body.output_format
    if (config := body.output_config) is not None:
        if config.task_budget:
            raise _unsupported("output_config.task_budget", "output_config.task_budget is not supported by this server")
        if config.format is not None and output_format is not None:
            raise invalid("output_format is the older name of output_config.format: give one of them", "output_format")
        output_format = config.format or output_format
        chat.reasoning_effort = _EFFORT.get(config.effort, config.effort) if config.effort is not None else None
    if output_format is not None:
        if chat.continue_final_message:
            raise invalid("output_config.format: an answer that goes on with the last message has no format", "output_config")
        schema = JsonSchemaFormat(name="output", schema=output_format.schema)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)


def _take_sampling(chat: ChatRequest, body: MessagesRequest) -> None:
    if body.max_tokens < 0:
        raise invalid(f"max_tokens must be at least 0, got {body.max_tokens}", "max_tokens")
    budget = chat.thinking_token_budget
    if budget is not None and budget >= body.max_tokens:
        raise invalid(f"max_tokens must be greater than thinking.budget_tokens ({budget}), got {body.max_tokens}", "max_tokens")
    if body.max_tokens == 0 and body.stream:
        raise invalid("max_tokens: 0, for an answer of nothing, is not available with stream: true", "max_tokens")
    chat.stop, chat.max_tokens = body.stop_sequences, max(1, body.max_tokens)
    for name in ("stream", "temperature", "top_p", "top_k", "cache_salt", "priority", "timeout", "vllm_xargs"):
        setattr(chat, name, getattr(body, name))
