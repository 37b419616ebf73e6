"""Methods, fields and options of vLLM's that Quire does not have, each with the reason or the alternative, for errors and
docs/."""

from collections.abc import Mapping
from typing import Any

_SLEEP = "engines do not sleep"
_RLHF = "weights are read once, at the start"
_VECTORS = "models that embed or score are not served yet"
LLM_METHODS = {
    "enqueue": "`LLMEngine.add_request`, or AsyncClient",
    "enqueue_chat": "`LLMEngine.add_request`, or AsyncClient",
    "wait_for_completion": "`LLMEngine.step`, or AsyncClient",
    "get_metrics": "a served model has /metrics; outputs hold their own times",
    "get_world_size": "the option tensor_parallel_size",
    "reset_mm_cache": "models of text only are served",
    "sleep": _SLEEP,
    "wake_up": _SLEEP,
    "collective_rpc": "no code is called by name from a wire",
    "apply_model": "the model is in another process",
    "encode": _VECTORS,
    "embed": _VECTORS,
    "classify": _VECTORS,
    "score": _VECTORS,
    "reward": _VECTORS,
    "init_weight_transfer_engine": _RLHF,
    "start_weight_update": _RLHF,
    "start_draft_weight_update": _RLHF,
    "update_weights": _RLHF,
    "finish_weight_update": _RLHF,
}
_PAUSES = "an engine does not pause: it is idle when no request runs"
_PARTS = "the engine is a process of its own: its parts cannot be reached from here"
ENGINE_NAMES = LLM_METHODS | {
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
    "do_log_stats": "the engine logs its figures by itself, with disable_log_stats=False",
    "add_lora": "LoRA adapters are not served",
    "remove_lora": "LoRA adapters are not served",
    "list_loras": "LoRA adapters are not served",
    "pin_lora": "LoRA adapters are not served",
}
_IN_FOLDER = "transformers' AutoConfig.from_pretrained(model_config.model) has what config.json says"
CONFIG_FIELDS = {
    "hf_config": _IN_FOLDER,
    "hf_text_config": _IN_FOLDER,
    "parallel_config": "the options tensor_parallel_size, pipeline_parallel_size and data_parallel_size",
    "scheduler_config": "the options max_num_seqs and max_num_batched_tokens",
    "lora_config": "LoRA adapters are not served",
    "device_config": "the option device",
    "load_config": "the option load_format",
}
_OPTIONS = {  # options of generate, chat, add_request
    "lora_request": "LoRA adapters are not served",
    "prompt_token_ids": "give token ids as a prompt, [1, 2, 3] or {'prompt_token_ids': [1, 2, 3]}, or a list of such prompts",
    "logits_processors": "the engine is another process: name classes at its start, LLM(logits_processors=[...])",
    "guided_options_request": "SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "prompt_adapter_request": "LoRA adapters are not served, and no prompt adapters",
    "mm_processor_kwargs": "models of text only are served",
    "prompt_text": "a TokensPrompt holds its text",
    "tokenization_kwargs": "give token ids, cut as you want them",
    "trace_headers": "`quire serve` traces requests",
    "data_parallel_rank": "a request goes where its prompt is cached",
}


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """Check vLLM's options of a call: only None is accepted. Raises TypeError for unknown names, ValueError for values."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ValueError(f"{name} is not supported: {_OPTIONS[name]}")


def check_reset(reset_running_requests: bool) -> None:
    """Check an option of reset_prefix_cache. Raises ValueError. (Its other option is for caches that Quire does not have.)"""
    if reset_running_requests:
        raise ValueError("reset_running_requests is not supported: requests that run keep their blocks")


def without(owner: object, name: str, reasons: Mapping[str, str]) -> AttributeError:
    """The AttributeError for a missing attribute, with the reason, if `reasons` has one."""
    why = f": {reasons[name]}" if name in reasons else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{why}", name=name, obj=owner)
