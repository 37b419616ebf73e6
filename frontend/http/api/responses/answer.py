"""The response object of /v1/responses and its items of output, as structs with OpenAI's field names.

Items are filled in while the output comes (output.py). The fields that repeat the request are encoded once, because a stream
sends them three times.
"""

import time
from typing import Any, Literal

import msgspec

from quire.frontend.http.api.bodies.schemas import Json, Usage
from quire.frontend.http.api.responses.items import sealed
from quire.frontend.http.api.responses.request import ReasoningConfig, ResponsesRequest, TextConfig, TextFormat
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.errors import ApiError
from quire.ipc.messages.frontend import FinishReason
from quire.ipc.sampling import SamplingParams

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


# ----------------------------------------------------------------------------------------------------------------- items
class OutputText(msgspec.Struct, kw_only=True):
    """logprobs: a list, or JSON in pieces."""

    type: str = "output_text"
    text: str = ""
    annotations: list[Json] = []
    logprobs: Any = []


class ReasoningText(msgspec.Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    status: ItemStatus = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True):
    id: str
    type: str = "reasoning"
    status: ItemStatus = "in_progress"
    summary: list[Json] = []
    content: list[ReasoningText] = []
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET

    def seal(self) -> None:
        self.encrypted_content = sealed("".join([part.text for part in self.content]))


class FunctionCallItem(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function_call"
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str = ""


class CustomToolCallItem(msgspec.Struct, kw_only=True):
    id: str
    type: str = "custom_tool_call"
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str = ""


CallItem = FunctionCallItem | CustomToolCallItem
Item = OutputMessage | ReasoningItem | CallItem


# ------------------------------------------------------------------------------------------------------------- responses
class InputTokensDetails(msgspec.Struct, frozen=True):
    """cache_write_tokens: always 0; OpenAI charges for them."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """instructions, tools, tool_choice, text, metadata: as they were sent, or the defaults. store: whether it was kept."""

    id: str
    object: str = "response"
    created_at: int
    status: Status = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Any] = []
    previous_response_id: str | None = None
    usage: ResponseUsage | None = None
    store: bool = True
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    truncation: str = "disabled"
    service_tier: str = "default"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Json = {}
    metadata: Json = {}
    instructions: Any = None
    text: Any = {}
    tool_choice: Any = "auto"
    tools: Any = []

    def end(self, reason: FinishReason | None) -> None:
        """Set the status of a response with a complete output, by its finish reason."""
        if reason == "length":
            self.status, self.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        elif reason == "stop":
            self.status, self.completed_at = "completed", int(time.time())
        else:
            self.status = "cancelled"

    def fail(self, error: ApiError) -> None:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if error.code == "overloaded" else code
        self.status, self.error = "failed", ResponseError(code, error.message)


def begun(body: ResponsesRequest, id: str, model: str, params: SamplingParams) -> ResponseObject:
    """A response without output. Fields that may be long are encoded already."""
    text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    return ResponseObject(
        id=id,
        created_at=int(time.time()),
        background=bool(body.background),
        model=model,
        previous_response_id=body.previous_response_id,
        store=body.keeps,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=params.temperature,
        top_p=params.top_p,
        top_logprobs=body.top_logprobs or 0,
        truncation=body.truncation or "disabled",
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": reasoning.effort, "summary": None},
        metadata=dict(body.metadata or {}),
        instructions=msgspec.Raw(json_bytes(body.instructions)),
        text=msgspec.Raw(json_bytes({"format": _format(text.format), "verbosity": text.verbosity or "medium"})),
        tool_choice=_tool_choice(body.tool_choice),
        tools=msgspec.Raw(json_bytes([_tool(tool) for tool in body.tools or ()])),
    )


def _format(given: TextFormat | None) -> Json:
    if given is None or given.type != "json_schema":
        return {"type": "text" if given is None else given.type}
    strict = given.strict is not False  # a schema is always followed
    return {"type": given.type, "name": given.name, "description": given.description, "schema": given.schema, "strict": strict}


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        return tool
    defaults = {"description": None, "parameters": None}
    return {**defaults, **{k: v for k, v in tool.items() if k in _TOOL_FIELDS}, "strict": tool.get("strict") is True}


_CHOSEN = ("type", "name", "namespace")
_TOOL_FIELDS = ("type", "name", "description", "parameters")


def _tool_choice(choice: str | Json | None) -> str | Json:
    """The request's tool_choice, which was valid, without unknown fields."""
    if not isinstance(choice, dict):
        return choice or "auto"
    if "tools" not in choice:
        return {name: choice[name] for name in _CHOSEN if name in choice}
    tools = [{name: tool[name] for name in _CHOSEN if name in tool} for tool in choice["tools"]]
    return {"type": choice["type"], "mode": choice.get("mode") or "auto", "tools": tools}


def usage_of_response(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(0 if details is msgspec.UNSET else details.reasoning_tokens),
        usage.total_tokens,
    )
