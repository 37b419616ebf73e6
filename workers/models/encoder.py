"""Encoders: models of packed whole texts whose tokens see both ways. Embeddings, a family's blocks, and a head or none.

An encoder keeps nothing between steps: it has no cache. Its blocks are called as a decoder's are (decoder.MakeBlock), so a
decoder's block serves where only attention differs; a post-norm block returns no output to be added. The families are in
encoders/. A pooler (workers/pooling/) makes vectors and scores of the hidden states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.workers.attention.packed import PackedAttention, Seen
from quire.workers.encoder_graphs import EncoderGraphs
from quire.workers.layers.embedding import Embedding
from quire.workers.layers.heads import Head
from quire.workers.layers.kv_scales import KVScales
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import Norm, make_norm
from quire.workers.models.config import EncoderSpec, ModelConfig
from quire.workers.models.decoder import MakeBlock, two_of_each
from quire.workers.models.encoders.merged import merged
from quire.workers.models.language_model import Fit, LanguageModel
from quire.workers.models.step_context import StepContext
from quire.workers.shard import whole


def relative_buckets(num_buckets: int, max_distance: int = 128) -> torch.Tensor:
    """int64 [2 max_distance + 1]: the bucket of each distance, key - query, from -max_distance on.

    As in T5 (arXiv:1910.10683, section 2.1) and MPNet: each side has half of the buckets, the first half of these for exact
    distances, the others for ranges that grow by powers up to max_distance, beyond which all distances are in the last.
    """
    distances = torch.arange(-max_distance, max_distance + 1)
    each = num_buckets // 2
    exact = each // 2
    far = distances.abs()
    powers = torch.log(far.float().clamp(min=1) / exact) / float(torch.log(torch.tensor(max_distance / exact)))
    grown = (exact + (powers * (each - exact)).long()).clamp(max=each - 1)
    return torch.where(far < exact, far, grown) + torch.where(distances > 0, each, 0)


class EncoderBody(Module):
    """Embeddings, blocks and, in pre-norm models, the norm behind them: packed tokens -> hidden states [T, H]."""

    norm: Norm

    def __init__(self, config: ModelConfig, spec: EncoderSpec, make_block: MakeBlock, place: Placement):
        super().__init__()
        on_device = config.hidden_size, place.dtype, place.device
        scale = config.model.embedding_scale
        if config.model.rounds_embedding_scale:
            scale = float(torch.tensor(scale, dtype=place.dtype, device="cpu"))
        self.embed_tokens = Embedding(config.vocab_size, *on_device, scale)
        if spec.num_positions:
            self.position_embeddings = Embedding(spec.num_positions, *on_device)
        if spec.num_token_types:
            self.token_type_embeddings = Embedding(spec.num_token_types, *on_device)
        if config.model.embedding_norm is not None:
            self.embed_norm = make_norm(config.model.embedding_norm, *on_device)
        self.layers = nn.ModuleList(
            make_block(config, layer, place.at(f"model.layers.{i}"), i) for i, layer in enumerate(config.layers)
        )
        if spec.has_final_norm:
            self.norm = make_norm(config.model.norm, *on_device)
        if spec.num_buckets:
            heads = config.layers[0].attention.num_heads
            self.relative_attention_bias = Embedding(spec.num_buckets, heads, torch.float32, place.device)
            self._buckets, self._heads = relative_buckets(spec.num_buckets).to(place.device), place.parallel.split(heads)
        self.blocks: list[Any] = list(self.layers)  # as they are run
        self._spec, self._has_embed_norm = spec, config.model.embedding_norm is not None
        self._attention = PackedAttention(config.attention_specs(place.parallel), config.max_position_embeddings, place.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
        seen: Seen | None = None,
    ) -> torch.Tensor:
        self._attention.begin(positions, cu_seqlens, self._relative(), seen)
        none = cu_seqlens[:0]
        context = StepContext(self._attention.attend, positions, none, cu_seqlens, none, 0)
        x, residual = None, self._embed(input_ids, positions, token_types)
        for block in self.blocks:
            x, residual = block(x, residual, context, None)
        if not self._spec.has_final_norm:
            assert x is None, "the last block has added its output"
            return residual
        return self.norm(residual) if x is None else self.norm.add(x, residual)

    def _embed(self, input_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor | None) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        if self._spec.num_token_types:
            table = self.token_type_embeddings
            x = x + (table.weight[0] if token_types is None else table(token_types))
        if self._spec.num_positions:
            x = x + self.position_embeddings(positions + self._spec.first_position)
        return self.embed_norm(x) if self._has_embed_norm else x

    def _relative(self) -> torch.Tensor | None:
        """float32 [Hq, distances] of this rank's heads."""
        if not self._spec.num_buckets:
            return None
        return self.relative_attention_bias.weight[self._buckets].T[self._heads.slice].contiguous()


class Encoder(LanguageModel):
    """An encoder as one rank holds it. `encode` computes hidden states; `forward` does so for a step of the runner."""

    has_graphs = False
    has_head = False  # that a step ends with; a masked language model's is for vectors
    token_types: torch.Tensor | None = None  # int32 [T] of the next step's tokens
    graphs: EncoderGraphs | None = None  # of its layers
    seen: Seen | None = None  # the keys that the next step's rows see

    def __init__(self, config: ModelConfig, make_block: MakeBlock, place: Placement):
        super().__init__()
        assert config.encoder is not None, "a decoder's config"
        self.config, self._parallel, self._spec = config, place.parallel, config.encoder
        head = config.encoder.head
        self.model = EncoderBody(config, config.encoder, make_block, place)
        if head is not None:
            self.head = Head(head, config.hidden_size, place.at("head"))
            if head.kind == "masked_lm":
                outputs = {"lm_head": place.parallel.vocabulary(config.vocab_size)}
                tied_to = self.model.embed_tokens.weight if config.tie_word_embeddings else None
                self.lm_head = Linear(whole(config.hidden_size), outputs, head.out_bias, place.of_head(), tied_to=tied_to)

    def encode(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states [T, H] of packed rows, each a whole text.

        input_ids, positions int32 [T], positions from 0 in each row; token_types int32 [T], None for zeros; cu_seqlens int32
        [R + 1], the rows' bounds, of which the last may be less than T: what follows is padding, and its result has no meaning.
        """
        return self.model(input_ids, positions, token_types, cu_seqlens)

    def forward(
        self, input_ids: torch.Tensor, context: StepContext, logits_indices: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`encode` for a step whose rows are whole texts; with logits_indices int32 [R], [R, H] of these.

        `token_types` are for this step alone; None: all tokens are of the first text. So is `seen`; None: all see whole rows.
        """
        types, self.token_types, seen, self.seen = self.token_types, None, self.seen, None
        hidden = None
        if self.graphs is not None and seen is None:
            hidden = self.graphs(input_ids, context.positions, types, context.query_start)
        if hidden is None:
            hidden = self.model(input_ids, context.positions, types, context.query_start, seen)
        return hidden if logits_indices is None else hidden.index_select(0, logits_indices)

    def begin_graphs(self, max_tokens: int, max_rows: int) -> float:
        """Graphs of its layers, which are captured as they are met. There are none of several ranks, nor while the load of
        experts is counted, since its counters know a step's rows."""
        if self._parallel.size == 1 and self._parallel.expert_load is None:
            has_types, device = bool(self._spec.num_token_types), self.model.embed_tokens.weight.device
            self.graphs = EncoderGraphs(self.model, max_tokens, max_rows, has_types, device)
        return 0.0

    def see(self, ends: np.ndarray, lengths: np.ndarray) -> None:
        """Tokens of the next step's rows, of these lengths, see keys before `ends` alone: int [R], as the step numbers them."""
        self.seen = Seen.of(ends, lengths, self.model.embed_tokens.weight.device)

    def compute_logits(self, hidden_rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_rows [R, H] -> logits of this rank's shard of the vocabulary, of a masked language model."""
        return self.lm_head(self.head(hidden_rows), out)

    def compute_all_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """hidden_rows [R, H] -> logits [R, V] on every rank."""
        return self._parallel.all_logits(self.compute_logits(hidden_rows), self.config.vocab_size)

    def converted(self, fit: Fit) -> Fit:
        """The fit with the adapter of the config's task added to the weights. Raises WeightsError."""
        adapter = self._spec.adapter
        return fit if adapter is None else merged(fit, adapter)

    def kv_scales(self) -> dict[int, KVScales]:
        """None: it has no cache."""
        return {}

    @contextmanager
    def short(self) -> Iterator[None]:
        """A context in which forward runs two layers of each kind: to run every kernel, not for results."""
        body = self.model
        all_blocks, body.blocks = body.blocks, [body.layers[i] for i in two_of_each(self.config.layers)]
        try:
            yield
        finally:
            body.blocks = all_blocks


def hidden_states(model: Encoder, rows: list[list[int]], token_types: list[list[int]] | None = None) -> torch.Tensor:
    """`encode` of lists of token ids, on the model's device: [T, H]. For tests, tools and a first look."""
    device = model.model.embed_tokens.weight.device

    def flat(lists: list[list[int]]) -> torch.Tensor:
        return torch.tensor([value for row in lists for value in row], dtype=torch.int32, device=device)

    bounds = torch.tensor([0, *(len(row) for row in rows)], device=device).cumsum(0, dtype=torch.int32)
    types = None if token_types is None else flat(token_types)
    return model.encode(flat(rows), flat([list(range(len(row))) for row in rows]), types, bounds)
