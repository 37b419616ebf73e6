"""Methods, fields and options of vLLM's that Quire does not have, each with the reason or the alternative, for errors and
docs/."""

from collections.abc import Mapping
from typing import Any, NoReturn

from quire.ipc.sampling import SamplingParams
from quire.ipc.unknown_names import NoSuchName, what_to_write

_SLEEP = "engines do not sleep"
_RLHF = "weights are read once, at the start"
LLM_METHODS = {
    "enqueue_chat": "`LLM.enqueue(llm.preprocess_chat(messages), params)`",
    "sleep": _SLEEP,
    "wake_up": _SLEEP,
    "collective_rpc": "no code is called by name from a wire",
    "apply_model": "the model is in another process",
    "reward": "`LLM.encode(prompts, pooling_task='token_classify')`",
    "init_weight_transfer_engine": _RLHF,
    "start_weight_update": _RLHF,
    "start_draft_weight_update": _RLHF,
    "update_weights": _RLHF,
    "finish_weight_update": _RLHF,
}
_TOKENIZER = "the engine reads its tokenizer when it starts: LLM(tokenizer=...)"
_OWN_STEPS = "`generate` does this by itself; `LLMEngine.add_request` and `LLMEngine.step` do it piece by piece"
_STREAM = "AsyncLLM.generate streams"
LLM_NAMES = LLM_METHODS | {  # of vLLM's older versions, or private to it but used by scripts
    "set_tokenizer": _TOKENIZER,
    "_run_engine": _OWN_STEPS,
    "_add_request": _OWN_STEPS,
    "_validate_and_add_requests": _OWN_STEPS,
    "request_counter": _OWN_STEPS,
    "default_sampling_params": "LLM.get_default_sampling_params()",
    "renderer": _OWN_STEPS,
    "io_processor": _OWN_STEPS,
    "pooling_io_processors": _OWN_STEPS,
    "runner_type": "LLM.supported_tasks",
    "tokenizer": "LLM.get_tokenizer()",
    "model": "the model is in another process",
    "engine": "LLM.llm_engine",
    "close": "LLM.shutdown()",
    "stop": "LLM.shutdown()",
    "terminate": "LLM.shutdown()",
    "unload": "LLM.shutdown()",
    "stream": _STREAM,
    "generate_async": _STREAM,
    "agenerate": _STREAM,
    "completion": "LLM.generate(prompts, SamplingParams(...))",
    "complete": "LLM.generate(prompts, SamplingParams(...))",
    "get_model_config": "LLM.model_config",
    "get_max_model_len": "LLM.model_config.max_model_len",
    "max_model_len": "LLM.model_config.max_model_len",
    "set_default_sampling_params": "LLM(override_generation_config={...})",
    "add_request": "LLM.llm_engine.add_request",
    "abort": "LLM.llm_engine.abort_request",
    "abort_request": "LLM.llm_engine.abort_request",
    "step": "LLM.llm_engine.step",
    "has_unfinished_requests": "LLM.llm_engine.has_unfinished_requests",
    "is_sleeping": _SLEEP,
    "load_weights": _RLHF,
    "input_processor": _OWN_STEPS,
    "processor": _OWN_STEPS,
}
_PAUSES = "an engine does not pause: it is idle when no request runs"
_PARTS = "the engine is a process of its own: its parts cannot be reached from here"
ENGINE_NAMES = LLM_NAMES | {
    "engine_core": _PARTS,
    "model_executor": _PARTS,
    "input_processor": _PARTS,
    "output_processor": _PARTS,
    "processor": _PARTS,
    "renderer": _PARTS,
    "pause_generation": _PAUSES,
    "resume_generation": _PAUSES,
    "is_paused": _PAUSES,
    "is_sleeping": _SLEEP,
    "scheduler": _PARTS,
    "driver_worker": _PARTS,
    "dp_group": _PARTS,
    "output_handler": _PARTS,
    "engine": _PARTS,
    "observability_config": _PARTS,
    "decoding_config": "Quire has one backend of its own for structured outputs",
    "structured_outputs_config": "Quire has one backend of its own for structured outputs",
    "compilation_config": "nothing is compiled by torch",
    "kv_transfer_config": "KV caches stay where they are",
    "input_preprocessor": _PARTS,
    "input_registry": _PARTS,
    "seq_counter": _PARTS,
    "stat_loggers": _PARTS,
    "stat_logger": _PARTS,
    "logger_manager": _PARTS,
    "remove_logger": _PARTS,
    "should_execute_dummy_batch": _PARTS,
    "external_launcher_dp": _PARTS,
    "encode_request": _PARTS,
    "process_request_outputs": _PARTS,
    "reset_encoder_cache": "models without an encoder are served",
    "engine_class": _PARTS,
    "start_background_loop": "the engine runs from its start",
    "background_loop": "the engine runs from its start",
    "add_logger": "the engine logs its figures by itself, with disable_log_stats=False",
    "stop_remote_worker_execution_loop": _PARTS,
    "get_decoding_config": "Quire has one backend of its own for structured outputs",
    "get_lora_config": "see limits.adapters of the client",
}
_OPTIONS_OF = "options are given to LLM, EngineArgs or `quire serve` by their names"
CONFIG_FIELDS = {
    "lora_config": "see limits.adapters of the client",
    "observability_config": "the flags of `quire serve`",
    "kv_transfer_config": "KV caches stay where they are",
    "compilation_config": "nothing is compiled by torch",
    "structured_outputs_config": "Quire has one backend of its own",
    "decoding_config": "Quire has one backend of its own",
    "prompt_adapter_config": "there are no prompt adapters",
    "additional_config": _OPTIONS_OF,
    "instance_id": _OPTIONS_OF,
    "hf_image_processor_config": "the processor runs in a process of its own",
    "use_mla": "the engine chooses how attention is computed",
    "max_seq_len_to_capture": "the engine chooses which steps are captured",
    "is_moe": "hf_config says it",
    "try_get_generation_config": "LLM.get_default_sampling_params() has its values",
    "get_diff_sampling_param": "LLM.get_default_sampling_params() has its values",
    "cuda_graph_sizes": "the engine chooses which steps are captured",
}
METRICS_FIELDS = {
    "num_generation_tokens": "count the token_ids of an output",
    "is_corrupted": "an output is whole, or an error",
}
_COMPLETIONS = "each completion has it: output.outputs[0]"
OUTPUT_FIELDS = {
    "hidden_states": "the model's states stay in its process",
    "embedding": "`LLM.embed` makes vectors: output.outputs.embedding",
    "tokens": "token_ids, which LLM.get_tokenizer() decodes",
    "reasoning_content": "the text is as the model wrote it; the routes of `quire serve` tell reasoning apart",
    "tool_calls": "the text is as the model wrote it; the routes of `quire serve` find tool calls",
    "output": "output.outputs",
    "prompt_text": "output.prompt",
    "to_dict": "dataclasses.asdict(output)",
    "model_dump": "dataclasses.asdict(output)",
    "add": "outputs are merged by the engine's client",
    "text": _COMPLETIONS,
    "token_ids": _COMPLETIONS,
    "logprobs": _COMPLETIONS,
    "cumulative_logprob": _COMPLETIONS,
    "finish_reason": _COMPLETIONS,
    "stop_reason": _COMPLETIONS,
}
_OPTIONS = {  # options of generate, chat, add_request
    "prompt_token_ids": "give token ids as a prompt, [1, 2, 3] or {'prompt_token_ids': [1, 2, 3]}, or a list of such prompts",
    "logits_processors": "the engine is another process: name classes at its start, LLM(logits_processors=[...])",
    "guided_options_request": "SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "prompt_adapter_request": "prompt adapters are not served",
    "mm_processor_kwargs": "it stands in a prompt beside multi_modal_data, or in LLM(mm_processor_kwargs={...}) for all images",
    "prompt_text": "a TokensPrompt holds its text",
    "tokenization_kwargs": "give token ids, cut as you want them",
    "trace_headers": "`quire serve` traces requests",
    "data_parallel_rank": "a request goes where its prompt is cached",
}


_OTHER_OPTIONS = {name: f"write SamplingParams({name}=...)" for name in SamplingParams.__struct_fields__} | {
    "prompt": "the first argument is prompts",
    "inputs": "the first argument is prompts",
    "input": "the first argument is prompts",
    "conversation": "the first argument is messages",
    "conversations": "the first argument is messages",
    "params": "write sampling_params",
    "sampling": "write sampling_params",
    "stream": "AsyncLLM.generate and AsyncClient.generate stream",
    "max_new_tokens": "write SamplingParams(max_tokens=...)",
    "cache_salt": "it is a part of a prompt: {'prompt': text, 'cache_salt': salt}",
    "truncate_prompt_tokens": "give token ids, cut as you want them",
    "response_format": "write SamplingParams(structured_outputs=StructuredOutputsParams(json=...))",
    "enable_thinking": "write chat_template_kwargs={'enable_thinking': False}",
}


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """Check vLLM's options of a call: only None, or nothing in a list or dict, is accepted. Raises ValueError."""
    for name, value in options.items():
        if name not in _OPTIONS:
            names = ("sampling_params", "use_tqdm", "priority", *_OPTIONS)
            raise ValueError(f"{method} has no option {name!r}; {what_to_write(name, names, _OTHER_OPTIONS)}")
        if value is not None and not (isinstance(value, list | tuple | dict) and not any(value)):
            raise ValueError(f"{name} is not supported: {_OPTIONS[name]}")


def check_reset(reset_running_requests: bool) -> None:
    """Check an option of reset_prefix_cache. Raises ValueError. (Its other option is for caches that Quire does not have.)"""
    if reset_running_requests:
        raise ValueError("reset_running_requests is not supported: requests that run keep their blocks")


class Absent:
    """A name of vLLM's that is not here: it can be passed around, and says why when it is called or used.

    Raises NotImplementedError.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._text = f"{name} is not here: {reason}"

    def _say(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(self._text)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __float__ = __int__ = _say
    __lt__ = __le__ = __gt__ = __ge__ = _say
    __call__ = __iter__ = __getitem__ = __len__ = __bool__ = __enter__ = __await__ = __aiter__ = _say

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what copy, pickle and inspect ask for
            raise AttributeError(name)
        raise NotImplementedError(self._text)

    def __delattr__(self, name: str) -> None:
        """A part of what is not here: nothing to forget."""

    def __repr__(self) -> str:
        return f"<{self._text}>"


def without(owner: object, name: str, reasons: Mapping[str, str]) -> Absent:
    """The value of a missing attribute: an Absent, if `reasons` has the name. Raises NoSuchName if not."""
    if name in reasons:
        return Absent(f"{type(owner).__name__}.{name}", reasons[name])
    return missing(owner, name)


def missing(owner: object, name: str, elsewhere: Mapping[str, str] | None = None) -> NoReturn:
    """Raises NoSuchName for a missing attribute, with what to write: by `elsewhere`, or a name that is near."""
    kind = type(owner).__name__
    if name.startswith("_"):  # what copy, pickle and inspect ask for
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)
    public = [each for each in dir(owner) if not each.startswith("_")]
    raise NoSuchName(f"{kind} has no {name!r}; {what_to_write(name, public, elsewhere)}")
