"""EncoderVectors: vectors and scores of an encoder's rows, which are whole texts; of some tasks a result for each token.

A text's vector is made by the stages of sentence-transformers' files (pooling/poolers.py), a score by the encoder's head.
"""

import numpy as np
import torch

from quire.ipc.pooling import PoolRow
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import PREFILL_POOL
from quire.workers.models.config import ModelConfigError
from quire.workers.models.encoder import Encoder
from quire.workers.outputs.output import Computed, Output, RowResult
from quire.workers.outputs.vectors import PooledResult
from quire.workers.pooling.encoder_choice import EncoderChoice
from quire.workers.pooling.poolers import LabelPooler, SentencePooler, Spans, SparsePooler
from quire.workers.pooling.pooling import Pooling
from quire.workers.pooling.sentence_transformers import PoolingConfigError, SpladeStage


class EncoderVectors(Output):
    """Raises ModelConfigError or WeightsError for files that do not fit."""

    def __init__(self, choice: EncoderChoice, model: Encoder) -> None:
        self._model, size = model, model.config.hidden_size
        self._device = next(model.parameters()).device
        self._pooling = Pooling(choice.info, lambda states: states, choice.activation)
        self._has_labels = model.config.encoder is not None and bool(choice.info.labels)
        splade = [stage for stage in choice.spec.stages if isinstance(stage, SpladeStage)]
        try:
            self._pooler: SentencePooler | SparsePooler | LabelPooler
            if self._has_labels:
                self._pooler = LabelPooler(model.head, choice.activation)
            elif splade:
                self._pooler = SparsePooler(splade[0], model.compute_all_logits, model.config.vocab_size)
            else:
                self._pooler = SentencePooler(choice.spec, choice.folder, size, self._device)
        except PoolingConfigError as error:
            raise ModelConfigError(str(error)) from None

    def is_wanted(self, plan: StepPlan) -> bool:
        return plan.wants_vectors

    def needs_every_token(self, plan: StepPlan) -> bool:
        return True

    def begin(self, plan: StepPlan) -> None:
        """Tell the model which tokens are of a pair's second text: a row's `next_token` is where it begins."""
        if not self._pooling.info.takes_types:
            return
        prefill = plan.prefill_rows
        lengths, seconds = prefill["length"], prefill["next_token"]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        begins = np.repeat(np.where(seconds > 0, seconds, np.iinfo(np.int32).max), lengths)
        self._model.token_types = torch.from_numpy((within >= begins).astype(np.int32)).to(self._device)

    def compute(self, step: Computed) -> list[RowResult]:
        plan, prefill = step.plan, step.plan.prefill_rows
        pooled = np.flatnonzero(prefill["flags"] & PREFILL_POOL)
        by_kind: dict[PoolRow, list[int]] = {}
        for row, word in zip(pooled.tolist(), prefill["num_prompt_logprobs"][pooled].tolist(), strict=True):
            by_kind.setdefault(PoolRow.of_word(word), []).append(row + len(plan.decode_rows))
        return [self._of_rows(step, rows, kind) for kind, rows in by_kind.items()]

    def _of_rows(self, step: Computed, rows: list[int], kind: PoolRow) -> PooledResult:
        index = torch.tensor(rows, device=self._device)
        starts = step.buffers.query_start
        spans = Spans(starts.index_select(0, index), starts.index_select(0, index + 1))
        if not kind.is_of_tokens:
            return PooledResult(rows, [0] * len(rows), self._pooling.apply(self._of_texts(step.hidden, spans), kind).cpu())
        own = [step.hidden[first:end] for first, end in spans.lists()]
        states = torch.cat(own)
        if self._has_labels:
            states = self._model.head(states).float()
        return PooledResult(rows, [len(tokens) for tokens in own], self._pooling.apply(states, kind).cpu())

    def _of_texts(self, hidden: torch.Tensor, spans: Spans) -> torch.Tensor:
        """float32 [n, columns], before activation or norm."""
        if isinstance(self._pooler, LabelPooler):
            return self._pooler.logits(hidden, spans)
        return self._pooler(hidden, spans)
