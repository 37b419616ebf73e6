"""Translate vLLM's names and values of engine options to ours, for `LLM`, `LLMEngine` and `AsyncLLM`.

Options without effect here are accepted, and named in one line of the log. Values that would change something and are not
supported are refused, according to the table below, else to that of the flags (cli/vllm_flags.py). The caller refuses unknown
names (own_engine.py).
"""

import json
import logging
import os
from typing import Any

from quire.frontend.cli.vllm_compat import is_fine, unread_variables
from quire.frontend.cli.vllm_flags import BY_FLAG, Row
from quire.ipc.config import EngineConfig
from quire.ipc.process.flags import LOAD_FORMATS, MODEL_IMPLS, profile_dir_of
from quire.ipc.quantization import OTHER_NAMES
from quire.ipc.speculation_flags import SHORT_FLAGS
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.speculative_options import FLAG, speculation_of

log = logging.getLogger("quire")

ANY = object()
# vLLM's options without a counterpart here, with the values that are accepted; ANY: all values.
NOT_NEEDED: dict[str, tuple[Any, ...]] = {
    "async_scheduling": (ANY,),  # always
    "code_revision": (None,),
    "compilation_config": (ANY,),  # nothing is compiled by torch
    "config_format": ("auto", "hf"),
    "cpu_offload_gb": (0,),
    "disable_log_requests": (ANY,),
    "disable_sliding_window": (False,),
    "enable_chunked_prefill": (None, True),  # always
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "hf_config_path": (None,),
    "hf_overrides": (None, {}),
    "kv_transfer_config": (None,),
    "max_parallel_loading_workers": (ANY,),
    "max_seq_len_to_capture": (ANY,),
    "num_lookahead_slots": (0,),
    "reasoning_parser": (ANY,),  # outputs of Python are the text as it is; the routes of `quire serve` tell reasoning apart
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "swap_space": (ANY,),  # there is none: preempted sequences are computed again
    "task": (None, "auto", "generate"),
    "tokenizer_pool_size": (ANY,),
    "tokenizer_revision": (None,),
    "trust_remote_code": (ANY,),  # never: no checkpoint's code is run
    "use_v2_block_manager": (ANY,),
}
# vLLM's options about images: the client's, not the engine's (media_data.py).
MEDIA_OPTIONS = ("limit_mm_per_prompt", "mm_processor_kwargs", "mm_processor_cache_gb", "allowed_local_media_path",
                 "allowed_media_domains")  # fmt: skip
_DTYPES = {"half": "float16", "float": "float32"}


def is_vllms(name: str) -> bool:
    """Whether it is an option of vLLM's that is no field of EngineConfig."""
    flag = "--" + name.replace("_", "-")
    ours = name in NOT_NEEDED or name in MEDIA_OPTIONS
    return name not in EngineConfig.__struct_fields__ and (ours or name in SHORT_FLAGS or flag in BY_FLAG)


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """vLLM's options as EngineConfig's. Raises ValueError for an unsupported value; unknown names are kept."""
    found, not_needed = {name: value for name, value in options.items() if name not in MEDIA_OPTIONS}, list[str]()
    if (options.get("limit_mm_per_prompt") or {}).get("image") == 0:
        found["language_model_only"] = True
    if (folder := _profile_dir(found.pop("profiler_config", None))) is not None:
        found.setdefault("profile_dir", folder)
    _take_speculation(found)
    for name in found.keys() - set(EngineConfig.__struct_fields__):
        row = BY_FLAG.get("--" + name.replace("_", "-"))
        if name not in NOT_NEEDED and row is None:
            continue  # the caller refuses it
        value = found.pop(name)
        if not _is_harmless(name, row, value):
            raise ValueError(f"{name}={value!r:.200} is not supported" + (f": {row.why}" if row is not None else ""))
        if value is not None:
            not_needed.append(name)
    if not_needed:
        log.info("not needed here, and without effect: %s", ", ".join(sorted(not_needed)))
    if variables := unread_variables(os.environ):
        log.info("environment variables without effect here: %s", variables)
    if type(found.get("dtype")).__module__ == "torch":  # torch.bfloat16
        found["dtype"] = str(found["dtype"]).removeprefix("torch.")
    if isinstance(found.get("dtype"), str):
        found["dtype"] = _DTYPES.get(found["dtype"], found["dtype"])
    if isinstance(found.get("quantization"), str):
        found["quantization"] = OTHER_NAMES.get(found["quantization"], found["quantization"])
    if found.get("distributed_executor_backend") == "uni":
        found["distributed_executor_backend"] = "mp"
    if isinstance(found.get("model_impl"), str):
        found["model_impl"] = MODEL_IMPLS.get(found["model_impl"], found["model_impl"])
    if isinstance(found.get("kv_cache_dtype_skip_layers"), list | tuple):  # its items may be numbers
        found["kv_cache_dtype_skip_layers"] = [str(layer) for layer in found["kv_cache_dtype_skip_layers"]]
    if isinstance(found.get("load_format"), str):
        found["load_format"] = LOAD_FORMATS.get(found["load_format"], found["load_format"])
    return {name: value for name, value in found.items() if value is not None}


def _profile_dir(config: Any) -> str | None:
    try:
        return profile_dir_of(config)
    except ValueError as error:
        raise ValueError(f"profiler_config {error}".replace("--profile-dir", "profile_dir")) from None


def _take_speculation(options: dict[str, Any]) -> None:
    """Replace the options of speculation by what they ask for together. Raises ValueError."""
    given = options.pop("speculative_config", None)
    short = {key: value for name, key in SHORT_FLAGS.items() if (value := options.pop(name, None)) is not None}
    if short and not isinstance(given, SpeculativeConfig):
        given = {**(given or {}), **short}
    try:
        options["speculative_config"] = speculation_of(given)
    except ValueError as error:
        raise ValueError(str(error).replace(FLAG, "speculative_config")) from None


def _is_harmless(name: str, row: Row | None, value: Any) -> bool:
    """Whether the value may be ignored, by the table above or by the row of its flag."""
    if name in NOT_NEEDED:
        return ANY in NOT_NEEDED[name] or value in NOT_NEEDED[name]
    if row is None or value is None or value in ("", [], (), {}):
        return True
    if isinstance(value, bool):
        return row.kind == "switch" and is_fine(row, "on" if value else "off")
    return is_fine(row, json.dumps(value, default=str) if isinstance(value, dict) else str(value))
