"""EncoderVectors: vectors and scores of an encoder's rows, which are whole texts; of some tasks a result for each token.

pooling/encoder_results.py computes with the hidden states. A row may be asked for several results at once.
"""

from typing import NamedTuple

import numpy as np
import torch

from quire.ipc.messages.workers import PooledRows
from quire.ipc.pooling import VECTOR, PoolRow
from quire.ipc.step.late_queries import LateQuery, decode_queries
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.sections import PREFILL_POOL
from quire.workers.models.encoder import Encoder
from quire.workers.outputs.output import Computed, Output, RowResult
from quire.workers.outputs.vectors import OnHost, PooledResult, pooled_rows
from quire.workers.pooling.encoder_choice import EncoderChoice
from quire.workers.pooling.encoder_results import EncoderResults
from quire.workers.pooling.late_interaction import greatest_weights
from quire.workers.pooling.maxsim import maxsim
from quire.workers.pooling.poolers import Spans

NO_SPLIT = np.iinfo(np.int32).max


class EncoderVectors(Output):
    """Raises ModelConfigError or WeightsError for files that do not fit."""

    def __init__(self, choice: EncoderChoice, model: Encoder) -> None:
        self._model, self._results = model, EncoderResults(choice, model)
        self._device = next(model.parameters()).device
        late = self._results.info.late
        self._skipped = torch.tensor(late.skipped, device=self._device) if late is not None and late.skipped else None

    def is_wanted(self, plan: StepPlan) -> bool:
        return plan.wants_vectors

    def needs_every_token(self, plan: StepPlan) -> bool:
        return True

    def begin(self, plan: StepPlan) -> None:
        """Tell the model which tokens differ: a row's `next_token` is where a pair's second text begins (its tokens have
        another type), or where the tokens begin that fill a query of token vectors, which others do not see."""
        info, prefill = self._results.info, plan.prefill_rows
        if not info.takes_types and info.late is None:
            return
        lengths, seconds = prefill["length"], prefill["next_token"]
        splits, starts = np.where(seconds > 0, seconds, NO_SPLIT), np.cumsum(lengths) - lengths
        if info.late is not None:
            if (seconds > 0).any():
                self._model.see(starts + np.minimum(splits, lengths), lengths)
            return
        within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
        types = within >= np.repeat(splits, lengths)
        self._model.token_types = torch.from_numpy(types.astype(np.int32)).to(self._device)

    def compute(self, step: Computed) -> list[RowResult]:
        prefill, num_decode = step.plan.prefill_rows, len(step.plan.decode_rows)
        pooled = np.flatnonzero(prefill["flags"] & PREFILL_POOL)
        by_kind: dict[PoolRow, list[int]] = {}
        for row, word in zip(pooled.tolist(), prefill["num_prompt_logprobs"][pooled].tolist(), strict=True):
            by_kind.setdefault(PoolRow.of_word(word), []).append(row)
        lengths, seconds = prefill["length"].copy(), prefill["next_token"].copy()  # the plan's place in the ring is given back
        ends = np.cumsum(lengths) + num_decode
        results: list[RowResult] = []
        for query in decode_queries(step.plan.section("late_queries")):
            own = query.rows
            results.append(self._of_query(step, own + num_decode, (ends - lengths)[own], ends[own], query, prefill))
        for kind, at in by_kind.items():
            if kind.is_scored:
                continue
            rows = np.array(at, np.int64)
            spans = (ends - lengths)[at], ends[at], seconds[at]
            found = [self._of_rows(step, rows + num_decode, *spans, each) for each in kind.parts]
            results.append(found[0] if len(found) == 1 else Together(found[0].rows, found))
        return results

    def _of_rows(
        self, step: Computed, rows: np.ndarray, firsts: np.ndarray, ends: np.ndarray, seconds: np.ndarray, kind: PoolRow
    ) -> "HostRows":
        """The results of one task. firsts, ends: tokens of the step. seconds: `next_token` of the rows."""
        listed, results = rows.tolist(), self._results
        bounds = torch.from_numpy(np.stack([firsts, ends, np.maximum(seconds, 0)]).astype(np.int32)).to(self._device)
        spans = Spans(bounds[0], bounds[1], bounds[2] if results.info.skips_prompts else None)
        if kind.task == "embed_sparse":
            if results.m3 is None:
                return SparseRows(listed, OnHost.of(results.sparse(step.hidden, spans)))
            tokens = self._tokens(firsts, ends)
            ids = OnHost.of(step.buffers.input_ids.index_select(0, tokens))
            weights = OnHost.of(results.sparse(step.hidden.index_select(0, tokens), spans))
            return WeighedTokens(listed, (ends - firsts).tolist(), ids, weights, results.m3.unused)
        if not kind.is_of_tokens:
            return PooledResult.of(listed, [VECTOR] * len(listed), results.of_texts(step.hidden, spans, kind))
        firsts = firsts + 1 if results.m3 is not None else firsts  # BGE-M3's first token stands for the text
        states = step.hidden.index_select(0, self._tokens(firsts, ends))
        return PooledResult.of(listed, (ends - firsts).tolist(), results.of_tokens(states, kind))

    def _of_query(
        self, step: Computed, rows: np.ndarray, firsts: np.ndarray, ends: np.ndarray, query: LateQuery, prefill: np.ndarray
    ) -> PooledResult:
        """The scores of documents that are compared with a query. firsts, ends: tokens of the step."""
        kind = PoolRow.of_word(int(prefill["num_prompt_logprobs"][query.rows[0]]))
        tokens = self._tokens(firsts, ends)
        vectors = self._results.of_tokens(step.hidden.index_select(0, tokens), kind)
        of_query = torch.from_numpy(query.vectors.reshape(-1, vectors.shape[1])).to(self._device)
        kept = None
        if self._skipped is not None:
            kept = ~torch.isin(step.buffers.input_ids.index_select(0, tokens), self._skipped)
        scores = maxsim(vectors, ends - firsts, kept, of_query)
        return PooledResult.of(rows.tolist(), [VECTOR] * len(rows), scores)

    def _tokens(self, firsts: np.ndarray, ends: np.ndarray) -> torch.Tensor:
        """int64: all tokens of these spans."""
        lengths = ends - firsts
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return torch.from_numpy((within + np.repeat(firsts, lengths)).astype(np.int64)).to(self._device)


class SparseRows(NamedTuple):
    """SPLADE's vectors of the whole vocabulary, float32 [rows, V]: a message has the weights that are not 0."""

    rows: list[int]
    vectors: OnHost

    def arrays(self) -> list[np.ndarray]:
        found = []
        for vector in self.vectors.numpy():
            (ids,) = vector.nonzero()
            found.append(np.stack([ids.astype(np.float32), vector[ids]], 1))
        return found

    def message(self) -> PooledRows:
        return pooled_rows(self.rows, self.arrays())


class WeighedTokens(NamedTuple):
    """BGE-M3's weights of all tokens of the rows, in order: a message has each token of a row once. lengths: tokens of rows."""

    rows: list[int]
    lengths: list[int]
    ids: OnHost
    weights: OnHost
    unused: frozenset[int]

    def arrays(self) -> list[np.ndarray]:
        at = np.cumsum(self.lengths)[:-1]
        both = zip(np.split(self.ids.numpy(), at), np.split(self.weights.numpy(), at), strict=True)
        return [greatest_weights(ids, weights, self.unused) for ids, weights in both]

    def message(self) -> PooledRows:
        return pooled_rows(self.rows, self.arrays())


HostRows = PooledResult | SparseRows | WeighedTokens


class Together(NamedTuple):
    """Results of several tasks of the same rows: of each row the numbers of all, one after the other."""

    rows: list[int]
    parts: list[HostRows]

    def message(self) -> PooledRows:
        by_row = zip(*(part.arrays() for part in self.parts), strict=True)
        return pooled_rows(self.rows, [np.concatenate([each.ravel() for each in own]) for own in by_row])
