"""Requests that are right, for the target of bodies: (model, path, body), of every route that reads JSON."""

from typing import Any

_CHAT, _TEXT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "description": "A city"},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 3},
        "or": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "string", "pattern": "^[a-z]{1,9}$"}},
}
_HI: Any = [{"role": "user", "content": "hi"}]
_WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": _SCHEMA, "strict": True}}
_CLOCK = {"type": "function", "function": {"name": "clock"}}
_PATCH = {
    "type": "custom",
    "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b"}}},
}
_TOOLS = [_WEATHER, _CLOCK, _PATCH]
_FLAT = [{"type": "function", "name": "weather", "parameters": _SCHEMA, "strict": False}, {"type": "custom", "name": "patch"}]
_SPACE = {
    "type": "namespace",
    "name": "box",
    "description": "d",
    "tools": [{"type": "function", "name": "open", "parameters": {}}],
}
_OURS = [{"name": "weather", "input_schema": _SCHEMA, "strict": True}, {"type": "web_search_20250305", "name": "web_search"}]
_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
_HISTORY: Any = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "assistant", "content": "It is", "refusal": None, "tool_calls": []},
]
_ITEMS: Any = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": None},
    {"type": "function_call", "call_id": "c1", "name": "open", "namespace": "box", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "p"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    {"type": "local_shell_call", "call_id": "c3", "action": {}},
    {"type": "web_search_call", "id": "w", "status": "completed"},
    {
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [{"type": "output_text", "text": "so", "annotations": []}],
    },
]
_BLOCKS: Any = [
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "b"},
        ],
    },
    {"role": "system", "content": "later"},
    {"role": "user", "content": "c"},
]
_SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "best_of": 3,
    "max_tokens": 9,
    "min_tokens": 1,
    "seed": 1,
    "stop": ["x", "yy"],
    "stop_token_ids": [3],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["bad"],
    "ignore_eos": True,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "cache_salt": "s",
    "truncate_prompt_tokens": -1,
    "return_token_ids": True,
    "request_id": "r1",
    "timeout": 30.5,
    "add_special_tokens": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        "tags": [{"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": _SCHEMA}, "end": "</f>"}],
    },
}
_OLD_TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": _SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
_OPTIONS = {"num_predict": 5, "temperature": 0.5, "top_k": 3, "seed": -1, "stop": ["x"], "repeat_penalty": 1.1, "min_p": 0.1}


def _named(name: str, kind: str = "function") -> Any:
    return {"type": kind, kind: {"name": name}}


_ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [_named("clock"), _named("patch", "custom")]},
}

CHATS: list[dict[str, Any]] = [
    {"messages": _HI},
    {"messages": _HI, **_SAMPLING, "stream": True},
    {"messages": _HISTORY, "tools": _TOOLS, "tool_choice": "auto", "parallel_tool_calls": False, "stream": True},
    {"messages": _HI, "tools": _TOOLS, "tool_choice": "required"},
    {"messages": _HI, "tools": _TOOLS, "tool_choice": _named("weather"), "stream": True},
    {"messages": _HI, "tools": [*_TOOLS, {"type": "web_search"}], "tool_choice": _named("patch", "custom")},
    {"messages": _HI, "tools": _TOOLS, "tool_choice": _ALLOWED},
    {"messages": _HI, "tools": [_WEATHER], "response_format": {"type": "json_object"}},
    {
        "messages": _HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}},
    },
    {"messages": _HI, "response_format": _TAG},
    {"messages": _HI, "response_format": _OLD_TAG, "logprobs": True, "top_logprobs": 3},
    {
        "messages": _HISTORY,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
        "return_prompt_text": True,
    },
    {
        "messages": _HI,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "high",
        "thinking_token_budget": 5,
    },
    {"messages": _HI, "documents": [{"title": "t", "text": "x"}], "include_reasoning": False, "max_completion_tokens": 7},
    {"messages": _HI, "use_beam_search": True, "n": 2, "max_tokens": 2, "length_penalty": 0.5},
    {"messages": _HI, "structured_outputs": {"choice": ["a", "b"]}, "guided_choice": ["a", "b"]},
    {"messages": _HI, "structured_outputs": {"regex": "[a-z]+", "disable_any_whitespace": False}, "stream": True},
    {"messages": _HI, "structured_outputs": {"grammar": 'root ::= "a" | "b"'}, "priority": 0},
    {"messages": _HI, "guided_json": _SCHEMA, "structured_outputs": {"json": _SCHEMA, "disable_additional_properties": True}},
]
SEEDS: list[tuple[str, str, dict[str, Any]]] = [
    *((model, _CHAT, body) for body in CHATS for model in ("hermes", "harmony", "thinks")),
    ("plain", _CHAT, CHATS[0]),
    ("limited", _CHAT, {"messages": _HI, "timeout": 5, "priority": 3}),
    ("plain", _TEXT, {"prompt": "a", "max_tokens": 5}),
    ("plain", _TEXT, {"prompt": ["a", "b"], **_SAMPLING, "logprobs": 2, "echo": True, "stream": True}),
    (
        "plain",
        _TEXT,
        {"prompt": [[1, 2], [3]], "logprobs": True, "return_tokens_as_token_ids": True, "max_tokens": 0, "echo": True},
    ),
    ("plain", _TEXT, {"prompt": [1, 2, 3], "structured_outputs": {"regex": "a{1,3}"}, "truncation_side": "left"}),
    ("hermes", _RESPONSES, {"input": "hi"}),
    (
        "thinks",
        _RESPONSES,
        {"input": _ITEMS, "tools": [*_FLAT, _SPACE], "stream": True, "reasoning": {"effort": "low", "summary": "auto"}},
    ),
    (
        "hermes",
        _RESPONSES,
        {
            "input": _ITEMS[:2],
            "tools": [*_FLAT, _SPACE],
            "tool_choice": {"type": "function", "name": "open", "namespace": "box"},
        },
    ),
    (
        "hermes",
        _RESPONSES,
        {
            "input": "hi",
            "tools": [*_FLAT, _SPACE, {"type": "mcp", "server_label": "x"}],
            "stream": True,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "box"}]},
        },
    ),
    (
        "harmony",
        _RESPONSES,
        {"input": "hi", "instructions": "s", "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}},
    ),
    (
        "plain",
        _RESPONSES,
        {"input": "hi", "background": True, "store": True, "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"]},
    ),
    (
        "plain",
        _RESPONSES,
        {"input": [{"type": "item_reference", "id": "msg_x_0"}], "previous_response_id": "resp_0", "truncation": "auto"},
    ),
    ("hermes", "/v1/responses/input_tokens", {"input": _ITEMS, "tools": [_SPACE], "instructions": "s"}),
    ("thinks", _MESSAGES, {"messages": _HI, "max_tokens": 50}),
    (
        "thinks",
        _MESSAGES,
        {
            "messages": _BLOCKS,
            "system": [{"type": "text", "text": "s"}],
            "max_tokens": 50,
            "tools": _OURS,
            "stream": True,
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
        },
    ),
    (
        "harmony",
        _MESSAGES,
        {"messages": _BLOCKS, "max_tokens": 50, "tools": _OURS, "tool_choice": {"type": "any"}, "stop_sequences": ["x"]},
    ),
    (
        "thinks",
        _MESSAGES,
        {
            "messages": _HI,
            "max_tokens": 60,
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "temperature": 1.0,
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": _SCHEMA}},
            "metadata": {},
        },
    ),
    (
        "hermes",
        "/v1/messages/count_tokens",
        {"messages": _BLOCKS, "tools": _OURS, "mcp_servers": [], "context_management": {"edits": []}},
    ),
    ("hermes", "/api/chat", {"model": "tiny", "messages": _HI, "options": _OPTIONS, "tools": [_WEATHER], "keep_alive": "5m"}),
    (
        "thinks",
        "/api/chat",
        {
            "messages": [
                *_HI,
                {
                    "role": "assistant",
                    "content": "",
                    "thinking": "hm",
                    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}],
                },
                {"role": "tool", "tool_name": "weather", "content": "sunny"},
            ],
            "think": "high",
            "stream": False,
        },
    ),
    ("plain", "/api/generate", {"prompt": "a", "system": "s", "format": _SCHEMA, "stream": False, "think": False}),
    ("plain", "/api/generate", {"prompt": "a", "raw": True, "options": _OPTIONS, "format": "json"}),
    ("hermes", "/api/show", {"name": "tiny:latest", "verbose": True}),
    (
        "plain",
        "/inference/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "logprobs": 2, "n": 2, "output_kind": 2}, "stream": True},
    ),
    (
        "plain",
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"structured_outputs": {"json": _SCHEMA}}, "output_mode": "tokens"},
    ),
    ("hermes", "/tokenize", {"messages": _HISTORY, "tools": _TOOLS, "return_token_strs": True, "add_generation_prompt": True}),
    ("plain", "/tokenize", {"prompt": "hi", "add_special_tokens": False}),
    ("plain", "/detokenize", {"tokens": [1, 2, 3], "model": "tiny"}),
    (
        "plain",
        "/v1/batches",
        {
            "input_file_id": "file-0123456789abcdef0123456789abcdef",
            "endpoint": _CHAT,
            "completion_window": "24h",
            "metadata": {},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    ),
]
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
    b'name="expires_after[seconds]"\r\n\r\n3600\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n{}\n\r\n--b--\r\n"
)
