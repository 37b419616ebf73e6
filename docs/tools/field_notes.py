"""Notes on the fields of bodies and answers that field_table.py does not explain.

The page of fields in docs/ is made of these tables, and a test fails for a field of a struct that has no note. The code does
not read them. A field that a body has in common with the generating routes means the same and needs no line here.
"""

from typing import NamedTuple

from field_table import Treatment

from quire.frontend.http.batches.lines import ENDPOINTS


class Note(NamedTuple):
    text: str
    default: str = ""
    treatment: Treatment = "works"
    bounds: str = ""  # where they are not SamplingParams' of the same name


_GRAMMAR = "up to 256 KiB, 64 brackets deep"

_ANTHROPIC = {
    "container": Note("the server runs no tools", treatment="refused"),
    "mcp_servers": Note("left out: the server calls no others", treatment="harmless"),
    "compaction": Note("contexts are not compacted", treatment="refused"),
    "diagnostics": Note("there are none", treatment="refused"),
    "fallbacks": Note("one model is served", treatment="refused"),
    "fallback_credit_token": Note("one model is served", treatment="refused"),
    "billing_policy": Note("nothing is billed", treatment="refused"),
}

# By struct, then by field.
FIELDS_OF: dict[str, dict[str, Note]] = {
    "StreamOptions": {
        "include_usage": Note("a last event with the usage", "false, or --enable-force-include-usage"),
        "continuous_usage_stats": Note(
            "the usage so far in every event, with include_usage", "false, or --enable-force-include-usage"
        ),
        "include_obfuscation": Note("false only: events are not padded", "false"),
    },
    "ResponseFormat": {
        "type": Note("text, json_object, json_schema or structural_tag"),
        "json_schema": Note("with type json_schema"),
        "structures": Note("with type structural_tag: what stands between which tags, as in vLLM"),
        "triggers": Note("with type structural_tag: texts that begin a tag"),
        "format": Note("with type structural_tag: the newer form of it, as in vLLM"),
        "definitions": Note("with format: formats by name, which it refers to"),
    },
    "JsonSchemaFormat": {
        "name": Note("for the client's own use"),
        "schema": Note(f"the JSON Schema that the answer follows; {_GRAMMAR}"),
        "description": Note("for the client's own use"),
        "strict": Note("the schema is followed either way"),
    },
    "StructuredOutputsFields": {
        "json": Note(f"a JSON Schema, as an object or a text; {_GRAMMAR}"),
        "regex": Note("a regular expression that the whole answer matches"),
        "choice": Note("texts, of which the answer is one"),
        "grammar": Note("a context-free grammar, in Lark or EBNF"),
        "json_object": Note("any JSON object"),
        "structural_tag": Note("what stands between which tags, as vLLM's JSON"),
        "disable_any_whitespace": Note("with json: no white space but what JSON needs", "false"),
        "disable_additional_properties": Note("with json: objects have no properties but those of the schema", "false"),
        "whitespace_pattern": Note("with json: a regular expression of the white space that there may be"),
        "disable_fallback": Note("there is one way to structured outputs", treatment="harmless"),
        "_backend": Note("likewise: vLLM's own object has it", treatment="harmless"),
        "_backend_was_auto": Note("likewise", treatment="harmless"),
    },
    "GenerateRequest": {
        "token_ids": Note("the prompt"),
        "sampling_params": Note("how to sample; the defaults are these, not the model's"),
        "cache_salt": Note("only requests of the same salt share prefixes in the cache", "none"),
        "return_token_ids": Note("the prompt's ids in the answer", "false"),
        "output_mode": Note("tokens only", "tokens"),
        "reasoning_ended": Note(
            "true: structured outputs begin with the first token, as always; false: 400 beside them", "true"
        ),
        **dict.fromkeys(
            ("token_offsets", "reasoning_parser_kwargs", "parse_context"),
            Note("for the text that vLLM's other routes made and make of it", treatment="harmless"),
        ),
        **dict.fromkeys(
            ("features", "content_parts", "ec_transfer_params"), Note("models of text only are served", treatment="refused")
        ),
    },
    "TokenSamplingParams": {
        "max_tokens": Note("longest answer", "the rest of the context"),
        "temperature": Note("0: always the likeliest token", "1.0"),
        "top_p": Note("sample from the likeliest tokens that have this probability together", "1.0"),
        "top_k": Note("sample from so many of the likeliest tokens; 0 and -1: all", "0"),
        "repetition_penalty": Note("logits of tokens of prompt and answer are divided by it (multiplied, if below 0)", "1.0"),
        "logprobs": Note("likeliest tokens to list beside each", "none"),
        "extra_args": Note("arguments of the classes of --logits-processors; up to 64 names, 16 KiB", "none"),
        "guided_decoding": Note("the older name of structured_outputs", treatment="refused"),
        **dict.fromkeys(
            ("logprob_token_ids", "repetition_detection", "routed_experts_prompt_start", "watermarking"),
            Note("as in the other routes", treatment="refused"),
        ),
        **dict.fromkeys(("prompt_logprob_token_ids", "prompt_logprob_start"), Note("see prompt_logprobs", treatment="refused")),
        "trace_decode_token_ids": Note("ids of the answer are in it", treatment="refused"),
        **dict.fromkeys(("detokenize", "output_kind"), Note("answers are token ids; stream says when", treatment="harmless")),
    },
    "ResponsesRequest": {
        "image": Note("models of text only are served", treatment="refused"),
        "prompt": Note("templates of prompts are not kept: send their text", treatment="refused"),
        "enable_response_messages": Note("see return_prompt_text of chats", treatment="refused"),
        "max_output_tokens": Note("longest answer, reasoning included", "the rest of the context"),
        "cache_salt": Note("only requests of the same salt share prefixes in the cache", "none"),
        "priority": Note("lower goes first; needs --scheduling-policy priority, unless it is 0", "0"),
        "timeout": Note("seconds until it must have ended, else 504; see limits.md", "--request-timeout-s"),
        "store": Note("keep the response, for 30 days; the answer says false where it could not be kept", "true"),
        "top_logprobs": Note("0 to 20; more than 0 asks for log-probabilities by itself", "0"),
        "background": Note("answer at once, and work on; needs store; not with stream", "false"),
        "structured_outputs": Note("as with chats; excludes text.format", "none"),
        "tools": Note(
            "functions, custom tools, namespaces of them; those that OpenAI runs are left out, with a log line", "none"
        ),
        "thinking_token_budget": Note("so many tokens of thinking, at most; for reasoning models; -1: no limit", "no limit"),
    },
    "ResponsesStreamOptions": {"include_obfuscation": Note("false only: events are not padded", "false")},
    "TextConfig": {
        "format": Note("what the answer must be", "text"),
        "verbosity": Note("handed to the chat template"),
    },
    "TextFormat": {
        "type": Note("text, json_object or json_schema"),
        "name": Note("with json_schema: for the client's own use"),
        "schema": Note(f"with json_schema: what the answer follows; {_GRAMMAR}"),
        "description": Note("for the client's own use"),
        "strict": Note("the schema is followed either way"),
    },
    "ReasoningConfig": {
        "effort": Note("handed to the chat template; none turns thinking off where the template can"),
        "summary": Note("auto only: reasoning is returned whole"),
        "generate_summary": Note("the older name of summary"),
        "context": Note("auto only"),
        "mode": Note("standard only"),
    },
    "PromptCacheOptions": {
        "mode": Note("prefixes are found by their tokens", treatment="harmless"),
        "ttl": Note("blocks stay until their memory is needed", treatment="harmless"),
        "prewarm": Note("prefixes are found by their tokens", treatment="refused"),
        "comparison_response_id": Note("prefixes are found by their tokens", treatment="refused"),
    },
    "MessagesRequest": {
        **_ANTHROPIC,
        "max_tokens": Note(
            "longest answer; where the context has less room, the answer ends there, with stop_reason "
            "model_context_window_exceeded; 0 computes the prompt for the cache",
            bounds="at least 0",
        ),
        "stop_sequences": Note("texts that end the answer: up to 64 of up to 1,024 characters", "none"),
        "temperature": Note("0: always the likeliest token; above 1, too", "the model's, or 1.0"),
        "top_p": Note("sample from the likeliest tokens that have this probability together", "the model's, or 1.0"),
        "top_k": Note("sample from so many of the likeliest tokens", "the model's, or all"),
    },
    "CountTokensRequest": _ANTHROPIC,
    "InputMessage": {
        "role": Note("user or assistant"),
        "content": Note("a text, or blocks"),
    },
    "Block": {
        "type": Note("text, thinking, redacted_thinking, tool_use or tool_result"),
        "text": Note("of a text"),
        "thinking": Note("reasoning, which the model is shown again"),
        "signature": Note("of reasoning: ignored"),
        "data": Note("of redacted reasoning, which is left out"),
        "id": Note("of a call"),
        "name": Note("of a call: the function"),
        "input": Note("of a call: its arguments"),
        "tool_use_id": Note("of a result: the call's id"),
        "content": Note("of a result: a text, or blocks of text"),
        "is_error": Note("of a result: the call has failed", "false"),
        "tool_name": Note("of a `tool_reference` in a result: a function that the client's own search has found"),
        "cache_control": Note("every prefix is cached, with or without it", treatment="harmless"),
    },
    "Tool": {
        "type": Note("custom; tools that Anthropic defines or runs are left out", "custom"),
        "name": Note("of the function"),
        "description": Note("for the model"),
        "input_schema": Note("a JSON Schema of its arguments"),
        "strict": Note("arguments follow the schema", "false"),
        "input_examples": Note("shown to the model with the description"),
        "allowed_callers": Note("direct only"),
        "defer_loading": Note("no effect: every tool is loaded at once"),
        "eager_input_streaming": Note("arguments are streamed as they are written", treatment="harmless"),
        "cache_control": Note("every prefix is cached, with or without it", treatment="harmless"),
    },
    "ToolChoice": {
        "type": Note("auto; any: some tool; tool: the one named; none"),
        "name": Note("with tool: the function"),
        "disable_parallel_tool_use": Note("one call in an answer, at most", "false"),
    },
    "ThinkingConfig": {
        "type": Note("enabled, adaptive or disabled"),
        "budget_tokens": Note("with enabled: tokens of thinking, at most; from 1 on"),
        "display": Note("omitted: reasoning is left out of the answer", "summarized: it is returned whole"),
    },
    "OutputConfig": {
        "effort": Note("handed to the chat template, as reasoning_effort"),
        "format": Note("what the answer must be"),
        "task_budget": Note("use max_tokens", treatment="refused"),
    },
    "OutputFormat": {
        "type": Note("json_schema"),
        "schema": Note(f"what the answer follows; {_GRAMMAR}"),
    },
    "BatchRequest": {
        "input_file_id": Note("a file of purpose batch: a request a line, up to 50,000 lines"),
        "endpoint": Note(f"{' or '.join(ENDPOINTS)}, as in every line"),
        "completion_window": Note("24h, or another number of hours (h) or days (d), up to 30d"),
        "output_expires_after": Note("when the files of answers go", "30 days after they are made"),
    },
    "ExpiresAfter": {"anchor": Note("created_at"), "seconds": Note("3,600 to 2,592,000")},
    "TokenizeRequest": {
        "prompt": Note("a text; either this or messages", "none"),
        "messages": Note("a conversation; either this or prompt", "none"),
        "add_special_tokens": Note("put the tokenizer's special tokens around it", "true for a prompt, false for messages"),
        "return_token_strs": Note("the tokens as the vocabulary writes them, too", "false"),
    },
    "DetokenizeRequest": {"tokens": Note("token ids of the vocabulary")},
}

# By field, or by struct and field where it differs.
ANSWERS: dict[str, str] = {
    "id": "its name",
    "object": "what it is",
    "created": "when, in seconds since 1970",
    "model": "the name that was asked for",
    "choices": "the answers, n a prompt",
    "usage": "tokens of prompt and answers",
    "prompt_logprobs": "with prompt_logprobs: by token of the prompt, ids and their log-probabilities; null for the first",
    "prompt_token_ids": "with return_token_ids",
    "prompt_text": "with return_prompt_text",
    "prompt_tokens": "of all prompts",
    "completion_tokens": "of all answers, those that best_of left out included",
    "total_tokens": "both",
    "prompt_tokens_details": "of the prompts' tokens",
    "completion_tokens_details": "of the answers' tokens, where there is reasoning",
    "cached_tokens": "found in the prefix cache",
    "reasoning_tokens": "of the reasoning",
    "index": "which answer, from 0",
    "message": "the answer",
    "logprobs": "with logprobs: of each token",
    "finish_reason": "stop, length, tool_calls, abort or error",
    "GenerateChoice.finish_reason": "stop, length, abort or error; null in a stream's earlier events",
    "stop_reason": "the stop text or token id that ended it; null for the model's own end",
    "token_ids": "with return_token_ids: of the answer",
    "GenerateChoice.token_ids": "of the answer; in a stream, the new ones",
    "role": "assistant, or --response-role",
    "content": "the text; null beside calls without one",
    "ChatLogprobs.content": "by token",
    "refusal": "null",
    "tool_calls": "functions and custom tools to call",
    "reasoning": "the model's reasoning, if it writes some",
    "reasoning_content": "the same, under its older name",
    "function": "what to call",
    "type": "function",
    "name": "of the function",
    "arguments": "JSON, as a text",
    "custom": "what to call",
    "CustomCall.name": "of the custom tool",
    "CustomCall.input": "a text",
    "logprob": "natural logarithm of the probability, before penalties and temperature",
    "rank": "1 for the likeliest",
    "decoded_token": "its text",
    "token": "its text, or token_id:N",
    "bytes": "its text in UTF-8",
    "FileObject.bytes": "its length",
    "top_logprobs": "the likeliest tokens",
    "text": "the answer",
    "text_offset": "where each token begins in the text, in characters",
    "token_logprobs": "by token",
    "tokens": "as texts",
    "TokenizeResponse.tokens": "token ids",
    "request_id": "its name",
    # responses
    "ResponseObject.id": "its name, to go on from or to read again",
    "ResponseObject.status": "completed, incomplete, failed, cancelled, in_progress or queued",
    "ResponseObject.tools": "as they were asked for",
    "ResponseObject.object": "response",
    "completed_at": "when it was completed, or null",
    "error": "why it failed, or null",
    "incomplete_details": "why it is not complete, or null",
    "reason": "max_output_tokens, or what else ended it early",
    "output": "items: message, reasoning, function_call, custom_tool_call",
    "previous_response_id": "what it goes on from",
    "store": "whether it was kept",
    **dict.fromkeys(
        (
            "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "temperature", "top_p", "truncation", "user",
            "safety_identifier", "prompt_cache_key", "instructions", "tool_choice", "background",
            "ResponseObject.top_logprobs", "ResponseObject.reasoning", "ResponseObject.text",
        ),
        "as it was asked for",
    ),
    "ResponseError.message": "what is wrong",
    "service_tier": "there is one",
    "input_tokens": "of the prompt",
    "output_tokens": "of the answer",
    "input_tokens_details": "of the prompt's tokens",
    "output_tokens_details": "of the answer's tokens",
    "cache_write_tokens": "0",
    # messages
    "MessagesResponse.type": "message",
    "MessagesResponse.content": "blocks: text, thinking, tool_use",
    "MessagesResponse.stop_reason": "end_turn, max_tokens, stop_sequence, tool_use or model_context_window_exceeded",
    "stop_sequence": "the text that ended it, or null",
    "MessagesUsage.input_tokens": "of the prompt, those found in the cache left out",
    "cache_creation_input_tokens": "0",
    "cache_read_input_tokens": "found in the prefix cache",
    "thinking_tokens": "of the reasoning",
    "thinking": "the reasoning",
    "signature": "made by the server; it is not checked",
    "input": "arguments, a JSON object",
    "ToolUseBlock.id": "to send back with the result",
    "kv_transfer_params": "null",
    "data": "one after another",
    "owned_by": "quire",
    "root": "the first name of the model",
    "parent": "null",
    "max_model_len": "longest sequence, prompt and answer",
    "permission": "for clients that look for it: says nothing",
    **dict.fromkeys(
        (
            "allow_create_engine", "allow_sampling", "allow_logprobs", "allow_search_indices", "allow_view",
            "allow_fine_tuning", "organization", "group", "is_blocking",
        ),
        "always the same",
    ),
    "created_at": "when it was made, in seconds since 1970; the other times likewise",
    "expires_at": "when it goes; of a batch: the end of its window",
    "filename": "as it was uploaded",
    "purpose": "batch",
    "status": "processed",
    "status_details": "null",
    "Batch.status": "validating, in_progress, finalizing, completed, failed, expired, cancelling, cancelled",
    "endpoint": "the route of its requests",
    "errors": "what is wrong with its input",
    "input_file_id": "its requests",
    "completion_window": "as it was asked for",
    "output_file_id": "answers of requests that succeeded, when it has ended",
    "error_file_id": "answers of those that failed",
    **{f"{state}_at": "when it got there, or null" for state in (
        "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")},
    "request_counts": "of its lines",
    "metadata": "as it was given: up to 16 texts of up to 512 characters, under names of up to 64",
    "output_expires_after_s": "as it was asked for",
    "total": "all of them",
    "completed": "that succeeded",
    "failed": "that did not",
    "code": "as in errors",
    "BatchErrors.data": "the first 100",
    "BatchError.code": "as in errors, or of a line or its file: invalid_json_line, duplicate_custom_id, mismatched_endpoint, …",
    "BatchError.message": "what is wrong",
    "param": "the field",
    "line": "of the input, from 1",
    "count": "of token ids",
    "token_strs": "with return_token_strs",
    "prompt": "the text",
    "server_load": "requests (prompts) that this process works on",
    "version": "of the engine",
    "vllm_config": "the engine's configuration, without keys: a text, or with ?config_format=json an object",
    "vllm_env": "empty",
    "system_env": "of the frontend's machine",
    "success": "false while requests run: their blocks are cached again when they end",
    "traces": "files in the folder of --profile-dir, one a worker",
}  # fmt: skip

# By method and path: what a summary has no room for.
ROUTE_NOTES: dict[str, str] = {
    "POST /v1/files": "up to 200 MiB",
    "GET /v1/files": "up to 10,000 in a list",
    "GET /v1/batches": "up to 100 in a list, 20 unless limit says otherwise",
    "POST /start_profile": "needs --profile-dir",
    "POST /stop_profile": "waits until they are written",
    "GET /metrics": "without a key with --metrics-open; see [metrics.md](metrics.md)",
    "GET /health": "200, or 503 while the engine is down, starts or hangs",
    "GET /live": "200 as long as the process turns, whatever the engine does",
    "GET /ready": "as /health, and 503 from the moment at which the server is told to stop",
    "GET /v1/models/{model}": "its id may hold slashes",
}
