"""DraftModel: a draft model of a rank, read from its folder, built and loaded. For the worker.

A draft model is any model of attention layers whose tokens are the target's. It is split over the ranks like the target, and
its keys and values have the ids of the target's blocks. The engine compares the tokenizers (loading/speculation_start.py).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from quire.ipc.speculative_config import SpeculativeConfig
from quire.workers.attention.kv_cache import KVCache
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.models.language_model import LanguageModel
from quire.workers.parallel import Parallel


@dataclass(frozen=True)
class DraftModel:
    """A draft model whose parameters may still be empty."""

    model: LanguageModel
    config: ModelConfig
    cache: KVCache  # with a kind of blocks for each of its own layers' shapes
    parallel: Parallel
    longest: int  # tokens of a sequence that it may draft for

    def load(self, folder: str, device: torch.device, *, dummy: bool, seed: int, progress: bool) -> None:
        """Fill the parameters, with random numbers if `dummy`. Raises WeightsError."""
        if dummy:
            dummy_weights(self.model, seed)
        else:
            load_weights(self.model, Path(folder), device, progress=progress)


def build_draft_model(
    speculation: SpeculativeConfig | None, max_model_len: int, block_size: int, dtype: torch.dtype, parallel: Parallel
) -> DraftModel | None:
    """The configured draft model with empty parameters; None if there is none. max_model_len: the target's.

    Raises ModelConfigError, of which the text begins with the flag.
    """
    if speculation is None or speculation.model is None:
        return None
    try:
        config = read_model_config(speculation.model, quantization=speculation.quantization)
        if any(layer.recurrent is not None for layer in config.layers):
            raise ModelConfigError("it has recurrent layers; a draft model has attention alone")
        ranks = parallel.of_drafter()
        model = build_model(config, dtype, ranks)
    except ModelConfigError as error:
        raise ModelConfigError(f"--speculative-config: model {speculation.model}: {error}") from None
    cache = KVCache(config.attention_specs(ranks), block_size, dtype, model.kv_scales(), one_table=True)
    lengths = max_model_len, speculation.max_model_len, config.longest
    return DraftModel(model, config, cache, ranks, min(length for length in lengths if length is not None))
