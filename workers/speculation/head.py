"""Head: a small model that drafts from the target's hidden states and from tokens, for Features and DraftModel."""

from contextlib import AbstractContextManager, nullcontext

import torch

from quire.workers.layers.kv_scales import KVScales
from quire.workers.models.language_model import LanguageModel
from quire.workers.models.step_context import StepContext


class Head(LanguageModel):
    """`given`: the features of the tokens before those of the next forward, [T, D]; a forward leaves its rows' own there."""

    given: torch.Tensor
    writes_alone = False  # `write` needs nothing that attention returns

    def write(self, input_ids: torch.Tensor, context: StepContext, logits_indices: torch.Tensor) -> None:
        """A forward behind which nothing is drafted: the cache gets the entries, and `given` is used up."""
        self(input_ids, context, logits_indices)

    def kv_scales(self) -> dict[int, KVScales]:
        return {}

    def short(self) -> AbstractContextManager[None]:
        return nullcontext()
