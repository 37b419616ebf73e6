"""What becomes of every field of /v1/chat/completions and /v1/completions that OpenAI's and vLLM's references name.

The page of fields in docs/ is made of this, and a test holds it to the structs that decode bodies. It decides nothing itself.
"""

from typing import Literal, NamedTuple

Treatment = Literal["works", "harmless", "refused"]


class Field(NamedTuple):
    """routes: "chat", "completions", "both" of them, or "responses". treatment: works, as its reference says; harmless: taken
    without effect, for it asks for nothing here; refused with a 400 that names it, but for values that ask for nothing. note:
    what to know."""

    name: str
    routes: Literal["both", "chat", "completions", "responses"]
    treatment: Treatment
    note: str = ""


FIELDS = (
    # what the answer is to be made of
    Field("model", "both", "works", "one of the served names; 404 for another; without it, the first"),
    Field("messages", "chat", "works", "content as a text or as parts of type text"),
    Field("prompt", "completions", "works", "a text, a list of texts, token ids or a list of lists of them"),
    Field("suffix", "both", "refused"),
    Field("prompt_embeds", "both", "refused"),
    Field("documents", "chat", "works", "handed to the chat template"),
    Field("chat_template", "chat", "works", "with --trust-request-chat-template only, else 400; rendered in a sandbox"),
    Field("chat_template_kwargs", "chat", "works"),
    Field("add_generation_prompt", "chat", "works", "default true, but for continue_final_message"),
    Field("continue_final_message", "chat", "works", "excludes add_generation_prompt"),
    Field("add_special_tokens", "both", "works", "default true for completions, false for chats"),
    Field("truncate_prompt_tokens", "both", "works", "-1: what fits into the context beside max_tokens"),
    Field("truncation_side", "both", "works", "the side that is cut off: left (default) or right"),
    Field("media_io_kwargs", "both", "refused"),
    Field("mm_processor_kwargs", "both", "refused"),
    # tools, reasoning, structure
    Field("tools", "chat", "works"),
    Field("tool_choice", "chat", "works"),
    Field("parallel_tool_calls", "chat", "works"),
    Field("functions", "both", "refused", "OpenAI's older form of tools"),
    Field("function_call", "both", "refused", "likewise; none and auto are accepted"),
    Field("reasoning_effort", "chat", "works", "handed to the chat template"),
    Field("include_reasoning", "chat", "works"),
    Field("thinking_token_budget", "chat", "works"),
    Field("response_format", "both", "works"),
    Field("structured_outputs", "both", "works"),
    Field("guided_json", "both", "works", "vLLM's older name; see structured_outputs"),
    Field("guided_regex", "both", "works", "likewise"),
    Field("guided_choice", "both", "works", "likewise"),
    Field("guided_grammar", "both", "works", "likewise"),
    # how many, how long
    Field("n", "both", "works", "1 to 128"),
    Field("best_of", "both", "works", "n of them, with the highest log-probability a token, are returned; not with stream"),
    Field("max_tokens", "both", "works", "default 16 for completions, the rest of the context for chats"),
    Field("max_completion_tokens", "chat", "works", "goes before max_tokens"),
    Field("min_tokens", "both", "works"),
    Field("stop", "both", "works", "up to 64 strings of up to 1024 characters"),
    Field("stop_token_ids", "both", "works", "up to 240"),
    Field("include_stop_str_in_output", "both", "works"),
    Field("ignore_eos", "both", "works"),
    # sampling
    Field("temperature", "both", "works"),
    Field("top_p", "both", "works"),
    Field("top_k", "both", "works"),
    Field("min_p", "both", "works"),
    Field("presence_penalty", "both", "works"),
    Field("frequency_penalty", "both", "works"),
    Field("repetition_penalty", "both", "works"),
    Field("seed", "both", "works"),
    Field("logit_bias", "both", "works", "keys are token ids; up to 1024"),
    Field("allowed_token_ids", "both", "works"),
    Field("bad_words", "both", "works"),
    Field("logits_processors", "both", "refused", "classes are named at start, with --logits-processors; see vllm_xargs"),
    Field("vllm_xargs", "both", "works", "arguments of those classes, as SamplingParams.extra_args; up to 16 KiB"),
    Field("repetition_detection", "both", "refused"),
    Field("watermarking", "both", "refused"),
    # beam search
    Field("use_beam_search", "both", "works", "n beams, or best_of of which n are returned; up to 64; not with stream"),
    Field("length_penalty", "both", "works", "with use_beam_search; -20 to 20; the length counts the prompt, as in vLLM"),
    Field("early_stopping", "both", "works", "with use_beam_search: end with the first completed beams"),
    # what is returned
    Field("stream", "both", "works"),
    Field("stream_options", "both", "works", "include_usage, continuous_usage_stats"),
    Field("stream_interval", "both", "refused", "1 is accepted"),
    Field("echo", "both", "works", "chats: the last message goes before the answer if it is the assistant's"),
    Field("logprobs", "both", "works", "completions: a number, 0 to 20; chats: true or false"),
    Field("top_logprobs", "chat", "works", "0 to 20; needs logprobs: true"),
    Field("prompt_logprobs", "both", "works", "0 to 20; not with stream"),
    Field("logprob_token_ids", "both", "refused"),
    Field("return_token_ids", "both", "works"),
    Field("return_tokens_as_token_ids", "both", "works"),
    Field("return_prompt_text", "chat", "works"),
    Field("return_token_offsets", "both", "harmless", "of vLLM's render routes only"),
    Field("return_mm_kwargs", "both", "harmless", "of vLLM's render routes only"),
    Field("routed_experts_prompt_start", "both", "refused", "0 is accepted"),
    Field("skip_special_tokens", "both", "works"),
    Field("spaces_between_special_tokens", "both", "works"),
    Field("modalities", "both", "refused", '["text"] is accepted'),
    Field("audio", "both", "refused"),
    Field("prediction", "both", "refused"),
    Field("web_search_options", "both", "refused"),
    Field("moderation", "both", "refused"),
    # how it is run
    Field("priority", "both", "works", "needs --scheduling-policy priority, unless it is 0"),
    Field("cache_salt", "both", "works", "up to 1024 characters"),
    Field("skip_reading_prefix_cache", "both", "works", "the whole prompt is computed"),
    Field("request_id", "both", "works", "the answer's id is made of it; the header X-Request-Id goes before it"),
    Field("kv_transfer_params", "both", "refused"),
    Field("ec_transfer_params", "both", "refused"),
    # what asks for nothing here
    Field("user", "both", "harmless"),
    Field("metadata", "both", "harmless"),
    Field("store", "both", "harmless", "nothing is stored"),
    Field("service_tier", "both", "harmless", "there is one"),
    Field("prompt_cache_key", "both", "harmless", "prefixes are found by their tokens"),
    Field("prompt_cache_options", "both", "harmless"),
    Field("prompt_cache_retention", "both", "harmless"),
    Field("safety_identifier", "both", "harmless"),
    Field("session_id", "both", "harmless"),
    Field("verbosity", "both", "harmless", "chat_template_kwargs reaches a template that knows one"),
)
