"""EngineConfig: what a user may set about the engine, by the flags of `enginecore` and `quire serve` or the options of `LLM`.

The file declares those flags, too. The struct is frozen and is passed to constructors; it travels to a child process as JSON
over its control pipe (see children.py). Workers get it resolved, inside a WorkerConfig (worker_config.py).
"""

import argparse
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from quire.ipc import quantization as quantizations
from quire.ipc.deterministic import check_deterministic
from quire.ipc.hosts_flags import add_hosts_arguments, check_hosts
from quire.ipc.layout import check_layout
from quire.ipc.log_flags import add_frontend_logs
from quire.ipc.lora_flags import LoraDtype, add_lora_arguments, check_lora
from quire.ipc.media_flags import add_media_arguments, check_media
from quire.ipc.memory_plan import blocks_in
from quire.ipc.own_code_flags import add_own_code_arguments
from quire.ipc.pooling_flags import Convert, Runner, add_pooling_arguments, check_pooling_flags
from quire.ipc.process.flags import DTYPES, LOAD_FORMATS, MODEL_IMPLS, JsonObject, Switch, human_int, model_len, one_of
from quire.ipc.speculation_flags import add_speculation_arguments, check_speculation
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.speculative_options import speculation_of
from quire.ipc.states_flags import StateDtype, add_state_arguments, check_states
from quire.ipc.step.sections import MAX_LOGPROBS

Add = Callable[..., None]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's settings. Field names are the flags' names with underscores, and those of `LLM(...)`.

    Raises ValueError, naming the flag, for a value that can never work.
    """

    model: str | None = None  # folder or hub id; None: the bundled model
    revision: str | None = None
    download_dir: str | None = None
    served_model_name: list[str] = []
    tokenizer: str | None = None  # folder or hub id, if it is not the model's own
    tokenizer_revision: str | None = None
    hf_token: str | None = None  # None: HF_TOKEN, or the token of `hf auth login`
    hf_overrides: dict[str, Any] = {}  # fields that replace those of config.json
    chat_template: str | None = None  # a file, or the template itself
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    generation_config: str = "auto"  # "auto": the model's; "vllm": none; otherwise a folder
    override_generation_config: dict[str, Any] = {}  # fields that replace those of generation_config.json
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    model_impl: Literal["auto", "quire", "transformers"] = "auto"  # which implementation of the layers
    runner: Runner = "auto"  # what the model is served for
    convert: Convert = "auto"  # what a model that pools makes
    pooler_config: dict[str, Any] = {}  # how it pools, instead of what the checkpoint says
    quantization: str | None = None  # a name of ipc/quantization.py; None: as the checkpoint says
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float | None = None  # None: by the memory that is free
    kv_cache_memory_bytes: int | None = None  # the KV cache's size, instead of what gpu_memory_utilization leaves
    num_gpu_blocks_override: int | None = None
    num_states: int | None = None  # recurrent states, with the dummy state; None: what fits
    mamba_ssm_cache_dtype: StateDtype = "auto"  # of recurrent states
    language_model_only: bool = False  # of a model that takes items beside text, serve the text alone
    encoder_cache_tokens: int | None = None  # of items; None: twice the largest item
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    kv_cache_dtype_skip_layers: list[str] = []  # indices, "sliding_window"
    block_size: int | None = None  # tokens; None: chosen by device
    max_num_seqs: int | None = None  # None: 1024 on a GPU of 70 GB and more, 256 on smaller ones, 64 on a CPU
    max_num_batched_tokens: int | None = None  # None: 8192 on a GPU, 512 on a CPU
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step; 0: no limit
    max_num_waiting: int = 8192
    max_num_queued_tokens: int = 0  # prompt tokens that wait; 0: no bound
    max_queue_s: float = 30.0  # the longest that the queue may take; 0: no bound
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    admission: Literal["lookahead", "optimistic"] = "lookahead"
    enforce_eager: bool = False
    deterministic: bool = False  # tokens that depend on nothing but their request, to the last bit
    speculative_config: SpeculativeConfig | None = None  # None: no drafts
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"  # what answers say about their drafts
    max_logprobs: int = 20
    enable_lora: bool = False
    lora_modules: list[str] = []  # adapters that are there from the start
    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None  # None: four times max_loras
    lora_target_modules: list[str] = []
    lora_dtype: LoraDtype = "auto"
    lora_dirs: list[str] = []  # below which adapters may be loaded while the engine serves
    lora_hub: list[str] = []  # owners of repositories that may be downloaded while the engine serves
    lora_on_demand: bool = False
    seed: int = 0
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False  # distribute whole experts over these ranks, not a shard of each
    pipeline_parallel_size: int = 1
    collective_timeout_s: float = 10.0
    emulate_world_size: int = 1  # run one rank of this many, alone
    distributed_executor_backend: Literal["mp", "ray"] = "mp"  # what starts workers: engine and agents, or Ray
    hosts: str | None = None  # a file that lists the other hosts, if workers run on several
    hosts_key_file: str | None = None  # the engine's key pair, for connections to them
    interface: str | None = None  # network interface, or its address, for workers' sockets; None: loopback
    data_parallel_size: int = 1  # number of engines that frontends use as one; this one is counted
    device_index: int = 0  # the engine's first GPU, among those that it sees
    host_memory_bytes: int | None = None  # for all engines on a CPU together; None: read at the start
    host_memory_limit: str = ""  # what limits it, if it was read
    host_ranks: int | None = None  # of this engine on the worker's host; None: all
    frontends: int = 1  # HTTP processes on the engine's host, whose memory counts
    step_timeout_s: float = 60.0
    replay: bool = True  # run requests again when their worker or engine dies
    logits_processors: list[str] = []  # the operator's own classes: module:Class, or file.py:Class
    logits_processors_path: list[str] = []  # folders to search for their modules, after the installed ones
    profile_dir: str | None = None  # folder for the traces of /start_profile; None: no profiling
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    log_format: Literal["text", "json"] = "text"
    listen: str | None = None  # ipc:// or tcp:// address; None: a private one
    curve_secret_key_file: str | None = None  # the core's key pair, for tcp://
    curve_allow_file: str | None = None  # public keys of the frontends that may connect, one a line

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(what)

        need(self.max_model_len is None or self.max_model_len >= 2, "--max-model-len must be at least 2")
        need(0.05 <= self.gpu_memory_utilization <= 1.0, "--gpu-memory-utilization must be between 0.05 and 1.0")
        need(self.cpu_kv_cache_gib is None or self.cpu_kv_cache_gib > 0, "--cpu-kv-cache-gib must be greater than 0")
        blocks = self.num_gpu_blocks_override
        need(blocks is None or blocks >= 2, "--num-gpu-blocks-override must be at least 2")
        check_states(self.num_states)
        check_media(self.encoder_cache_tokens)
        check_pooling_flags(self.runner, self.convert, self.pooler_config)
        need(
            self.block_size is None or self.block_size in (16, 32, 64, 128, 256), "--block-size must be 16, 32, 64, 128 or 256"
        )
        need(self.max_num_seqs is None or 1 <= self.max_num_seqs <= 65536, "--max-num-seqs must be between 1 and 65536")
        need(
            self.max_num_batched_tokens is None or 1 <= self.max_num_batched_tokens <= 1 << 20,
            "--max-num-batched-tokens must be between 1 and 1048576",
        )
        need(self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0, "--kv-cache-memory-bytes must be positive")
        need(
            0 <= self.long_prefill_token_threshold <= 1 << 30,
            "--long-prefill-token-threshold must be at least 0 (0: no limit) and at most 2^30",
        )
        need(
            all(name == "sliding_window" or (name.isascii() and name.isdecimal()) for name in self.kv_cache_dtype_skip_layers),
            "--kv-cache-dtype-skip-layers takes indices of layers, from 0, and sliding_window",
        )
        need(self.max_num_waiting >= 1, "--max-num-waiting must be at least 1")
        need(self.max_num_queued_tokens >= 0, "--max-num-queued-tokens must be at least 0 (0: no bound)")
        need(0 <= self.max_queue_s < float("inf"), "--max-queue-s must be at least 0 (0: no bound)")
        if self.max_logprobs == -1:
            msgspec.structs.force_setattr(self, "max_logprobs", MAX_LOGPROBS)
        most = MAX_LOGPROBS
        need(0 <= self.max_logprobs <= most, f"--max-logprobs must be between 0 and {most}, or -1 for {most}")
        need(
            self.quantization is None or self.quantization in quantizations.NAMES,
            f"--quantization must be one of {', '.join(quantizations.NAMES)}, not {self.quantization!r:.40}",
        )
        need(0 <= self.seed < 1 << 63, "--seed must be at least 0 and less than 2^63")
        check_layout(self)
        check_deterministic(self)
        check_speculation(self)
        check_lora(self)
        check_hosts(self, need)
        need(self.device_index >= 0, "device_index must be at least 0")
        need(self.step_timeout_s > 0, "--step-timeout-s must be greater than 0")

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size  # workers of one engine

    @property
    def output_rank(self) -> int:
        return self.world_size - self.tensor_parallel_size  # the first rank of the last stage: the core reads its results

    def requested_blocks(self, block_bytes: int, taken: int = 0) -> int | None:
        """KV blocks that flags ask for; None if the free memory decides. taken: bytes of what shares the memory with them."""
        if self.num_gpu_blocks_override is not None or self.kv_cache_memory_bytes is None:
            return self.num_gpu_blocks_override
        return blocks_in(max(self.kv_cache_memory_bytes - taken, 0), block_bytes)


# ------------------------------------------------------------------------------------------------------------- flags
def add_engine_arguments(parser: argparse.ArgumentParser, model: str = "model") -> None:
    """Add the engine's flags, the same for `enginecore` and `quire serve`, in groups; defaults are EngineConfig's. model: the
    name of the model's argument, positional or "--model"."""
    help_text = "model folder or hub id; without it a tiny bundled model is served, with --runner pooling an embedder"
    optional = {"nargs": "?"}
    parser.add_argument(model, default=None, help=help_text, **(optional if model == "model" else {}))  # type: ignore[arg-type]
    for title, add_to in (
        ("model", _add_model),
        ("vectors and scores", add_pooling_arguments),
        ("chat template and sampling defaults", _add_defaults),
        ("device and memory", _add_memory),
        ("recurrent states", add_state_arguments),
        ("images", add_media_arguments),
        ("several hosts", add_hosts_arguments),
        ("batching and scheduling", _add_scheduling),
        ("speculation", add_speculation_arguments),
        ("LoRA adapters", add_lora_arguments),
        ("logs", _add_logs),
        ("own code and profiles", add_own_code_arguments),
    ):
        is_group = isinstance(parser, argparse._ArgumentGroup)  # a script's own group, and groups hold no groups
        add_to(_adder(parser if is_group else parser.add_argument_group(title)))


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of the engine's flags that a frontend without an engine has, too."""
    add_frontend_logs(_adder(parser.add_argument_group("logs")))


def _adder(group: Any) -> Add:
    """Return group.add_argument with EngineConfig's default, which the help shows."""
    d = EngineConfig()

    def add(*flags: str, help: str, **kwargs: Any) -> None:
        name = next(flag for flag in flags if flag.startswith("--"))[2:].replace("-", "_")
        if "default" not in kwargs:
            kwargs["default"] = getattr(d, name)
        if kwargs["default"] is not None and "(default" not in help:
            help += " (default: %(default)s)"
        group.add_argument(*flags, help=help, **kwargs)

    return add


def _add_model(add: Add) -> None:
    add("--revision", help="branch, tag or commit of a hub model (default: its main branch)")
    add("--download-dir", help="where hub downloads go (default: the hub's own cache)")
    add(
        "--hf-token",
        nargs="?",
        help="token for the hub; HF_TOKEN in the environment shows in no "
        "process list (default: HF_TOKEN, or what `hf auth login` has left)",
    )
    add("--served-model-name", help="names by which clients may ask for the model (default: its folder or hub id)", nargs="+")
    add("--tokenizer", help="folder or hub id of the tokenizer (default: the model's own)")
    add("--tokenizer-revision", help="branch, tag or commit of a hub tokenizer (default: its main branch)")
    add("--hf-overrides", action=JsonObject, metavar="JSON", help="fields that replace those of config.json (default: none)")
    add(
        "--dtype",
        type=one_of(("auto", "float32", "bfloat16", "float16"), DTYPES),
        metavar="TYPE",
        help="type of weights and activations: auto (the checkpoint's on a GPU, float32 on a CPU), float32 or float, "
        "bfloat16, float16 or half",
    )
    add(
        "--load-format",
        type=one_of(("auto", "dummy"), LOAD_FORMATS),
        metavar="FORMAT",
        help="auto or safetensors: read the checkpoint's weights; dummy: make random ones",
    )
    add(
        "--model-impl",
        type=one_of(("auto", "quire", "transformers"), MODEL_IMPLS),
        metavar="IMPL",
        help="the code that runs the model: quire or vllm (Quire's own), transformers (transformers' model code with Quire's "
        "attention, KV cache and matrix products), or auto (Quire's own if the model has a family here, else transformers')",
    )
    add(
        "--quantization",
        "-q",
        type=one_of(quantizations.NAMES, quantizations.OTHER_NAMES),
        metavar="METHOD",
        help="type to which the linear layers of a checkpoint of floats are rounded while it is loaded: "
        + "; ".join(f"{name}: {what}" for name, what in quantizations.WHILE_LOADING.items())
        + "; a quantized checkpoint's own method is accepted, too (default: as the checkpoint says)",
    )
    add(
        "--max-model-len",
        type=model_len,
        metavar="N",
        help="longest sequence, prompt and output; 8k is 8000, 8K 8192; auto or -1: what fits (default: the model's)",
    )


def _add_defaults(add: Add) -> None:
    add("--chat-template", help="a file with a jinja2 chat template, or the template itself (default: the model's)")
    add(
        "--chat-template-content-format",
        choices=["auto", "string", "openai"],
        help="form of a message's content: string, or openai (a list of parts); auto: the one that the template reads",
    )
    add(
        "--generation-config",
        help="where sampling defaults come from: 'auto', the model's generation_config.json; 'vllm', nowhere; or a folder",
    )
    add(
        "--override-generation-config",
        action=JsonObject,
        metavar="JSON",
        help='fields that replace those of generation_config.json, like {"temperature": 0.5} (default: none)',
    )
    add("--max-logprobs", type=int, help="the most logprobs that a request may ask for, 0 to 128; -1: 128")


def _add_memory(add: Add) -> None:
    add("--device", choices=["auto", "cuda", "cpu"], help="where to run; auto: cuda if there is a GPU, else cpu")
    add("--tensor-parallel-size", "-tp", type=int, metavar="N", help="GPUs to split each layer over, or processes on a CPU")
    add("--enable-expert-parallel", "-ep", action=Switch, help="give these GPUs whole experts, not shards (default: off)")
    add("--pipeline-parallel-size", "-pp", type=int, metavar="N", help="stages to cut the layers into, each on GPUs of its own")
    add("--data-parallel-size", "-dp", type=int, metavar="N", help="whole engines that share the requests (--router)")
    add("--gpu-memory-utilization", type=float, help="share of the GPU's memory to use, other processes included")
    add("--cpu-kv-cache-gib", type=float, help="size of the KV cache on a CPU, GiB (default: half of what is left, at most 8)")
    add(
        "--kv-cache-memory-bytes",
        type=human_int,
        metavar="N",
        help="size of the KV cache in place of --gpu-memory-utilization; 8g is 8e9 bytes, 8G 8 GiB (default: what fits)",
    )
    add(
        "--num-gpu-blocks-override",
        type=human_int,
        metavar="N",
        help="number of KV blocks, in place of the number that fits (default: what fits)",
    )
    add(
        "--kv-cache-dtype",
        choices=["auto", "fp8", "fp8_e4m3", "fp8_e5m2"],
        help="type of the KV cache: auto (the type that the checkpoint names, else the model's); fp8 is fp8_e4m3",
    )
    add(
        "--kv-cache-dtype-skip-layers",
        nargs="+",
        metavar="LAYER",
        help="layers that keep the model's type: indices from 0, or sliding_window for all with a window (default: none)",
    )
    add("--block-size", type=int, help="tokens in a KV block: 16, 32, 64, 128 or 256 (default: 64 on a GPU, 16 on a CPU)")
    add("--enforce-eager", action=Switch, help="run without CUDA graphs (default: off)")
    add(
        "--deterministic",
        action=Switch,
        help="on a GPU: a request's tokens and logprobs are the same to the last bit beside any other requests (default: off)",
    )
    add("--seed", type=int, help="seed of dummy weights, and of requests that bring no seed")


def _add_scheduling(add: Add) -> None:
    add(
        "--max-num-seqs",
        type=human_int,
        metavar="N",
        help="the most sequences that run at once (default: 1024 on a GPU of 70 GB and more, 256 on smaller ones, 64 on a CPU)",
    )
    add(
        "--max-num-batched-tokens",
        type=human_int,
        metavar="N",
        help="the most tokens computed in one step; longer prompts are cut into chunks (default: 8192 on a GPU, 512 on a CPU)",
    )
    add(
        "--long-prefill-token-threshold",
        type=human_int,
        metavar="N",
        help="the most tokens of one prompt in a step; 0: as many as the step has room for",
    )
    add(
        "--max-num-waiting",
        "--max-num-queued-reqs",
        type=human_int,
        metavar="N",
        help="the most requests that wait; further ones are refused with 503",
    )
    add(
        "--max-num-queued-tokens",
        type=human_int,
        metavar="N",
        help="the most prompt tokens of requests that wait; further ones are refused with 503; 0: no bound",
    )
    add(
        "--max-queue-s",
        type=float,
        metavar="S",
        help="the longest that waiting requests may take, estimated in seconds; further ones are refused with 503; 0: no bound",
    )
    add("--enable-prefix-caching", action=Switch, help="reuse the KV blocks of equal prefixes (default: on)")
    add("--scheduling-policy", choices=["fcfs", "priority"], help="order of waiting requests: by arrival, or by priority")
    add(
        "--admission",
        choices=["lookahead", "optimistic"],
        help="start a request if memory is estimated to last to its end, or when there is room now (it may be preempted)",
    )
    add("--step-timeout-s", type=float, help="age of a step at which /health fails")
    add(
        "--replay",
        action=Switch,
        help="run the requests in flight again when a worker or the engine dies, so that clients only wait (default: on)",
    )
    add("--collective-timeout-s", type=float, help="how long a GPU waits for others in a step; then workers are replaced")


def _add_logs(add: Add) -> None:
    add_frontend_logs(add)
    add("--disable-log-stats", action=Switch, help="do not log statistics every 10 s (default: off)")


def engine_config_from(args: argparse.Namespace, **more: Any) -> EngineConfig:
    """EngineConfig from parsed flags; `more` adds or overrides. Raises ValueError for values that can never work."""
    values = {name: getattr(args, name) for name in EngineConfig.__struct_fields__ if hasattr(args, name)} | more
    return EngineConfig(**values | {"speculative_config": speculation_of(values.get("speculative_config"))})
