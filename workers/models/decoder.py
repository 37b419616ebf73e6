"""The decoder-only transformer around a family's blocks: embedding, final norm, LM head. Also the definition of a `Family`.

Module names are the checkpoint's. A StepContext holds what layers need of a step (step_context.py). The runner and
loading/ use `CausalLM` for every family.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import nn

from quire.kernels.step.tables import StepBuffers
from quire.workers.layers import ops
from quire.workers.layers.embedding import Embedding
from quire.workers.layers.kv_scales import KVScales
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import Norm, NormSpec, make_norm
from quire.workers.layers.reward_head import RewardHead
from quire.workers.layers.score_head import ScoreHead
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.blocks import SelfAttention
from quire.workers.models.config import LayerSpec, ModelConfig, ModelSpec, MTPSpec, PoolingSpec
from quire.workers.models.fields import SILU, Json, rms_norm_eps
from quire.workers.models.language_model import LanguageModel
from quire.workers.models.per_layer_inputs import PerLayerInputs
from quire.workers.models.stage_boundary import MissingLayer, StageBuffer, StageInput, StageOutput
from quire.workers.models.step_context import StepContext
from quire.workers.parallel import Parallel
from quire.workers.shard import whole


class MakeBlock(Protocol):
    """Makes layer number `layer`: a module with the forward

    (output of the last sublayer or None, residual without it [T, H], context, logits_indices=None) -> (output, residual).
    If the model has inputs of each layer (PerLayerInputs), they are the last argument.
    The residual may change in place. With logits_indices int32 [R], both results are of these tokens only, [R, H].
    """

    def __call__(self, config: ModelConfig, spec: LayerSpec, place: Placement, layer: int) -> Module: ...


def read_rms_model(fields: Json) -> ModelSpec:
    """A model with Llama's RMSNorm and nothing else around its layers."""
    return ModelSpec(norm=NormSpec(eps=rms_norm_eps(fields)))


class Family(NamedTuple):
    """A family's readers and block, as its file defines them."""

    name: str  # as in messages to users
    fields: frozenset[str]  # of config.json, read by this family besides those that all families read
    read_layers: Callable[[Json], tuple[LayerSpec, ...]]
    make_block: MakeBlock
    read_model: Callable[[Json], ModelSpec] = read_rms_model
    plain_fields: Callable[[Json], Json] = dict  # config.json -> the same with the names and defaults of fields.py
    names: CheckpointNames = CheckpointNames()
    activations: frozenset[str] = SILU  # values of hidden_act
    ignored: Callable[[Json], tuple[str, ...]] = lambda fields: ()  # names in the checkpoint besides those of `names`
    read_mtp: Callable[[Json, tuple[LayerSpec, ...]], MTPSpec | None] = lambda fields, layers: None


class Decoder(Module):
    """Embedding, blocks, final norm: token ids int32 [T] -> hidden states [T, H], or [R, H] of logits_indices.

    A pipeline stage has some of these; `stage_buffer` has its input from the stage before and its output to the next.
    """

    _begin: Module
    inputs_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    end: Any

    def __init__(self, config: ModelConfig, make_block: MakeBlock, place: Placement, stage_buffer: StageBuffer):
        super().__init__()
        model, size, stage = config.model, config.hidden_size, place.parallel.stage
        scale = model.embedding_scale
        if model.rounds_embedding_scale:
            scale = float(torch.tensor(scale, dtype=place.dtype, device="cpu"))
        on_device = size, place.dtype, place.device
        has_table = stage.is_first or (stage.is_last and config.tie_word_embeddings)
        self.embed_tokens: Module = (
            Embedding(config.vocab_size, *on_device, scale, place.table_dtype) if has_table else MissingLayer()
        )
        if model.embedding_norm is not None:
            self.embed_norm: Module = make_norm(model.embedding_norm, *on_device) if stage.is_first else MissingLayer()
        self._has_embed_norm = model.embedding_norm is not None and stage.is_first
        self._has_inputs = model.per_layer is not None
        if model.per_layer is not None:
            self.per_layer_inputs = PerLayerInputs(config, model.per_layer, place)
            self.__dict__["inputs_of"] = self.per_layer_inputs  # what is run, as `end` below
        self.layers = nn.ModuleList(
            make_block(config, spec, place.at(f"model.layers.{i}"), i) if i in stage.layers else MissingLayer()
            for i, spec in enumerate(config.layers)
        )
        self.fuse = choose_fusion(config, place.parallel)
        self.blocks = self.fuse(self.layers)  # as they are run; a graph may hold what belongs to them
        norm = make_norm(model.norm, *on_device)
        self.norm: Norm | StageOutput = norm if stage.is_last else StageOutput(norm, stage_buffer)
        # not by nn.Module's __setattr__, or it would be a child under two names
        self.__dict__["_begin"] = self.embed_tokens if stage.is_first else StageInput(stage_buffer)
        self.__dict__["end"] = self.norm  # what is run; a tap may take its place (taps.py)

    def forward(self, input_ids: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None) -> torch.Tensor:
        x, residual = None, self._begin(input_ids)
        if self._has_embed_norm:
            residual = self.embed_norm(residual)
        inputs = (self.inputs_of(input_ids, residual),) if self._has_inputs else ()
        *blocks, last = self.blocks
        for block in blocks:
            x, residual = block(x, residual, context, None, *inputs)
        x, residual = last(x, residual, context, logits_indices, *inputs)
        if x is None and isinstance(self.end, Norm):
            return self.end(residual)
        return self.end.add(x, residual)  # type: ignore[no-any-return]


class CausalLM(LanguageModel):
    """A family's decoder and its language-model head."""

    tower: Module  # the encoder of a model that takes items

    def __init__(self, config: ModelConfig, make_block: MakeBlock, place: Placement):
        super().__init__()
        self.config = config
        self.stage_buffer = StageBuffer()
        self.model = Decoder(config, make_block, place, self.stage_buffer)
        pooling, is_last = config.pooling, place.parallel.stage.is_last
        self.has_head = pooling is None or pooling.generates
        self.lm_head = self._make_head(place) if is_last and self.has_head else MissingLayer()
        if pooling is not None and pooling.num_labels and is_last:
            self.score = self._make_score(pooling, place)
        self._take_items(place)
        self._parallel = place.parallel
        self._logits = config.model.logit_scale, config.model.logit_softcap

    def _make_score(self, pooling: PoolingSpec, place: Placement) -> ScoreHead | RewardHead:
        config = self.config
        if pooling.is_reward:
            return RewardHead(config.hidden_size, pooling.num_labels, place)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        return ScoreHead(pooling, (config.vocab_size, config.hidden_size), place, tied_to)

    def _take_items(self, place: Placement) -> None:
        """Make the encoder of a model that takes items; the first stage has it."""
        if self.config.media is None:
            return
        if not place.parallel.stage.is_first:
            self.tower = MissingLayer()
            return
        from quire.workers.models.media.model_items import ModelItems  # imports transformers, seconds
        from quire.workers.models.transformers.tower import Tower

        self.tower = tower = Tower(self.config.media, place)
        self.items = ModelItems(tower, self.config.media, self.config.hidden_size, place.dtype, place.device)
        self.items.attach(self.model)

    def appliers(self, buffers: StepBuffers) -> dict[str, Callable[[np.ndarray], None]]:
        if self.items is None:  # a later stage's attention must know how far tokens of items see
            return {} if self.config.media is None else {"places": buffers.see_ahead}
        return self.items.appliers(buffers)

    def _make_head(self, place: Placement) -> Linear:
        config = self.config
        outputs = {"lm_head": place.parallel.vocabulary(config.vocab_size)}
        tied_to = cast(Embedding, self.model.embed_tokens).weight if config.tie_word_embeddings else None
        return Linear(whole(config.hidden_size), outputs, config.model.head_bias, place.of_head(), tied_to=tied_to)

    def forward(
        self,
        input_ids: torch.Tensor,
        context: StepContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids int32 [T] -> hidden [T, H] after the final norm; with logits_indices int32 [R], [R, H] of these.
        A stage before the last returns [T, H] for the next stage.

        After the last layer's attention the other tokens are not needed: that saves a prompt most of a layer, 3 % of 28 layers.
        Rotary families leave `context.positions` to attention; a family with learned positions would read them here.
        """
        return self.model(input_ids, context, logits_indices)

    def kv_scales(self) -> dict[int, KVScales]:
        """KV scales of the layers that have an 8-bit cache, by layer."""
        modules = (module for module in self.modules() if isinstance(module, SelfAttention))
        return {module.layer: module.kv_scales for module in modules if module.kv_scales is not None}

    @contextmanager
    def short(self) -> Iterator[None]:
        """A context in which forward runs two layers of each kind (equal LayerSpecs): to run every kernel, not for results.

        Two, since the first layer has nothing to add to its residual, and the last continues with the rows' last tokens only.
        """
        decoder, specs = self.model, self.config.layers
        own = [i for i in range(len(specs)) if i in self._parallel.stage.layers]
        kept = [own[i] for i in two_of_each([specs[i] for i in own])]
        all_blocks, decoder.blocks = decoder.blocks, decoder.fuse([decoder.layers[i] for i in kept])
        try:
            yield
        finally:
            decoder.blocks = all_blocks

    def compute_logits(self, hidden_rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_rows [R, H] -> logits of this rank's shard of the vocabulary, [R, V] on a single rank, in the model's dtype.

        They are written to `out` if it is given (on a GPU).
        """
        logits = self.lm_head(hidden_rows, out)
        return logits if self._logits == (1.0, 0.0) else ops.shape_logits(logits, *self._logits)

    def compute_scores(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return self.score(hidden_rows)

    def compute_all_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """hidden_rows [R, H] -> logits [R, V] on every rank."""
        return self._parallel.all_logits(self.compute_logits(hidden_rows), self.config.vocab_size)


def choose_fusion(config: ModelConfig, parallel: Parallel) -> Callable[[Iterable[nn.Module]], list[Any]]:
    """A function from a model's blocks to those to run: fused ones where one kernel computes several products."""
    if config.quantization is None or parallel.device.type != "cuda":
        return list
    from quire.workers.models.fusion import fuse_blocks  # imports Triton, which may not be installed without a GPU

    return partial(fuse_blocks, parallel=parallel)


def two_of_each(specs: Sequence[LayerSpec]) -> list[int]:
    """Indices of the first two of each kind."""
    return [i for i, spec in enumerate(specs) if specs[:i].count(spec) < 2]
