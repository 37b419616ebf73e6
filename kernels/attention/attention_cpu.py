"""Paged attention on the CPU: gather each row's keys and values, then torch's products.

Formula and masks: attention_reference.py, against which this is tested. On the CPU the caller knows lengths on the host, so a
`CpuAttentionPlan` holds a step's gather indices and masks, built once and shared by all layers with the same window and cache
shape. Rows with one query are batched with rows of similar length: the length they are padded to depends on the row's own
length only, so a row's arithmetic does not depend on other rows. Other rows run one by one.
Padding repeats the row's own last key, masked: nothing outside a row's visible keys is read. No Triton here.

Bytes: visible keys and values are read once and written once (the gather), then read again by the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.attention.kv_entries_cpu import as_entries, as_numpy, entry_strides
from quire.kernels.attention.score_shape import PLAIN_SCORES, ScoreShape

# A prefill chunk with cached keys needs a mask of [queries, keys], and torch computes the masked part: slices keep both small.
_QUERY_SLICE = 256
_MASK_ELEMENTS_KEPT = 1 << 22
_BATCH_ELEMENTS = 1 << 21  # keys gathered at once; more rows take several batches


def _padded_length(num_keys: int) -> int:
    """Round num_keys up to a step of 1/4 to 1/8 of it: few lengths, at most a quarter wasted; depends on the row alone."""
    step = max(16, 1 << max(0, num_keys.bit_length() - 3))
    return -(-num_keys // step) * step


class Scratch:
    """Memory for gathered keys and values, kept from step to step: fresh pages would cost more than the gather."""

    def __init__(self) -> None:
        self._sides: dict[torch.dtype, list[torch.Tensor]] = {}

    def sides(self, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Two vectors of at least num_elements; they may share memory with those of an earlier call."""
        found = self._sides.get(dtype)
        if found is None or found[0].numel() < num_elements:
            found = self._sides[dtype] = [torch.empty(num_elements, dtype=dtype) for _ in range(2)]
        return found


@dataclass
class _Gathered:
    """The memory that a batch or row gathers into: all views of the plan's scratch, made once a step."""

    index: np.ndarray  # [entries] of the cache
    k_entries: np.ndarray  # [entries, D]
    v_entries: np.ndarray
    k: torch.Tensor  # [n, Hkv, length, D]
    v: torch.Tensor

    def load(self, k_entries: np.ndarray, v_entries: np.ndarray, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        # mode "clip": the default would check the indices in a separate pass, into a buffer
        k_entries.take(self.index, 0, self.k_entries, "clip")
        v_entries.take(self.index, 0, self.v_entries, "clip")
        return (self.k, self.v) if self.k.dtype == dtype else (self.k.to(dtype), self.v.to(dtype))


@dataclass
class _Batch:
    """Rows of one query each, padded to the same number of keys."""

    tokens: torch.Tensor | slice  # their positions in q
    mask: torch.Tensor  # [n, Hkv, 1, length], 0 or -inf
    first_keys: torch.Tensor  # [n]
    kv: _Gathered
    factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # in float32: see _multiply


@dataclass
class _Row:
    """One row of several queries."""

    begin: int
    end: int
    first_key: int
    num_cached: int  # position of its first query
    masks: list[torch.Tensor | None]  # one for each slice of queries
    kv: _Gathered
    last_visible: np.ndarray | None  # [end - begin], of its queries; None: each sees keys up to its own


class CpuAttentionPlan:
    """Where a step's keys lie and which are visible: index arithmetic on the host, once a step for all layers."""

    def __init__(
        self,
        block_tables: np.ndarray | torch.Tensor,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        k_cache: torch.Tensor,
        *,
        dtype: torch.dtype,
        window: int = 0,
        is_chunked: bool = False,
        scratch: Scratch | None = None,
        last_visible: np.ndarray | None = None,
    ) -> None:
        """block_tables [R, max_blocks] int, by row; `k_cache` gives shape and strides (V's must be the same), dtype is q's.

        q holds the rows' queries one after another, query_lens of each. A row of seq_len 0 is padding: its queries get zeros. A
        query sees its last `window` keys, or with is_chunked those of its chunk of `window` keys; window 0: all keys before it;
        below 0: all but the first. last_visible [T]: the last position that each query sees, if that is behind its own, of rows
        with several queries.
        """
        _blocks, self.num_kv_heads, self.block_size, self.head_dim = k_cache.shape
        self.entry_strides = entry_strides(k_cache)
        self.strides = k_cache.stride()
        self.cache_dtype = k_cache.dtype
        self.window, self.is_chunked = window, is_chunked
        self.dtype, self._last_visible = dtype, last_visible
        self._tables = np.asarray(block_tables)
        self.padding: list[tuple[int, int]] = []
        self._kept = 0
        several: list[tuple[int, int, int, int, int]] = []
        buckets: dict[int, list[tuple[int, int, int, int]]] = {}
        begin = 0
        for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
            end = begin + query_len
            if seq_len == 0:
                self.padding.append((begin, end))
            elif query_len > seq_len:
                raise ValueError(f"row {row} has {query_len} queries but {seq_len} keys")
            elif query_len:
                first_key = self._first_key(seq_len - query_len)
                if query_len == 1:
                    length = min(_padded_length(seq_len - first_key), self._tables.shape[1] * self.block_size)
                    buckets.setdefault(length, []).append((row, begin, first_key, seq_len))
                else:
                    several.append((row, begin, end, first_key, seq_len))
            begin = end
        self.num_tokens = begin
        batches = [(length, part) for length, members in buckets.items() for part in self._parts(members, length)]
        sizes = [length * len(part) for length, part in batches] + [row[4] - row[3] for row in several]
        most = max(sizes, default=0)
        scratch = scratch or Scratch()
        self._sides = scratch.sides(most * self.num_kv_heads * self.head_dim, k_cache.dtype)
        self.batches = [self._plan_batch(part, length) for length, part in batches]
        self.rows = [self._plan_row(*row) for row in several]
        self.is_one_batch = not self.rows and not self.padding and len(self.batches) == 1

    def _first_key(self, position: int) -> int:
        """The first key that a query at `position` sees."""
        if self.window <= 0:
            return min(position, -self.window)
        return position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)

    def _parts(self, members: list[tuple[int, int, int, int]], length: int) -> list[list[tuple[int, int, int, int]]]:
        n = max(1, _BATCH_ELEMENTS // (self.num_kv_heads * length * self.head_dim))
        return [members[i : i + n] for i in range(0, len(members), n)]

    def _entry_index(self, rows: np.ndarray, first_keys: np.ndarray, length: int) -> np.ndarray:
        """Cache entries [n, Hkv, length] of the keys from first_keys [n] on of rows [n]; undefined beyond a row's end."""
        heads = np.arange(self.num_kv_heads) * self.entry_strides.head
        if first_keys.any():
            keys = np.minimum(first_keys[:, None] + np.arange(length), self._tables.shape[1] * self.block_size - 1)
            blocks = self._tables[rows[:, None], keys // self.block_size].astype(np.int64)
            return (blocks * self.entry_strides.block + keys % self.block_size * self.entry_strides.slot)[:, None] + heads[
                :, None
            ]
        blocks = self._tables[rows, : -(-length // self.block_size)].astype(np.int64) * self.entry_strides.block
        slots = heads[:, None, None] + np.arange(self.block_size) * self.entry_strides.slot
        return (blocks[:, None, :, None] + slots).reshape(len(rows), self.num_kv_heads, -1)[:, :, :length]

    def _gathered(self, index: np.ndarray) -> _Gathered:
        """Views of the scratch for cache entries `index` [n, Hkv, length]."""
        shape = (*index.shape, self.head_dim)
        k, v = (side[: index.size * self.head_dim].view(shape) for side in self._sides)
        k_entries, v_entries = (as_numpy(x.view(-1, self.head_dim)) for x in (k, v))
        return _Gathered(index.reshape(-1), k_entries, v_entries, k, v)

    def _plan_batch(self, members: list[tuple[int, int, int, int]], length: int) -> _Batch:
        rows, tokens, first_keys, seq_lens = np.array(members).T
        num_keys = seq_lens - first_keys
        index = self._entry_index(rows, first_keys, length)
        mask = np.zeros((len(rows), self.num_kv_heads, length), np.float32)
        padded = (np.arange(length) >= num_keys[:, None])[:, None]
        np.copyto(index, index[np.arange(len(rows)), :, num_keys - 1][:, :, None], where=padded)
        np.copyto(mask, np.float32(-np.inf), where=padded)
        first, last = int(tokens[0]), int(tokens[-1])
        together = last - first + 1 == len(tokens)
        where = slice(first, last + 1) if together else torch.from_numpy(tokens.copy())
        kv, shown = self._gathered(index), torch.from_numpy(mask)
        factors = None
        if self.dtype == self.cache_dtype == torch.float32:
            factors = (shown.view(-1, 1, length), kv.k.flatten(0, 1).transpose(1, 2), kv.v.flatten(0, 1))
        return _Batch(where, shown.unsqueeze_(2).to(self.dtype), torch.from_numpy(first_keys.copy()), kv, factors)

    def _plan_row(self, row: int, begin: int, end: int, first_key: int, seq_len: int) -> _Row:
        kv = self._gathered(self._entry_index(np.array([row]), np.array([first_key]), seq_len - first_key))
        plan = _Row(begin, end, first_key, seq_len - (end - begin), [], kv, self._sees_ahead(begin, end, seq_len))
        if plan.num_cached or (self.window and self.window < seq_len) or plan.last_visible is not None:
            for query in range(0, end - begin, _QUERY_SLICE):
                size = min(_QUERY_SLICE, end - begin - query) * (seq_len - first_key)
                self._kept += size
                plan.masks.append(self.slice_mask(plan, query) if self._kept <= _MASK_ELEMENTS_KEPT else None)
        return plan

    def _sees_ahead(self, begin: int, end: int, seq_len: int) -> np.ndarray | None:
        """The last keys that a row's queries see, [queries]; None: their own."""
        if self._last_visible is None:
            return None
        positions = np.arange(seq_len - (end - begin), seq_len)
        last = self._last_visible[begin:end].clip(positions, seq_len - 1)
        return last if (last > positions).any() else None

    def slice_keys(self, row: _Row, query: int) -> tuple[int, int, int]:
        """(last query + 1, first key, last key + 1) of the slice of queries from `query`; keys count from row.first_key."""
        last = min(query + _QUERY_SLICE, row.end - row.begin)
        first_key = self._first_key(row.num_cached + query) - row.first_key
        end_key = row.num_cached + last
        if row.last_visible is not None:
            end_key = int(row.last_visible[query:last].max()) + 1
        return last, first_key, end_key - row.first_key

    def slice_mask(self, row: _Row, query: int) -> torch.Tensor:
        """[queries, keys] of 0 or -inf for that slice."""
        last, first_key, end_key = self.slice_keys(row, query)
        positions = torch.arange(query, last)[:, None] + row.num_cached
        keys = torch.arange(first_key, end_key)[None, :] + row.first_key
        own = row.last_visible
        hidden = keys > (positions if own is None else torch.from_numpy(own[query:last])[:, None])
        if self.window < 0:
            hidden |= keys < positions.clamp(max=1)
        elif self.window and self.is_chunked:
            hidden |= keys < positions // self.window * self.window
        elif self.window:
            hidden |= keys <= positions - self.window
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))


def attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    plan: CpuAttentionPlan,
    *,
    scale: float,
    shape: ScoreShape = PLAIN_SCORES,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Causal attention of all rows of the plan: q, out [T, Hq, D], row-strided or not; caches strided as the plan's k_cache."""
    for cache in (k_cache, v_cache):
        if cache.stride() != plan.strides:
            raise ValueError(f"cache strides {cache.stride()} are not the plan's, {plan.strides}")
    if k_scale is not None:
        scale = scale * float(k_scale)
    out[: plan.num_tokens] = attend_entries(q, as_entries(k_cache), as_entries(v_cache), plan, scale, shape)
    if v_scale is not None:
        out[: plan.num_tokens] *= v_scale.to(out.dtype)


def attend_entries(
    q: torch.Tensor,
    k_entries: np.ndarray,
    v_entries: np.ndarray,
    plan: CpuAttentionPlan,
    scale: float,
    shape: ScoreShape = PLAIN_SCORES,
) -> torch.Tensor:
    """[T, Hq, D]: attention_cpu for caches given as entries (kv_entries_cpu.as_entries), made once for many layers."""
    if not shape.is_plain:
        return _attend_shaped(q, k_entries, v_entries, plan, scale, shape)
    if plan.is_one_batch:
        return _attend_batch(q, k_entries, v_entries, plan, plan.batches[0], scale)
    out = torch.empty(plan.num_tokens, *q.shape[1:], dtype=q.dtype)
    for begin, end in plan.padding:
        out[begin:end] = 0
    for batch in plan.batches:
        out[batch.tokens] = _attend_batch(q[batch.tokens], k_entries, v_entries, plan, batch, scale)
    for row in plan.rows:
        _attend_row(q, *row.kv.load(k_entries, v_entries, plan.dtype), out, plan, row, scale)
    return out


def _attend_batch(
    q: torch.Tensor, k_entries: np.ndarray, v_entries: np.ndarray, plan: CpuAttentionPlan, batch: _Batch, scale: float
) -> torch.Tensor:
    """q [n, Hq, D] -> the same. The heads of a group are queries of one product: they share keys and mask."""
    k, v = batch.kv.load(k_entries, v_entries, plan.dtype)
    if batch.factors is not None:
        return _multiply(q, *batch.factors, scale)
    grouped = q.unflatten(1, (plan.num_kv_heads, -1))
    return scaled_dot_product_attention(grouped, k, v, attn_mask=batch.mask, scale=scale).flatten(1, 2)


def _multiply(q: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention in float32 by plain products: 5 to 10% quicker than SDPA, and the result needs no transpose.

    q [n, Hq, D]; mask [n * Hkv, 1, length], keys [n * Hkv, D, length], values [n * Hkv, length, D].
    """
    scores = torch.baddbmm(mask, q.reshape(mask.shape[0], -1, q.shape[2]), keys, alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), values).view(q.shape)


def _attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, plan: CpuAttentionPlan, row: _Row, scale: float
) -> None:
    queries = q[row.begin : row.end].transpose(0, 1)[None]
    target = out[row.begin : row.end].transpose(0, 1)[None]
    if not row.masks:
        target.copy_(scaled_dot_product_attention(queries, k, v, is_causal=True, enable_gqa=True, scale=scale))
    for number, mask in enumerate(row.masks):
        query = number * _QUERY_SLICE
        last, first_key, end_key = plan.slice_keys(row, query)
        target[:, :, query:last] = scaled_dot_product_attention(
            queries[:, :, query:last],
            k[:, :, first_key:end_key],
            v[:, :, first_key:end_key],
            attn_mask=plan.slice_mask(row, query) if mask is None else mask,
            enable_gqa=True,
            scale=scale,
        )


def _attend_shaped(
    q: torch.Tensor, k_entries: np.ndarray, v_entries: np.ndarray, plan: CpuAttentionPlan, scale: float, shape: ScoreShape
) -> torch.Tensor:
    """attend_entries with softcap, ALiBi or sinks, which SDPA does not support."""
    out = torch.empty(plan.num_tokens, *q.shape[1:], dtype=q.dtype)
    for begin, end in plan.padding:
        out[begin:end] = 0
    for batch in plan.batches:
        k, v = batch.kv.load(k_entries, v_entries, plan.dtype)
        keys = batch.first_keys[:, None] + torch.arange(k.shape[2])
        last = batch.first_keys + (batch.mask[:, 0, 0] == 0).sum(-1) - 1
        out[batch.tokens] = _shaped(q[batch.tokens][:, None], k, v, batch.mask, keys, last[:, None], scale, shape)[:, 0]
    for row in plan.rows:
        k, v = row.kv.load(k_entries, v_entries, plan.dtype)
        for query in range(0, row.end - row.begin, _QUERY_SLICE):
            last_query, first, end_key = plan.slice_keys(row, query)
            mask = plan.slice_mask(row, query)[None, None]
            keys, own = torch.arange(first, end_key) + row.first_key, torch.arange(query, last_query) + row.num_cached
            part = slice(row.begin + query, row.begin + last_query)
            some = k[:, :, first:end_key], v[:, :, first:end_key], mask, keys[None], own[None]
            out[part] = _shaped(q[part][None], *some, scale, shape)[0]
    return out


def _shaped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor, own: torch.Tensor,
    scale: float, shape: ScoreShape,
) -> torch.Tensor:  # fmt: skip
    """q [n, Q, Hq, D] -> the same; k, v [n, Hkv, L, D]; mask [n, 1 or Hkv, 1 or Q, L]; positions keys [n, L], own [n, Q]."""
    n, queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.transpose(1, 2).reshape(n, num_kv_heads, -1, head_dim)  # the heads of a group are queries of one product
    scores = torch.matmul(grouped, k.transpose(2, 3)).float().view(n, num_heads, queries, -1).mul_(scale)
    if shape.softcap:
        scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    if shape.slopes is not None:
        scores += shape.alibi(keys, own)
    scores += mask.repeat_interleave(num_heads // num_kv_heads, 1) if mask.shape[1] > 1 else mask
    if shape.sinks is not None:
        sinks = shape.sinks.float()[:, None, None].expand(n, -1, queries, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[1]].to(v.dtype)
    return torch.matmul(weights.reshape(n, num_kv_heads, -1, keys.shape[1]), v).view(n, num_heads, queries, -1).transpose(1, 2)
