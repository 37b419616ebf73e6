"""DraftModel: a draft model of a rank, read from its folder, built and loaded. For the worker.

A draft model is any model of attention layers whose tokens are the target's. It is split over the ranks like the target, and
its keys and values have the ids of the target's blocks. The engine compares the tokenizers (loading/speculation_start.py).
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

import torch

from quire.ipc.memory_plan import GIB
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.worker_config import ResolvedEngineConfig
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.attention.kv_cache import KVCache
from quire.workers.loading.files import checkpoint_tensors
from quire.workers.loading.prepare_cpu import quicken_attributes
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.loading.weights import EMBED, dummy_weights, load_weights
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.decoder import CausalLM
from quire.workers.models.family_table import read_model_config
from quire.workers.models.language_model import LanguageModel
from quire.workers.models.step_context import StepContext
from quire.workers.models.taps import tap, tap_end
from quire.workers.parallel import Parallel
from quire.workers.speculation.eagle3 import Eagle3Head
from quire.workers.speculation.eagle3_config import NAMES, read_eagle3_config
from quire.workers.speculation.features import Features
from quire.workers.speculation.head import Head
from quire.workers.speculation.mtp import MTPHead, mtp_config

log = logging.getLogger("quire.workers")


@dataclass(frozen=True)
class DraftModel:
    """A draft model whose parameters may still be empty."""

    model: LanguageModel
    config: ModelConfig
    cache: KVCache  # of its own layers, under the ids of the target's blocks
    parallel: Parallel
    longest: int  # tokens of a sequence that it may draft for
    features: Features | None = None  # of a head

    def renew(self, num_blocks: int) -> None:
        """The cache was allocated anew, with so many blocks."""
        if self.features is not None:
            self.features.renew(num_blocks)

    def read(self, kernels: ModuleType, tables: SlotTables, step: StepBuffers, inputs: StepBuffers, *sizes: int) -> None:
        """The inputs of a pass behind a step are built: make of the step what a head reads, by Features.before."""
        if self.features is not None:
            cast(Head, self.model).given = self.features.before(kernels, tables, step, inputs, *sizes)

    @property
    def reads_all(self) -> bool:
        """Whether it must read each step behind it."""
        return self.features is not None

    @property
    def writes_alone(self) -> bool:
        return isinstance(self.model, Head) and self.model.writes_alone

    def write(self, input_ids: torch.Tensor, context: StepContext, logits_indices: torch.Tensor) -> None:
        """A forward of a pass that drafts nothing, for the entries that the cache gets."""
        forward = self.model.write if isinstance(self.model, Head) else self.model
        forward(input_ids, context, logits_indices)

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


def build_draft_model(
    engine: ResolvedEngineConfig, dtype: torch.dtype, parallel: Parallel, target: LanguageModel
) -> DraftModel | None:
    """The configured draft model with empty parameters, which has the target's type and ranks; None if there is none.

    A head taps the target. Raises ModelConfigError, of which the text begins with the flag.
    """
    speculation = engine.speculative_config
    if speculation is None or speculation.model is None:
        return None
    try:
        build = {"eagle3": _eagle3, "mtp": _mtp}.get(speculation.method, _draft_model)
        return build(engine, speculation, dtype, parallel.of_drafter(), target)
    except (ModelConfigError, WeightsError) as error:
        raise ModelConfigError(f"--speculative-config: model {speculation.model}: {error}") from None


def _draft_model(
    engine: ResolvedEngineConfig,
    speculation: SpeculativeConfig,
    dtype: torch.dtype,
    parallel: Parallel,
    target: LanguageModel,
) -> DraftModel:
    config = read_model_config(str(speculation.model), quantization=speculation.quantization)
    if any(layer.recurrent is not None for layer in config.layers):
        raise ModelConfigError("it has recurrent layers, and a draft model has attention alone")
    model = build_model(config, dtype, parallel)
    cache = KVCache(config.attention_specs(parallel), engine.block_size, dtype, model.kv_scales(), one_table=True)
    lengths = engine.max_model_len, speculation.max_model_len, config.longest
    return DraftModel(model, config, cache, parallel, min(length for length in lengths if length is not None))


def _eagle3(
    engine: ResolvedEngineConfig,
    speculation: SpeculativeConfig,
    dtype: torch.dtype,
    parallel: Parallel,
    target: LanguageModel,
) -> DraftModel:
    folder, theirs = str(speculation.model), target.config
    config = read_eagle3_config(folder, len(theirs.layers), theirs.hidden_size, speculation.quantization)
    rows = engine.max_num_seqs
    taps = tap(target, config.taps, max(engine.max_num_batched_tokens, rows) + rows, dtype)
    if engine.load_format == "dummy":
        has_embedding = config.layer.hidden_size != theirs.hidden_size
        has_ids = config.draft_vocab_size != config.layer.vocab_size
    else:
        names = checkpoint_tensors(Path(folder), NAMES)
        has_embedding, has_ids = EMBED in names, "d2t" in names
    assert isinstance(target, CausalLM)
    head = Eagle3Head(config, dtype, parallel, target, has_embedding=has_embedding, has_ids=has_ids)
    cache = KVCache(config.layer.attention_specs(parallel), engine.block_size, dtype, one_table=True)
    cache.more_bytes = config.layer.hidden_size * dtype.itemsize
    features = Features(taps, head.combine, config.layer.hidden_size)
    longest = min(engine.max_model_len, speculation.max_model_len or engine.max_model_len)
    return DraftModel(head, config.layer, cache, parallel, longest, features)


def _mtp(
    engine: ResolvedEngineConfig,
    speculation: SpeculativeConfig,
    dtype: torch.dtype,
    parallel: Parallel,
    target: LanguageModel,
) -> DraftModel:
    folder = None if engine.load_format == "dummy" else speculation.model
    config, spec = mtp_config(target.config, folder)
    rows = engine.max_num_seqs
    taps = tap_end(target, max(engine.max_num_batched_tokens, rows) + rows, dtype, before_norm=spec.before_norm)
    assert isinstance(target, CausalLM)
    head = MTPHead(config, spec, dtype, parallel, target)
    cache = KVCache(config.attention_specs(parallel), engine.block_size, dtype, one_table=True)
    cache.more_bytes = config.hidden_size * dtype.itemsize
    features = Features(taps, lambda hidden: hidden, config.hidden_size)
    longest = min(engine.max_model_len, speculation.max_model_len or engine.max_model_len)
    return DraftModel(head, config, cache, parallel, longest, features)
