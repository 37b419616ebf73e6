"""What scripts for vLLM read of an engine's configuration: `llm.llm_engine.model_config.max_model_len`, and its like.

Made of the options that an engine was started with and of what it said when a client connected. No torch: a dtype is its name.
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from quire.frontend.client.client import Client
from quire.frontend.client.not_here import CONFIG_FIELDS, without
from quire.ipc.config import EngineConfig
from quire.ipc.messages.stats import CacheInfo


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Of the model that is served. Other fields of vLLM's raise AttributeError, with where to find what they say.

    model: folder or hub id. max_model_len: most tokens of a sequence, as the engine has found. dtype: "bfloat16", ..., of
    weights and activations. quantization: its method, None for floats.
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

    def get_vocab_size(self) -> int:
        return self.vocab_size

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise without(self, name, CONFIG_FIELDS)


@dataclasses.dataclass(frozen=True)
class VllmConfig:
    """The parts of vLLM's that are known here. cache_config: block_size, num_gpu_blocks, ...; None without a cache."""

    model_config: ModelConfig
    cache_config: CacheInfo | None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise without(self, name, CONFIG_FIELDS)


def vllm_config(options: EngineConfig, client: Client) -> VllmConfig:
    """Raises EngineDown without an engine that has ever been connected."""
    welcome = client.welcome
    model = os.fspath(options.model) if options.model is not None else welcome.served_model_names[0]
    found = ModelConfig(
        model=model,
        revision=options.revision,
        served_model_name=welcome.served_model_names[0],
        tokenizer=options.tokenizer or model,
        tokenizer_revision=options.tokenizer_revision,
        max_model_len=welcome.limits.max_model_len,
        vocab_size=welcome.limits.vocab_size,
        dtype=welcome.numerics.dtype,
        quantization=welcome.numerics.quantization or None,
        max_logprobs=welcome.limits.max_logprobs,
        seed=options.seed,
        enforce_eager=options.enforce_eager,
    )
    return VllmConfig(found, client.cache)
