"""EncoderResults: what an encoder makes of the hidden states of whole texts, by task.

    embed            the stages of sentence-transformers' files, or BGE-M3's first token
    classify         the head's scores of labels
    token_embed      the hidden states; of models of token vectors (ColBERT, BGE-M3) through their product, of length 1
    token_classify   the head's scores of labels, of each token
    embed_sparse     weights of tokens of the vocabulary: SPLADE's, or BGE-M3's

Called by outputs/encoder_vectors.py with a step's rows. Nothing here waits for the device but SPLADE's pooling.
"""

from collections.abc import Callable

import torch

from quire.ipc.pooling import PoolRow
from quire.workers.models.config import ModelConfigError
from quire.workers.models.encoder import Encoder
from quire.workers.pooling.encoder_choice import EncoderChoice
from quire.workers.pooling.late_interaction import M3Heads, colbert_head
from quire.workers.pooling.poolers import LabelPooler, SentencePooler, Spans, SparsePooler, TokenStages
from quire.workers.pooling.pooling import Pooling
from quire.workers.pooling.sentence_transformers import PoolingConfigError, SpladeStage


class EncoderResults:
    """Raises ModelConfigError or WeightsError for files that do not fit."""

    def __init__(self, choice: EncoderChoice, model: Encoder) -> None:
        self.info, size = choice.info, model.config.hidden_size
        device = next(model.parameters()).device
        self._pooling = Pooling(choice.info, lambda states: states, choice.activation)
        self.m3: M3Heads | None = None
        try:
            if choice.info.labels:
                labels = LabelPooler(model.head, choice.activation)
                self._texts, self._tokens = labels.logits, lambda hidden: model.head(hidden).float()
                return
            self._tokens = _token_vectors(choice, size, device)
            if choice.m3:
                self.m3 = M3Heads(choice.folder, size, device, choice.special_ids)
                self._tokens = self.m3.token_vectors
            if splade := [stage for stage in choice.spec.stages if isinstance(stage, SpladeStage)]:
                self._texts = SparsePooler(splade[0], model.compute_all_logits, model.config.vocab_size)
            elif choice.spec.late is None:
                self._texts = SentencePooler(choice.spec, choice.folder, size, device)
        except PoolingConfigError as error:
            raise ModelConfigError(str(error)) from None

    def of_texts(self, hidden: torch.Tensor, spans: Spans, kind: PoolRow) -> torch.Tensor:
        """float32 [R, columns] of rows of hidden states [T, H]."""
        return self._pooling.apply(self._texts(hidden, spans), kind)

    def of_tokens(self, hidden: torch.Tensor, kind: PoolRow) -> torch.Tensor:
        """float32 [T, columns], of each hidden state alone."""
        return self._pooling.apply(self._tokens(hidden), kind)

    def sparse(self, hidden: torch.Tensor, spans: Spans) -> torch.Tensor:
        """float32 [R, V] of SPLADE, or [T] of BGE-M3, of each token."""
        if self.m3 is not None:
            return self.m3.weights(hidden)
        return self._texts(hidden, spans)


def _token_vectors(choice: EncoderChoice, hidden_size: int, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """hidden states [T, H] -> vectors [T, D]: those of ColBERT, or the states as they are."""
    if choice.spec.late is None:
        return lambda hidden: hidden
    if choice.spec.stages:
        return TokenStages(choice.spec.stages, choice.folder, hidden_size, device, "token")
    return colbert_head(choice.folder, hidden_size, device)
