"""Bodies of Anthropic's Messages API as msgspec structs (https://docs.claude.com/en/api/messages), requests and answers.

conversation.py and request.py translate a request into a chat; blocks.py and stream.py make the answers. A field that is null
means the same as one that is absent. `NotHere` has the fields that would change the answer and are not supported; request.py
refuses them by name.
"""

from typing import Annotated, Any, Literal

import msgspec

from quire.frontend.http.api.bodies.schemas import MAX_ITEMS, CacheSalt, Int32, Int64, Json, ShortText, TemplateVariables

RawObject = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


# ------------------------------------------------------------------------------------------------------------- requests
class Block(msgspec.Struct, kw_only=True):
    """A content block of a message: text, thinking, redacted_thinking, tool_use, tool_result, image or, in a result,
    tool_reference. conversation.py checks which fields it must have. Everything that can be cached is; cache_control
    marks where a model with recurrent layers keeps a state."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: RawObject = msgspec.field(default_factory=msgspec.Raw)
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    tool_name: str | None = None
    source: Json | None = None
    cache_control: Json | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """content: may be missing of an assistant's message only."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None


class Tool(msgspec.Struct, kw_only=True):
    """type: "custom" (the default); other types are tools that Anthropic defines or runs, and are left out."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None
    input_examples: list[Json] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: Json | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: Int64 | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class NotHere(msgspec.Struct, kw_only=True):
    """Fields that are refused, except values without effect (request.py). They are not decoded, for they may be of any size."""

    container: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    context_management: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    compaction: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    diagnostics: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    fallbacks: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    fallback_credit_token: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    billing_policy: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    thread: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    inference_geo: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    speed: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    watermarking: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    kv_transfer_params: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    ec_transfer_params: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class CountTokensRequest(NotHere, kw_only=True):
    """The fields that make a prompt. model: None: the first one served. output_format: older name of output_config.format.
    mcp_servers: left out, as tools are that this server does not run."""

    model: ShortText | None = None
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    system: str | list[Block] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    mcp_servers: Any = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Json | None = None
    chat_template_kwargs: TemplateVariables | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """max_tokens: 0 computes the prompt, for the cache, and answers with no content. Fields that Anthropic lacks and chats
    have: cache_salt, priority, timeout, vllm_xargs, chat_template_kwargs."""

    max_tokens: Int64
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    cache_salt: CacheSalt | None = None
    priority: Int32 | None = None
    timeout: float | None = None
    vllm_xargs: Json | None = None


# -------------------------------------------------------------------------------------------------------------- answers
class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """signature: made by this server, for clients that drop thinking without one; it is not checked."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """input: a JSON object."""

    id: str
    name: str
    input: RawObject


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """input_tokens: tokens of the prompt that were not in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | msgspec.UnsetType = msgspec.UNSET
    service_tier: str | msgspec.UnsetType = "standard"


class MessagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """stop_reason: end_turn, max_tokens, stop_sequence, tool_use or model_context_window_exceeded."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class CountTokensResponse(msgspec.Struct, frozen=True):
    input_tokens: int
