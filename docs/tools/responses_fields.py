"""Every field of /v1/responses that OpenAI's and vLLM's references name, and its treatment here.

Like field_table.py for the other routes: the page of fields in docs/ is made of this, and a test holds it to the struct.
"""

from field_table import Field, Treatment

from quire.frontend.http.api.responses.request import AS_IN_CHATS


def _field(name: str, treatment: Treatment = "works", note: str = "") -> Field:
    return Field(name, "responses", treatment, note)


_NOTES = {
    "structured_outputs": "vLLM's; excludes text.format",
    "priority": "needs --scheduling-policy priority, unless it is 0",
    "timeout": "seconds until it must have ended, else 504",
    "cache_salt": "up to 1024 characters",
    "request_id": "the response's id is made of it; the header X-Request-Id goes before it",
}
FIELDS = (
    # what the answer is to be made of
    _field("model", note="one of the served names; 404 for another; without it, the first"),
    _field("input", note="a text, or items: message, function_call, function_call_output, reasoning, item_reference"),
    _field("instructions", note="the system's message; not carried over to the next response"),
    _field("previous_response_id", note="goes on from a response that was kept, of the same API key"),
    _field("truncation", note="auto: the oldest turns are left out if the conversation does not fit"),
    _field("conversation", "refused", "previous_response_id goes on from a response"),
    _field("prompt", "refused"),
    _field("context_management", "refused", "see truncation"),
    _field("previous_input_messages", "refused", "vLLM's; send them as items"),
    _field("previous_response", "refused", "vLLM's; send its output as items"),
    _field("mm_processor_kwargs", "refused", "the server says how images are processed, with --mm-processor-kwargs"),
    _field("media_io_kwargs", "refused"),
    _field("kv_transfer_params", "refused"),
    _field("ec_transfer_params", "refused"),
    _field("image", "refused"),
    # tools, reasoning, structure
    _field("tools", note="functions, custom tools, namespaces of them; those that OpenAI runs are left out, with a log line"),
    _field("tool_choice", note="none, auto, required, a function, a custom tool, or allowed_tools"),
    _field("parallel_tool_calls"),
    _field("max_tool_calls", "harmless", "of tools that a server runs; there are none"),
    _field("text", note="format: text, json_object or json_schema; verbosity is handed to the chat template"),
    _field("reasoning", note="effort is handed to the chat template; summary: auto only, because reasoning is returned whole"),
    _field("include_reasoning", "refused", "reasoning is an item of its own, which a client may skip; true is accepted"),
    # how long, and what is as in /v1/chat/completions
    _field("max_output_tokens", note="default: the rest of the context"),
    *(_field(name, note=_NOTES.get(name, "")) for name in AS_IN_CHATS),
    # what is returned
    _field("stream", note="events as OpenAI's; the first with the first token"),
    _field("stream_options", note="include_obfuscation: false only"),
    _field("include", note="message.output_text.logprobs, reasoning.encrypted_content; of others there is nothing to include"),
    _field("top_logprobs", note="0 to --max-logprobs, -1: so many; any but 0 asks for log-probabilities by itself"),
    _field("metadata", note="up to 16 texts, returned with the response"),
    _field("enable_response_messages", "refused", "vLLM's"),
    _field("moderation", "refused"),
    _field("watermarking", "refused"),
    # how it is run and kept
    _field("store", note="default true; the answer says false where it could not be kept"),
    _field("background", note="needs store; not with stream"),
    _field("background_options", "harmless", "what runs in the background runs at once"),
    _field("personality", "refused", "of /v1/responses/input_tokens; say it in instructions"),
    # what asks for nothing here
    _field("user", "harmless"),
    _field("safety_identifier", "harmless"),
    _field("prompt_cache_key", "harmless", "prefixes are found by their tokens"),
    _field("prompt_cache_options", "harmless", "but for prewarm and comparison_response_id, which are refused"),
    _field("prompt_cache_retention", "harmless"),
    _field("service_tier", "harmless", "there is one: default"),
    _field("access_programs", "refused", "standard is accepted"),
)  # fmt: skip
