"""LanguageModel: the interface of a model to the runner, its graphs and loading/, whether its layers are ours or transformers'.

decoder.py implements it with a family's blocks, transformers/model.py for any other model.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quire.kernels.step.tables import StepBuffers
from quire.workers.adapters.lora import StepAdapters
from quire.workers.layers.kv_scales import KVScales
from quire.workers.layers.module import Module, WeightOwner
from quire.workers.loading.checkpoint_tensor import CheckpointTensor
from quire.workers.loading.weight_loader import WeightLoader
from quire.workers.models.config import ModelConfig
from quire.workers.models.stage_boundary import StageBuffer
from quire.workers.models.step_context import StepContext

if TYPE_CHECKING:
    from quire.workers.models.media.guarded import Report
    from quire.workers.models.media.model_items import ModelItems  # imports transformers


class Fit(NamedTuple):
    """A checkpoint's tensors, the parameters that they go to, and the modules that own these, by the same names."""

    tensors: dict[str, CheckpointTensor]
    loaders: dict[str, WeightLoader]
    owners: dict[str, WeightOwner]


class LanguageModel(Module):
    """A decoder and its language-model head."""

    config: ModelConfig
    stage_buffer: StageBuffer  # only in models that can be split into stages
    has_head = True  # over the vocabulary: it computes logits
    has_graphs = True  # its steps may be captured
    items: "ModelItems | None" = None  # of a model that takes items beside text
    adapters: StepAdapters | None = None  # of its layers, if they have adapter slots

    def forward(
        self,
        input_ids: torch.Tensor,
        context: StepContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids int32 [T] -> hidden [T, H]; with logits_indices int32 [R], [R, H] of these."""
        raise NotImplementedError

    def compute_logits(self, hidden_rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_rows [R, H] -> logits of this rank's shard of the vocabulary, in the model's dtype.

        They are written to `out` if it is given (on a GPU).
        """
        raise NotImplementedError

    def compute_all_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """hidden_rows [R, H] -> logits [R, vocab_size] on every rank."""
        return self.compute_logits(hidden_rows)

    def compute_scores(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """hidden_rows [R, H] -> float32 [R, labels] of a classifier, before their activation."""
        raise NotImplementedError

    def appliers(self, buffers: StepBuffers) -> dict[str, Callable[[np.ndarray], None]]:
        """Functions that apply a plan's sections about the model's own parts, by section. buffers: of the step."""
        return {}

    def allocate_items(self, report: "Report") -> None:
        """Memory for the rows of items, if the model takes some. report: called for each that cannot be encoded."""
        if self.items is not None:
            self.items.guarded.report = report
            self.items.allocate()

    def run_largest_item(self, *, graphs: bool = False) -> int:
        """Encode as much as one run may, if the model takes items; returns the bytes that it takes on a GPU. graphs: capture
        graphs of such runs, too."""
        return 0 if self.items is None else self.items.run_largest(graphs=graphs)

    def keep_item_graphs(self, least: Callable[[int], int]) -> None:
        """Keep the graphs of the encoder that all ranks have. least: of all ranks' values, to be asked by each of them once."""
        graphs = None if self.items is None else self.items.graphs
        number = least(0x7FFFFFFF if self.items is None else 0 if graphs is None else graphs.num_captured)
        if graphs is not None:
            graphs.keep(number)

    def take_item(self, words: np.ndarray) -> None:
        """A record of KIND_ITEM has come; stages without an encoder pass over it."""
        if self.items is not None:
            self.items.take(words)

    def kv_scales(self) -> dict[int, KVScales]:
        """KV scales of the layers that have an 8-bit cache, by layer."""
        raise NotImplementedError

    def short(self) -> AbstractContextManager[None]:
        """A context in which forward runs only two layers of each kind: to run every kernel, not for results."""
        raise NotImplementedError

    def begin_graphs(self, max_tokens: int, max_rows: int) -> float:
        """A model without step graphs captures what it can from now on, on its GPU. Returns the seconds it took."""
        return 0.0

    def adapters_name(self, name: str) -> str:
        """The name by which adapters know the module of this name."""
        return name

    def converted(self, fit: Fit) -> Fit:
        """The same fit under the checkpoint's names, if these differ from the owners' names. Raises WeightsError."""
        return fit

    @property
    def weights_bytes(self) -> int:
        opaque = sum(owner.opaque_bytes for owner in self.modules() if isinstance(owner, WeightOwner))
        return opaque + sum(p.numel() * p.element_size() for p in self.parameters())
