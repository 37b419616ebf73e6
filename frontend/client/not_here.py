"""Methods of vLLM's LLM, and options of its calls, that are not here: each with the reason or the way, for errors and docs/."""

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
_OPTIONS = {  # of generate, chat, add_request
    "lora_request": "LoRA adapters are not served",
    "mm_processor_kwargs": "models of text only are served",
    "prompt_text": "a TokensPrompt holds its text",
    "tokenization_kwargs": "give token ids, cut as you want them",
    "trace_headers": "`quire serve` traces requests",
    "data_parallel_rank": "a request goes where its prompt is cached",
}


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """vLLM's options of a call, which mean nothing while None. Raises TypeError for other names, ValueError for values."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ValueError(f"{name} is not supported: {_OPTIONS[name]}")
