"""Every field of /v1/chat/completions and /v1/completions that OpenAI's and vLLM's references name, and its treatment here.

The page of fields in docs/ is made of this, and a test holds it to the structs that decode bodies. The code does not read it.
"""

from typing import Literal, NamedTuple

Treatment = Literal["works", "harmless", "refused"]


class Field(NamedTuple):
    """routes: "chat", "completions", "both" of them, or "responses". treatment: "works", as its reference says; "harmless",
    taken without effect; "refused" with a 400 that names it, unless its value changes nothing. note: its meaning. default:
    given here if SamplingParams has no field of the name."""

    name: str
    routes: Literal["both", "chat", "completions", "responses"]
    treatment: Treatment
    note: str = ""
    default: str = ""


FIELDS = (
    # what the answer is to be made of
    Field("model", "both", "works", "one of the served names; 404 for another", "the first"),
    Field(
        "messages",
        "chat",
        "works",
        "the conversation; content as a text or as parts of type text; up to 16,384 messages, parts and calls",
        "required",
    ),
    Field(
        "prompt",
        "completions",
        "works",
        "a text, a list of texts, token ids or a list of lists of them; up to 1,024 prompts",
        "required",
    ),
    Field("suffix", "both", "refused", "text behind the gap that is to be filled: no model here does that"),
    Field("prompt_embeds", "both", "refused", "prompts are texts or token ids"),
    Field("documents", "chat", "works", "handed to the chat template"),
    Field(
        "chat_template",
        "chat",
        "works",
        "a jinja2 template of the request's own; with --trust-request-chat-template only, else 400; sandboxed, and has 2 s",
        "the model's",
    ),
    Field(
        "chat_template_kwargs",
        "chat",
        "works",
        "variables for the chat template",
        "--default-chat-template-kwargs",
    ),
    Field(
        "add_generation_prompt",
        "chat",
        "works",
        "end the prompt with the head of an assistant's message",
        "true, but for continue_final_message",
    ),
    Field(
        "continue_final_message",
        "chat",
        "works",
        "go on with the last message in place of a new one; excludes add_generation_prompt",
        "false",
    ),
    Field("add_special_tokens", "completions", "works", "put the tokenizer's special tokens around a text", "true"),
    Field("add_special_tokens", "chat", "works", "put the tokenizer's special tokens around the prompt", "false"),
    Field(
        "truncate_prompt_tokens",
        "both",
        "works",
        "keep so many tokens of the prompt; -1: what fits into the context beside max_tokens",
        "all",
    ),
    Field("truncation_side", "both", "works", "the side that is cut off: left or right", "left"),
    Field("media_io_kwargs", "both", "refused", "an image is decoded in one way"),
    Field(
        "mm_processor_kwargs",
        "chat",
        "works",
        "how large images become: min_pixels, max_pixels, size, min_patches, max_patches, as the model's processor has them; "
        "with --trust-request-mm-kwargs only, else 400",
        "--mm-processor-kwargs",
    ),
    # tools, reasoning, structure
    Field(
        "tools",
        "chat",
        "works",
        "functions that may be called: name, description, parameters, strict (its schema is followed, or 400); up to 256 KiB",
        "none",
    ),
    Field(
        "tool_choice",
        "chat",
        "works",
        "none, auto, required, an object with a function, or OpenAI's allowed_tools; see --tool-call-parser",
        "auto",
    ),
    Field("parallel_tool_calls", "chat", "works", "false: one call in an answer, at most", "true"),
    Field("functions", "both", "refused", "OpenAI's older form of tools: use tools"),
    Field("function_call", "both", "refused", "likewise: use tool_choice; none and auto are accepted"),
    Field("reasoning_effort", "chat", "works", "handed to the chat template; none turns thinking off where the template can"),
    Field("include_reasoning", "chat", "works", "false: reasoning is left out of the answer", "true"),
    Field(
        "thinking_token_budget",
        "chat",
        "works",
        "so many tokens of thinking, at most; for reasoning models; -1: no limit",
        "no limit",
    ),
    Field("thinking_token_budget", "completions", "refused", "only chats know where reasoning ends; -1 is accepted"),
    Field(
        "response_format",
        "both",
        "works",
        "type text, json_object, json_schema or structural_tag: what the answer must be; up to 256 KiB, 64 brackets deep",
        "text",
    ),
    Field(
        "structured_outputs",
        "both",
        "works",
        "one of json, regex, choice, grammar, json_object, structural_tag: what the answer must be; same limits",
        "none",
    ),
    Field("guided_json", "both", "works", "vLLM's older name of structured_outputs.json"),
    Field("guided_regex", "both", "works", "likewise, of .regex"),
    Field("guided_choice", "both", "works", "likewise, of .choice"),
    Field("guided_grammar", "both", "works", "likewise, of .grammar"),
    # how many, how long
    Field("n", "both", "works", "answers to make of a prompt; prompts times n may be 2,048"),
    Field(
        "best_of",
        "both",
        "works",
        "answers to make, of which the n with the highest log-probability a token are returned; up to 128; not with stream",
        "n",
    ),
    Field("max_tokens", "completions", "works", "longest answer; 0 with echo: none", "16"),
    Field("max_tokens", "chat", "works", "longest answer", "the rest of the context"),
    Field("max_completion_tokens", "chat", "works", "the same; goes before max_tokens", "max_tokens"),
    Field("min_tokens", "both", "works", "no end before so many tokens; at most max_tokens"),
    Field("stop", "both", "works", "texts that end the answer: up to 64 of up to 1,024 characters", "none"),
    Field("stop_token_ids", "both", "works", "token ids that end the answer: up to 240", "none"),
    Field("include_stop_str_in_output", "both", "works", "leave the stop text in the answer"),
    Field("ignore_eos", "both", "works", "go on past the model's end-of-sequence token"),
    # sampling
    Field("temperature", "both", "works", "0: always the likeliest token", "the model's, or 1.0"),
    Field(
        "top_p",
        "both",
        "works",
        "sample from the likeliest tokens that have this probability together",
        "the model's, or 1.0",
    ),
    Field("top_k", "both", "works", "sample from so many of the likeliest tokens; 0 and -1: all", "the model's, or 0"),
    Field("min_p", "both", "works", "sample from tokens of at least this part of the likeliest one's probability"),
    Field("presence_penalty", "both", "works", "subtracted from the logits of tokens that were generated"),
    Field("frequency_penalty", "both", "works", "the same, times how often"),
    Field(
        "repetition_penalty",
        "both",
        "works",
        "logits of tokens of prompt and answer are divided by it (multiplied, if below 0)",
        "the model's, or 1.0",
    ),
    Field(
        "seed",
        "both",
        "works",
        "the same seed gives the same noise, whatever runs beside the request; -1: a random one",
        "a random one",
    ),
    Field("logit_bias", "both", "works", "token id: a number from -100 to 100, added to its logit; up to 1,024 ids", "none"),
    Field("allowed_token_ids", "both", "works", "no other token may be sampled; not empty", "all"),
    Field("bad_words", "both", "works", "texts that are never generated: up to 256 of up to 16 tokens", "none"),
    Field(
        "logits_processors",
        "both",
        "refused",
        "classes are named at start, with --logits-processors; their arguments are in vllm_xargs",
    ),
    Field(
        "vllm_xargs",
        "both",
        "works",
        "arguments of the classes of --logits-processors; up to 64 names, 16 KiB",
        "none",
    ),
    Field("repetition_detection", "both", "refused", "an end by repetition: use max_tokens, or the penalties"),
    Field("watermarking", "both", "refused", "answers carry no watermark"),
    # beam search
    Field(
        "use_beam_search",
        "both",
        "works",
        "n beams, or best_of of which n are returned; up to 64; not with stream",
        "false",
    ),
    Field(
        "length_penalty",
        "both",
        "works",
        "with use_beam_search; -20 to 20; the length counts the prompt, as in vLLM",
        "1.0",
    ),
    Field("early_stopping", "both", "works", "with use_beam_search: end with the first completed beams", "false"),
    # what is returned
    Field("stream", "both", "works", "server-sent events, as tokens come", "false"),
    Field(
        "stream_options",
        "both",
        "works",
        "with stream: include_usage, continuous_usage_stats; include_obfuscation: false only",
        "none",
    ),
    Field("stream_interval", "both", "refused", "each token is sent when it is there; 1 is accepted"),
    Field("echo", "completions", "works", "the prompt goes before the answer", "false"),
    Field("echo", "chat", "works", "the last message goes before the answer, if it is the assistant's", "false"),
    Field("logprobs", "completions", "works", "likeliest tokens to list beside each; true is 1", "none"),
    Field("logprobs", "chat", "works", "of each token of the answer", "false"),
    Field(
        "top_logprobs",
        "chat",
        "works",
        "likeliest tokens to list beside each; 0 to --max-logprobs, -1: so many; needs logprobs: true",
        "0",
    ),
    Field("prompt_logprobs", "both", "works", "the same for the prompt's tokens; not with stream", "none"),
    Field("logprob_token_ids", "both", "refused", "logprobs of tokens by id: use logprobs, which lists the likeliest"),
    Field("return_token_ids", "both", "works", "ids of prompt and answer in the answer", "false"),
    Field("return_tokens_as_token_ids", "both", "works", "logprobs name tokens token_id:N", "--return-tokens-as-token-ids"),
    Field("return_prompt_text", "chat", "works", "the prompt as the chat template made it, in prompt_text", "false"),
    Field("return_assistant_tokens_mask", "both", "harmless", "of vLLM's render routes only"),
    Field("return_token_offsets", "both", "harmless", "of vLLM's render routes only"),
    Field("return_mm_kwargs", "both", "harmless", "of vLLM's render routes only"),
    Field("mm_payload", "both", "harmless", "of vLLM's render routes only"),
    Field("return_weight_versions", "both", "refused", "weights are loaded once"),
    Field("routed_experts_prompt_start", "both", "refused", "which experts were chosen is not told; 0 is accepted"),
    Field("skip_special_tokens", "both", "works", "leave special tokens out of the text"),
    Field("spaces_between_special_tokens", "both", "works", "put spaces between those that are shown"),
    Field("modalities", "both", "refused", 'answers are texts; ["text"] is accepted'),
    Field("audio", "both", "refused", "answers are texts"),
    Field("prediction", "both", "refused", "no draft of an answer is made use of"),
    Field("web_search_options", "both", "refused", "the server fetches nothing"),
    Field("moderation", "both", "refused", "answers are not judged"),
    # how it is run
    Field("priority", "both", "works", "lower goes first; needs --scheduling-policy priority, unless it is 0", "0"),
    Field("timeout", "both", "works", "seconds until it must have ended, else 504; see limits.md", "--request-timeout-s"),
    Field(
        "cache_salt",
        "both",
        "works",
        "only requests of the same salt share prefixes in the cache",
        "none",
    ),
    Field("skip_reading_prefix_cache", "both", "works", "the whole prompt is computed, whatever of it is cached", "false"),
    Field(
        "request_id",
        "both",
        "works",
        "the answer's id is made of it; the header X-Request-Id goes before it; up to 128 letters, digits, ._:-",
        "a random one",
    ),
    Field("kv_transfer_params", "both", "refused", "KV blocks stay in their engine"),
    Field("ec_transfer_params", "both", "refused", "there are no encoders"),
    # what asks for nothing here
    Field("user", "both", "harmless", "the API key says which client asks"),
    Field("metadata", "both", "harmless", "nothing is stored with it"),
    Field("store", "both", "harmless", "nothing is stored"),
    Field("service_tier", "both", "harmless", "there is one"),
    Field("prompt_cache_key", "both", "harmless", "prefixes are found by their tokens"),
    Field("prompt_cache_options", "both", "harmless", "likewise"),
    Field("prompt_cache_retention", "both", "harmless", "likewise: blocks stay until their memory is needed"),
    Field("safety_identifier", "both", "harmless", "no user is looked up by it"),
    Field("session_id", "both", "harmless", "requests belong to no session"),
    Field("verbosity", "both", "harmless", "chat_template_kwargs reaches a template that knows one"),
)
