"""Vectors: the vectors and scores of rows that are pooled; of tasks with a result for each token, of all tokens of a chunk.

A prompt may come in chunks: what its pooling needs of earlier ones is kept by slot, on the device (pooling/chunks.py).
The model's `Pooling` makes normalized vectors or scores of the pooled states (pooling/pooling.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.ipc.messages.workers import PooledRows
from quire.ipc.pooling import VECTOR, PoolingType, PoolRow
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import PREFILL_POOL, PREFILL_POOL_END
from quire.workers.models.config import ModelConfigError
from quire.workers.models.language_model import LanguageModel
from quire.workers.outputs.output import Computed, Output, RowResult
from quire.workers.pooling.choice import PoolingChoice
from quire.workers.pooling.chunks import ChunkPoolers, Chunks
from quire.workers.pooling.poolers import TokenStages
from quire.workers.pooling.pooling import Pooling
from quire.workers.pooling.sentence_transformers import PoolingConfigError


class OnHost(NamedTuple):
    """A tensor on its way to the host."""

    values: torch.Tensor
    copied: torch.cuda.Event | None = None  # of a GPU: once it is reached, the values are there

    @classmethod
    def of(cls, values: torch.Tensor) -> "OnHost":
        """values: on the device; from a GPU they are copied without waiting for it."""
        if not values.is_cuda:
            return cls(values)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return cls(host, torch.cuda.current_stream().record_event())

    def numpy(self) -> np.ndarray:
        """Wait for the values."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.values.contiguous().numpy()


class PooledResult(NamedTuple):
    """Results of several rows of a step. values: float32, [rows, columns], or [tokens, columns] of all rows.

    lengths: rows of each one's result, or VECTOR."""

    rows: list[int]
    lengths: list[int]
    values: OnHost

    @classmethod
    def of(cls, rows: list[int], lengths: list[int], values: torch.Tensor) -> "PooledResult":
        return cls(rows, lengths, OnHost.of(values))

    def arrays(self) -> list[np.ndarray]:
        """Each row's."""
        return np.split(self.values.numpy(), np.cumsum([1 if length == VECTOR else length for length in self.lengths])[:-1])

    def message(self) -> PooledRows:
        values = self.values.numpy()
        return _message(self.rows, [(length, values.shape[1]) for length in self.lengths], values)


def pooled_rows(rows: list[int], arrays: list[np.ndarray]) -> PooledRows:
    """The message of an array for each row: float32 [columns] or [n, columns]."""
    shapes = [(VECTOR, len(array)) if array.ndim == 1 else array.shape for array in arrays]
    return _message(rows, shapes, np.concatenate([array.ravel() for array in arrays]))


def _message(rows: list[int], shapes: list[tuple[int, ...]], values: np.ndarray) -> PooledRows:
    data = np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
    return PooledRows(np.asarray(rows, np.int32).tobytes(), np.array(shapes, np.int32).tobytes(), data)


class Vectors(Output):
    def __init__(
        self, pooling: Pooling, types: Sequence[PoolingType], max_rows: int, hidden_size: int, device: torch.device
    ) -> None:
        self._pooling, self._device = pooling, device
        self._pooler = ChunkPoolers(types, max_rows + 1, hidden_size, device)

    def is_wanted(self, plan: StepPlan) -> bool:
        return plan.wants_vectors

    def needs_every_token(self, plan: StepPlan) -> bool:
        prefill = plan.prefill_rows
        words = prefill["num_prompt_logprobs"][prefill["flags"] & PREFILL_POOL != 0]
        return self._pooler.needs_every_token or any(PoolRow.of_word(w).is_of_tokens for w in np.unique(words).tolist())

    def compute(self, step: Computed) -> list[RowResult]:
        plan, prefill = step.plan, step.plan.prefill_rows
        pooled = np.flatnonzero(prefill["flags"] & PREFILL_POOL)
        by_kind: dict[PoolRow, list[int]] = {}
        for i, word in zip(pooled.tolist(), prefill["num_prompt_logprobs"][pooled].tolist(), strict=True):
            by_kind.setdefault(PoolRow.of_word(word), []).append(i)
        results: list[RowResult] = []
        for kind, at in by_kind.items():
            rows = np.asarray(at, np.int32) + len(plan.decode_rows)
            chunks = Chunks.of_rows(prefill[at], rows, self._pooling.info.skips_prompts)
            if kind.is_of_tokens:
                results.append(self._of_tokens(step, chunks, kind))
            elif (result := self._of_texts(step, chunks, kind)) is not None:
                results.append(result)
        return results

    def _of_tokens(self, step: Computed, chunks: Chunks, kind: PoolRow) -> PooledResult:
        states = step.hidden.index_select(0, chunks.tokens(step.buffers.query_start))
        return PooledResult.of(chunks.rows.tolist(), chunks.lengths.tolist(), self._pooling.apply(states, kind))

    def _of_texts(self, step: Computed, chunks: Chunks, kind: PoolRow) -> PooledResult | None:
        """Results of the rows that end with this step."""
        about = {"has_every_token": step.has_every_token, "has_windows": step.plan.window > 1}
        states = self._pooler.take(step.hidden, chunks, step.buffers, **about)
        ends = np.flatnonzero(chunks.flags & PREFILL_POOL_END)
        if not len(ends):
            return None
        if len(ends) < len(chunks.rows):
            states = states.index_select(0, torch.from_numpy(ends).to(self._device))
        return PooledResult.of(chunks.rows[ends].tolist(), [VECTOR] * len(ends), self._pooling.apply(states, kind))


def vectors_of(choice: PoolingChoice, model: LanguageModel, max_rows: int) -> list[Vectors]:
    """The runner's output for a decoder that pools; none for one that does not.

    Raises ModelConfigError or WeightsError for dense layers that do not fit."""
    if choice.info is None:
        return []
    size, device = model.config.hidden_size, next(model.parameters()).device
    try:
        types = choice.poolings or (choice.info.pooling_type,)
        dense = TokenStages(choice.dense, choice.folder, len(types) * size, device, "text") if choice.dense else None
    except PoolingConfigError as error:
        raise ModelConfigError(str(error)) from None
    pooling = Pooling(choice.info, model.compute_scores, choice.activation, dense)
    return [Vectors(pooling, types, max_rows, size, device)]
