"""Every field of /v1/messages and /v1/messages/count_tokens that Anthropic's reference names, and its treatment here.

Like field_table.py for OpenAI's routes: the page of fields is made of this, and a test holds it to the structs of bodies.
"""

from typing import Literal, NamedTuple

from field_table import Treatment


class MessagesField(NamedTuple):
    """routes: "messages", or "both". treatment, note: as in field_table.Field."""

    name: str
    routes: Literal["both", "messages"]
    treatment: Treatment
    note: str = ""


FIELDS = (
    MessagesField("model", "both", "works", "one of the served names; 404 for another; without it, the first"),
    MessagesField("messages", "both", "works", "blocks of type text, thinking, redacted_thinking (left out), tool_use and "
                  "tool_result; those of tools that Anthropic runs are passed over, others: 400. A last message of the "
                  "assistant's is continued"),
    MessagesField("system", "both", "works", "a text or blocks of text; Claude Code's x-anthropic-billing-header is left out"),
    MessagesField("max_tokens", "messages", "works", "required; where the context has less room, the answer ends there, with "
                  "stop_reason model_context_window_exceeded; 0 computes the prompt for the cache"),
    MessagesField("stop_sequences", "messages", "works"),
    MessagesField("stream", "messages", "works"),
    MessagesField("temperature", "messages", "works", "above 1, too"),
    MessagesField("top_p", "messages", "works"),
    MessagesField("top_k", "messages", "works"),
    MessagesField("tools", "both", "works", "of type custom, with strict, input_examples and cache_control; tools that "
                  "Anthropic defines or runs are left out, with a log line"),
    MessagesField("tool_choice", "both", "works", "auto, any, tool and none, with disable_parallel_tool_use"),
    MessagesField("thinking", "both", "works", "enabled with budget_tokens (from 1 on; without effect on a model that does not "
                  "reason), adaptive, disabled; display: omitted"),
    MessagesField("output_config", "both", "works", "format; effort as the template's reasoning_effort"),
    MessagesField("output_format", "both", "works", "the older place of output_config.format"),
    MessagesField("chat_template_kwargs", "both", "works", "not Anthropic's: as with chats"),
    MessagesField("cache_salt", "messages", "works", "not Anthropic's: as with chats"),
    MessagesField("priority", "messages", "works", "not Anthropic's: as with chats"),
    MessagesField("timeout", "messages", "works", "not Anthropic's: as with chats"),
    MessagesField("vllm_xargs", "messages", "works", "not Anthropic's: as with chats"),
    MessagesField("cache_control", "both", "harmless", "every prefix is cached, with or without it"),
    MessagesField("metadata", "messages", "harmless"),
    MessagesField("service_tier", "messages", "harmless"),
    MessagesField("container", "both", "refused"),
    MessagesField("mcp_servers", "both", "harmless", "left out, with a log line: the server runs no tools"),
    MessagesField("context_management", "both", "refused", "but for clear_thinking that keeps all"),
    MessagesField("compaction", "both", "refused"),
    MessagesField("diagnostics", "both", "refused"),
    MessagesField("fallbacks", "both", "refused"),
    MessagesField("fallback_credit_token", "both", "refused"),
    MessagesField("billing_policy", "both", "refused"),
    MessagesField("thread", "both", "refused", "with the code that makes clients send whole conversations"),
    MessagesField("inference_geo", "both", "refused", "but for 'global'"),
    MessagesField("speed", "both", "refused", "but for 'standard'"),
    MessagesField("watermarking", "both", "refused"),
    MessagesField("kv_transfer_params", "both", "refused"),
    MessagesField("ec_transfer_params", "both", "refused"),
)  # fmt: skip
