"""DraftModel: a draft model of a rank, read from its folder, built and loaded. For the worker.

A draft model is any model of attention layers whose tokens are the target's. It is split over the ranks like the target, and
its keys and values have the ids of the target's blocks. The engine compares the tokenizers (loading/speculation_start.py).
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.ipc.memory_plan import GIB
from quire.ipc.worker_config import ResolvedEngineConfig
from quire.workers.attention.kv_cache import KVCache
from quire.workers.loading.prepare_cpu import quicken_attributes
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.models.language_model import LanguageModel
from quire.workers.parallel import Parallel

log = logging.getLogger("quire.workers")


@dataclass(frozen=True)
class DraftModel:
    """A draft model whose parameters may still be empty."""

    model: LanguageModel
    config: ModelConfig
    cache: KVCache  # of its own layers, under the ids of the target's blocks
    parallel: Parallel
    longest: int  # tokens of a sequence that it may draft for

    def load(self, engine: ResolvedEngineConfig, device: torch.device, *, progress: bool) -> None:
        """Fill the parameters: from the folder, or with random numbers. Raises WeightsError."""
        speculation = engine.speculative_config
        assert speculation is not None and speculation.model is not None
        if engine.load_format == "dummy":
            dummy_weights(self.model, engine.seed)
        else:
            load_weights(self.model, Path(speculation.model), device, progress=progress)
        if device.type == "cpu":
            quicken_attributes(self.model)
        log.info("the draft model has %.2f GiB of weights", self.model.weights_bytes / GIB)


def build_draft_model(engine: ResolvedEngineConfig, dtype: torch.dtype, parallel: Parallel) -> DraftModel | None:
    """The configured draft model with empty parameters, which has the target's type and ranks; None if there is none.

    Raises ModelConfigError, of which the text begins with the flag.
    """
    speculation = engine.speculative_config
    if speculation is None or speculation.model is None:
        return None
    try:
        config = read_model_config(speculation.model, quantization=speculation.quantization)
        if any(layer.recurrent is not None for layer in config.layers):
            raise ModelConfigError("it has recurrent layers, and a draft model has attention alone")
        ranks = parallel.of_drafter()
        model = build_model(config, dtype, ranks)
    except ModelConfigError as error:
        raise ModelConfigError(f"--speculative-config: model {speculation.model}: {error}") from None
    cache = KVCache(config.attention_specs(ranks), engine.block_size, dtype, model.kv_scales(), one_table=True)
    lengths = engine.max_model_len, speculation.max_model_len, config.longest
    return DraftModel(model, config, cache, ranks, min(length for length in lengths if length is not None))
