"""The flags of LoRA adapters. Names and values are vLLM's; --lora-dirs, --lora-hub and --lora-on-demand are Quire's own."""

import os
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from quire.ipc.adapters import AdapterLimits, problem_with_name
from quire.ipc.process.flags import Switch, human_int

LoraDtype = Literal["auto", "float32", "bfloat16", "float16"]
MAX_LORAS, MAX_RANK = 1024, 512
OWNER = re.compile(r"[A-Za-z0-9][\w.-]*")  # on the hub
ANY_OWNER = "*"
CPU_LORAS = 4  # adapters in host memory for each slot, if no flag says how many


class LoraModule(NamedTuple):
    """An adapter that is registered at the start."""

    name: str
    path: str


def parse_module(text: str) -> LoraModule:
    """One value of --lora-modules: NAME=PATH, or a JSON object with name and path. Raises ValueError."""
    if text.lstrip().startswith("{"):
        try:
            fields = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"--lora-modules {text!r:.80}: it is no JSON object: {error}") from None
        unknown = fields.keys() - {"name", "path", "base_model_name", "is_3d_lora_weight", "load_inplace"}
        if unknown or not all(isinstance(fields.get(key), str) for key in ("name", "path")):
            raise ValueError(f"--lora-modules {text!r:.80}: it needs name and path, and may have base_model_name")
        module = LoraModule(fields["name"], fields["path"])
    else:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise ValueError(f"--lora-modules {text!r:.80}: it must be NAME=PATH, or a JSON object with name and path")
        module = LoraModule(name, path)
    if problem := problem_with_name(module.name):
        raise ValueError(f"--lora-modules {text!r:.80}: {problem}")
    return module


def limits_of(config: Any) -> AdapterLimits:
    """The limits of the adapters of an EngineConfig, before any adapter is known."""
    return AdapterLimits(
        max_loras=config.max_loras,
        max_rank=config.max_lora_rank,
        max_cpu_loras=config.max_cpu_loras or CPU_LORAS * config.max_loras,
        target_modules=tuple(config.lora_target_modules),
        dtype="" if config.lora_dtype == "auto" else config.lora_dtype,
        dirs=tuple(os.path.abspath(folder) for folder in config.lora_dirs),
        captures=bool(config.lora_modules or config.lora_dirs or config.lora_hub),
        on_demand=config.lora_on_demand,
        has_hub=bool(config.lora_hub),
    )


def check_lora(config: Any) -> None:
    """Check an EngineConfig. Raises ValueError."""
    if not 1 <= config.max_loras <= MAX_LORAS:
        raise ValueError(f"--max-loras must be between 1 and {MAX_LORAS}")
    if not 1 <= config.max_lora_rank <= MAX_RANK:
        raise ValueError(f"--max-lora-rank must be between 1 and {MAX_RANK}")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ValueError("--max-cpu-loras must be at least --max-loras: what has a slot is kept in host memory, too")
    given = {"--lora-modules": config.lora_modules, "--lora-dirs": config.lora_dirs, "--lora-hub": config.lora_hub}
    if not config.enable_lora and (flag := next((flag for flag, values in given.items() if values), None)):
        raise ValueError(f"{flag} needs --enable-lora")
    if wrong := next((owner for owner in config.lora_hub if owner != ANY_OWNER and not OWNER.fullmatch(owner)), None):
        raise ValueError(f"--lora-hub {wrong!r:.80}: an owner of repositories on the hub is needed, without a name behind it")
    if config.lora_on_demand and not config.lora_dirs:
        raise ValueError("--lora-on-demand needs --lora-dirs: the folders with adapters")
    names = [parse_module(text).name for text in config.lora_modules]
    served = config.served_model_name or ([config.model] if config.model else [])
    if taken := next((name for name in names if names.count(name) > 1 or name in served), None):
        raise ValueError(f"--lora-modules: the name {taken!r} is taken")
    if config.enable_lora and config.pipeline_parallel_size > 1 and config.speculative_config is not None:
        raise ValueError("--enable-lora with --pipeline-parallel-size above 1 and --speculative-config is not served")


def add_lora_arguments(add: Callable[..., None]) -> None:
    add("--enable-lora", action=Switch, help="serve LoRA adapters of the model: see docs/adapters.md (default: off)")
    add(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help='adapters that are there from the start: NAME=PATH, or {"name": ..., "path": ...}; a path is a folder as PEFT '
        "saves it, or a hub id like owner/name (default: none)",
    )
    add("--max-loras", type=human_int, metavar="N", help="adapters that a step may use: so many have slots on the GPU")
    add("--max-lora-rank", type=human_int, metavar="N", help="the largest rank of an adapter; a slot's size follows from it")
    add(
        "--max-cpu-loras",
        type=human_int,
        metavar="N",
        help=f"adapters that are kept in host memory, from where they come back fast (default: {CPU_LORAS} times --max-loras)",
    )
    add(
        "--lora-target-modules",
        nargs="+",
        metavar="NAME",
        help="names of the layers that a slot holds, like q_proj; an adapter with others is refused (default: those of "
        "attention, MLP and shared experts, and what adapters of --lora-modules have besides)",
    )
    add(
        "--lora-dtype",
        choices=list(get_args(LoraDtype)),
        help="type of adapters on the device; auto: the model's",
    )
    add(
        "--lora-dirs",
        nargs="+",
        metavar="DIR",
        help="folders below which adapters may be loaded while the server runs (default: none, and nothing can be loaded)",
    )
    add(
        "--lora-hub",
        nargs="+",
        metavar="OWNER",
        help="owners on the hub: adapters in their repositories may be downloaded and loaded while the server runs; * for "
        "any owner on the hub (default: none; in Python *, unless lora_dirs is given)",
    )
    add(
        "--lora-on-demand",
        action=Switch,
        help="the name of a folder that lies directly in one of --lora-dirs is a model's name, and is loaded when it is first "
        "asked for (default: off)",
    )
