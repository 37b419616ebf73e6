"""Per-process configuration: frozen structs, resolved once at launch and passed to constructors. Also the engine's flags.

`EngineConfig` is what a user may set (the flags of `enginecore` and `quire serve`, the options of `LLM`); `WorkerConfig` is
what the core tells each worker. They travel to a child process as JSON over its control pipe (see children.py).
"""

import argparse
from typing import Any, Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may set about the engine. Field names are the flags' names with underscores, and those of `LLM(...)`.

    Raises ValueError, naming the flag, for a value that can never work.
    """

    model: str | None = None  # folder or hub id; None: the bundled model
    revision: str | None = None
    download_dir: str | None = None
    served_model_name: list[str] = []
    tokenizer: str | None = None  # folder or hub id, where it is not the model's own
    chat_template: str | None = None  # a file, or the template itself
    generation_config: str = "auto"  # "auto": the model's; "vllm": none; otherwise a folder
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 0.5
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None  # tokens; None: chosen by device
    max_num_seqs: int | None = None  # None: 1024 on a GPU of 70 GB and more, 256 on smaller ones, 64 on a CPU
    max_num_batched_tokens: int | None = None  # None: 8192 on a GPU, 512 on a CPU
    max_num_waiting: int = 8192
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    admission: Literal["lookahead", "optimistic"] = "lookahead"
    enforce_eager: bool = False
    max_logprobs: int = 20
    seed: int = 0
    tensor_parallel_size: int = 1
    step_timeout_s: float = 60.0
    logits_processors: list[str] = []  # the operator's own classes: module:Class, or file.py:Class
    logits_processors_path: list[str] = []  # folders where their modules are looked for, after the installed ones
    profile_dir: str | None = None  # where /start_profile may write its traces; None: nowhere
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    listen: str | None = None  # ipc:// or tcp:// address; None: a private one
    curve_secret_key_file: str | None = None  # the core's key pair, for tcp://
    curve_allow_file: str | None = None  # public keys of the frontends that may connect, one a line

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(what)

        need(self.max_model_len is None or self.max_model_len >= 2, "--max-model-len must be at least 2")
        need(0.05 <= self.gpu_memory_utilization <= 1.0, "--gpu-memory-utilization must be between 0.05 and 1.0")
        need(self.cpu_kv_cache_gib > 0, "--cpu-kv-cache-gib must be greater than 0")
        need(
            self.num_gpu_blocks_override is None or self.num_gpu_blocks_override >= 2,
            "--num-gpu-blocks-override must be at least 2",
        )
        need(
            self.block_size is None or self.block_size in (16, 32, 64, 128, 256), "--block-size must be 16, 32, 64, 128 or 256"
        )
        need(self.max_num_seqs is None or 1 <= self.max_num_seqs <= 65536, "--max-num-seqs must be between 1 and 65536")
        need(
            self.max_num_batched_tokens is None or 1 <= self.max_num_batched_tokens <= 1 << 20,
            "--max-num-batched-tokens must be between 1 and 1048576",
        )
        need(self.max_num_waiting >= 1, "--max-num-waiting must be at least 1")
        need(0 <= self.max_logprobs <= 20, "--max-logprobs must be between 0 and 20")
        need(self.tensor_parallel_size == 1, "--tensor-parallel-size above 1 is not supported yet")
        need(self.step_timeout_s > 0, "--step-timeout-s must be greater than 0")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the core tells a worker at its start. File descriptors are the core's numbers: see process.own_fds."""

    rank: int
    world_size: int
    generation: int  # which one of the workers that the core has started, one after another; in the result ring's header
    model_dir: str
    control_address: str  # ZeroMQ, the core's end is bound
    plan_ring_fds: list[int]
    result_ring_fds: list[int]
    output_rank: int
    device: Literal["cuda", "cpu"]
    dtype: str
    load_format: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    gpu_memory_utilization: float
    cpu_kv_cache_gib: float
    num_gpu_blocks_override: int | None
    enforce_eager: bool
    max_logprobs: int
    seed: int
    profile_dir: str | None = None
    logits_processors: list[str] = []
    logits_processors_path: list[str] = []


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, the same for `enginecore` and `quire serve`; defaults are EngineConfig's."""
    d = EngineConfig()
    group = parser.add_argument_group("engine")

    def add(flag: str, help_text: str, **kwargs: Any) -> None:
        name = flag[2:].replace("-", "_")
        if "default" not in kwargs and "action" not in kwargs:
            kwargs["default"] = getattr(d, name)
        if kwargs.get("default") is not None and "(default" not in help_text:
            help_text += " (default: %(default)s)"
        group.add_argument(flag, help=help_text, **kwargs)

    parser.add_argument(
        "model", nargs="?", default=None, help="model folder or hub id; without it a tiny bundled model is served"
    )
    add("--revision", "branch, tag or commit of a hub model (default: its main branch)")
    add("--download-dir", "where hub downloads go (default: the hub's own cache)")
    add("--served-model-name", "names clients may use for the model (default: its folder or hub id)", nargs="+", default=[])
    add("--tokenizer", "folder or hub id of the tokenizer (default: the model's own)")
    add("--chat-template", "a file with a jinja2 chat template, or the template itself (default: the model's)")
    add("--generation-config", "'auto': sampling defaults from the model's generation_config.json; 'vllm': none; or a folder")
    add("--device", "where to run; auto: cuda if there is a GPU, else cpu", choices=["auto", "cuda", "cpu"])
    add("--dtype", "of weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU",
        choices=["auto", "float32", "bfloat16", "float16"])  # fmt: skip
    add("--load-format", "'dummy' makes random weights instead of reading any", choices=["auto", "dummy"])
    add("--max-model-len", "longest sequence, prompt and output (default: the model's)", type=int)
    add("--gpu-memory-utilization", "part of the GPU's memory to fill, what other processes have included", type=float)
    add("--cpu-kv-cache-gib", "size of the KV cache on a CPU, GiB", type=float)
    add("--num-gpu-blocks-override", "number of KV blocks, whatever the memory says (default: what fits)", type=int)
    add("--block-size", "tokens in a KV block: 16, 32, 64, 128 or 256 (default: 64 on a GPU, 16 on a CPU)", type=int)
    add(
        "--max-num-seqs",
        "most sequences that run at once (default: 1024 on a GPU of 70 GB and more, 256 on smaller ones, 64 on a CPU)",
        type=int,
    )
    add(
        "--max-num-batched-tokens",
        "most tokens computed in one step; longer prompts are chunked (default: 8192 on a GPU, 512 on a CPU)",
        type=int,
    )
    add("--max-num-waiting", "most requests that wait; more are refused with 503", type=int)
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=d.enable_prefix_caching,
                       help="reuse KV blocks of equal prefixes (default: on)")  # fmt: skip
    add("--scheduling-policy", "order of waiting requests", choices=["fcfs", "priority"])
    add(
        "--admission",
        "start a request if memory will do to its end, or as soon as there is room now (and preempt later)",
        choices=["lookahead", "optimistic"],
    )
    group.add_argument("--enforce-eager", action="store_true", help="run without CUDA graphs")
    add("--max-logprobs", "most logprobs a request may ask for, 0 to 20", type=int)
    add("--seed", "of weights under --load-format dummy, and of requests without one of their own", type=int)
    add("--tensor-parallel-size", "GPUs that share the model", type=int)
    add("--step-timeout-s", "a step older than this makes /health fail", type=float)
    group.add_argument(
        "--enable-log-requests", action="store_true", help="log each request's id, lengths and parameters, never its text"
    )
    group.add_argument("--disable-log-stats", action="store_true", help="no statistics line every 10 s")
    _add_own_code_arguments(parser)


def _add_own_code_arguments(parser: argparse.ArgumentParser) -> None:
    """For who develops with it: classes of one's own, and where the time goes."""
    group = parser.add_argument_group("own code and profiles")
    for flag, metavar, help_text in (
        ("--logits-processors", "MODULE:CLASS", "classes of vLLM's LogitsProcessor interface, or FILE.py:CLASS, for requests "
         "with vllm_xargs (default: none)"),
        ("--logits-processors-path", "FOLDER", "where their modules are looked for, after the installed ones and the current "
         "folder (default: nowhere else)"),
    ):  # fmt: skip
        group.add_argument(flag, nargs="+", action="extend", default=[], metavar=metavar, help=help_text)
    group.add_argument(
        "--profile-dir",
        metavar="FOLDER",
        help="where torch's profiler writes its traces, which /start_profile begins (default: no profiling)",
    )


def engine_config_from(args: argparse.Namespace, **more: Any) -> EngineConfig:
    """EngineConfig from parsed flags; `more` adds or overrides. Raises ValueError for what can never work."""
    values = {name: getattr(args, name) for name in EngineConfig.__struct_fields__ if hasattr(args, name)}
    return EngineConfig(**{**values, **more})
