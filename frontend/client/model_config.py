"""An engine's configuration as scripts for vLLM read it, such as `llm.llm_engine.model_config.max_model_len`.

It is made from the options that an engine was started with and from its Welcome. It needs no torch: a dtype is a name.
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
    """The served model's configuration. vLLM's other fields raise an AttributeError that says where to find the value.

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

    def get_vocab_size(self) -> int:
        return self.vocab_size

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise without(self, name, CONFIG_FIELDS)


@dataclasses.dataclass(frozen=True)
class VllmConfig:
    """The parts of vLLM's class that Quire has. cache_config: block_size, num_gpu_blocks, ...; None without a cache."""

    model_config: ModelConfig
    cache_config: CacheInfo | None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise without(self, name, CONFIG_FIELDS)


def vllm_config(options: EngineConfig, client: Client) -> VllmConfig:
    """Raises EngineDown if the client has never been connected."""
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
