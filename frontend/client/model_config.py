"""An engine's configuration as scripts for vLLM read it, such as `llm.llm_engine.model_config.max_model_len`.

It is made from the options that an engine was started with and from its Welcome; before the start, from the options alone. It
needs no torch: a dtype is a name.
"""

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from quire.frontend.client.client import Client
from quire.frontend.client.not_here import CONFIG_FIELDS, Absent, without
from quire.ipc.bundled import bundled
from quire.ipc.config import EngineConfig
from quire.ipc.speculative_config import SpeculativeConfig

_OPTIONS = "options are given to LLM, EngineArgs or `quire serve` by their names"
_STARTED = "a started engine knows it: LLM(...).vllm_config"


class _Config:
    """One of vLLM's configurations: read, not made, by scripts. Other fields of vLLM's say why they are not here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} is not made by scripts here: {_OPTIONS}")

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Make one, with the defaults of its class."""
        made = object.__new__(cls)
        made.__dict__.update(fields)
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return without(self, name, CONFIG_FIELDS)


@dataclass(frozen=True, init=False)
class ModelConfig(_Config):
    """The served model's configuration.

    model: folder or hub id. max_model_len: most tokens of a sequence, as the engine has determined. dtype: "bfloat16", ..., of
    weights and activations. quantization: the method; None for floats.
    """

    model: str
    revision: str | None
    served_model_name: str
    tokenizer: str
    tokenizer_revision: str | None
    max_model_len: int
    vocab_size: int
    dtype: str
    quantization: str | None
    max_logprobs: int
    seed: int
    enforce_eager: bool
    hf_overrides: dict[str, Any]
    generation_config: str
    override_generation_config: dict[str, Any]
    has_folder: bool = True  # False: the bundled model, whose name is no folder
    trust_remote_code: bool = False  # never: no checkpoint's code is run
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    task: str = "generate"
    runner_type: str = "generate"
    supported_tasks: tuple[str, ...] = ("generate",)
    is_multimodal_model: bool = False  # models of text only are served
    is_encoder_decoder: bool = False
    multimodal_config: None = None
    pooler_config: None = None
    logits_processors: None = None

    def get_vocab_size(self) -> int:
        return self.vocab_size

    @functools.cached_property
    def hf_config(self) -> Any:
        """transformers' configuration of the model's folder. The first use imports transformers."""
        from transformers import AutoConfig

        folder = self.model if self.has_folder else str(bundled(self.runner_type).folder)
        return AutoConfig.from_pretrained(folder, revision=self.revision, local_files_only=True, trust_remote_code=False)

    @property
    def hf_text_config(self) -> Any:
        return self.hf_config.get_text_config()

    @property
    def architectures(self) -> list[str]:
        return list(self.hf_config.architectures or ())

    @property
    def architecture(self) -> str:
        return self.architectures[0]

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    def get_head_size(self) -> int:
        text = self.hf_text_config
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    def get_num_layers(self, *_: object) -> int:
        return int(self.hf_text_config.num_hidden_layers)

    def get_total_num_kv_heads(self) -> int:
        text = self.hf_text_config
        return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)

    def get_num_kv_heads(self, parallel_config: "ParallelConfig") -> int:
        """For one worker."""
        return max(1, self.get_total_num_kv_heads() // parallel_config.tensor_parallel_size)

    def get_num_attention_heads(self, parallel_config: "ParallelConfig") -> int:
        """For one worker."""
        return int(self.hf_text_config.num_attention_heads) // parallel_config.tensor_parallel_size

    def get_sliding_window(self) -> int | None:
        window: int | None = getattr(self.hf_text_config, "sliding_window", None)
        return window


@dataclass(frozen=True, init=False)
class CacheConfig(_Config):
    """The KV cache: block_size in tokens, num_gpu_blocks of them in all."""

    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    cache_dtype: str
    num_cpu_blocks: int = 0  # sequences are computed again rather than swapped
    swap_space: int = 0
    cpu_offload_gb: int = 0
    sliding_window: None = None


@dataclass(frozen=True, init=False)
class SchedulerConfig(_Config):
    """max_num_batched_tokens: as given; None: the engine chooses by itself."""

    max_num_seqs: int
    max_num_batched_tokens: int | None
    policy: str
    max_model_len: int
    enable_chunked_prefill: bool = True  # always
    chunked_prefill_enabled: bool = True
    async_scheduling: bool = True


@dataclass(frozen=True, init=False)
class ParallelConfig(_Config):
    """world_size: workers of one engine."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    world_size: int
    distributed_executor_backend: str | None
    rank: int = 0


@dataclass(frozen=True, init=False)
class DeviceConfig(_Config):
    device: str

    @property
    def device_type(self) -> str:
        return self.device


@dataclass(frozen=True, init=False)
class LoadConfig(_Config):
    load_format: str
    download_dir: str | None


@dataclass(frozen=True, init=False)
class VllmConfig(_Config):
    """The parts of vLLM's class that Quire has. cache_config: None without a cache. options: what it was made from."""

    model_config: ModelConfig
    cache_config: CacheConfig | None
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    device_config: DeviceConfig
    load_config: LoadConfig
    options: EngineConfig
    speculative_config: SpeculativeConfig | None = None
    lora_config: None = None
    quant_config: None = None
    kv_transfer_config: None = None


def vllm_config(options: EngineConfig, client: Client) -> VllmConfig:
    """A started engine's. Raises EngineDown if the client has never been connected."""
    welcome, cache = client.welcome, client.cache
    model = _model_config(
        options,
        welcome.served_model_names[0],
        max_model_len=welcome.limits.max_model_len,
        vocab_size=welcome.limits.vocab_size,
        dtype=welcome.numerics.dtype,
        quantization=welcome.numerics.quantization or None,
        max_logprobs=welcome.limits.max_logprobs,
    )
    fields = None if cache is None else {name: getattr(cache, name) for name in cache.__struct_fields__}
    return _vllm_config(options, model, None if fields is None else CacheConfig.of(**fields), welcome.limits.max_num_seqs)


def unstarted_config(options: EngineConfig) -> VllmConfig:
    """That of an engine before its start. Values that the engine finds out are Absent."""
    given = options.served_model_name
    model = _model_config(
        options,
        given[0] if given else os.fspath(options.model or "quire-tiny"),
        max_model_len=_known("max_model_len", options.max_model_len),
        vocab_size=_known("vocab_size", None),
        dtype=options.dtype,
        quantization=options.quantization,
        max_logprobs=options.max_logprobs,
    )
    cache = CacheConfig.of(
        block_size=_known("block_size", options.block_size),
        num_gpu_blocks=_known("num_gpu_blocks", None),
        enable_prefix_caching=options.enable_prefix_caching,
        gpu_memory_utilization=options.gpu_memory_utilization,
        cache_dtype=options.kv_cache_dtype,
    )
    return _vllm_config(options, model, cache, _known("max_num_seqs", options.max_num_seqs))


def check_config(config: Any) -> EngineConfig:
    """The options of `from_vllm_config`'s argument. Raises ValueError."""
    if not isinstance(config, VllmConfig):
        kind = type(config).__name__
        raise ValueError(f"from_vllm_config needs what EngineArgs(...).create_engine_config() returns, got {kind}")
    return config.options


def _known(name: str, value: Any) -> Any:
    return Absent(name, _STARTED) if value is None else value


def _model_config(options: EngineConfig, served_name: str, **fields: Any) -> ModelConfig:
    model = os.fspath(options.model) if options.model is not None else served_name
    return ModelConfig.of(
        model=model,
        revision=options.revision,
        served_model_name=served_name,
        tokenizer=options.tokenizer or model,
        tokenizer_revision=options.tokenizer_revision,
        seed=options.seed,
        enforce_eager=options.enforce_eager,
        hf_overrides=options.hf_overrides,
        generation_config=options.generation_config,
        override_generation_config=options.override_generation_config,
        has_folder=options.model is not None,
        runner_type="pooling" if options.runner == "pooling" else "generate",
        **fields,
    )


def _vllm_config(options: EngineConfig, model: ModelConfig, cache: CacheConfig | None, max_num_seqs: int) -> VllmConfig:
    return VllmConfig.of(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig.of(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens or None,
            policy=options.scheduling_policy,
            max_model_len=model.max_model_len,
        ),
        parallel_config=ParallelConfig.of(
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
            data_parallel_size=options.data_parallel_size,
            world_size=options.world_size,
            distributed_executor_backend=options.distributed_executor_backend,
        ),
        device_config=DeviceConfig.of(device=options.device),
        load_config=LoadConfig.of(load_format=options.load_format, download_dir=options.download_dir),
        options=options,
        speculative_config=options.speculative_config,
    )
