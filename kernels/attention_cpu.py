"""Paged attention on the CPU: gather each row's keys and values, then torch's scaled_dot_product_attention.

Formula and masks: attention_reference.py, against which this is tested. On the CPU the caller knows lengths on the host, so a
`CpuAttentionPlan` holds a step's gather indices and masks, built once and shared by all layers with the same window and cache
shape. Rows with one query are batched with rows of similar length: the length they are padded to depends on the row's own
length only, so a row's arithmetic does not depend on its neighbours. Other rows run one by one.
Padding repeats the row's own last key, masked: nothing outside a row's visible keys is read. No Triton here.

Bytes: visible keys and values are read once and written once (the gather), then read again by the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

# A chunk behind cached keys needs a mask of [queries, keys], and torch computes the masked part too: slices keep both small.
_QUERY_SLICE = 256
_MASK_ELEMENTS_KEPT = 1 << 22


def _padded_length(num_keys: int) -> int:
    """num_keys up to a step of 1/4 to 1/8 of it: few lengths, at most a quarter wasted; a function of the row alone."""
    step = max(16, 1 << max(0, num_keys.bit_length() - 3))
    return -(-num_keys // step) * step


@dataclass
class _Batch:
    """Rows of one query each, padded to `length` keys."""

    tokens: torch.Tensor | slice  # their places in q
    index: torch.Tensor  # [n * Hkv * length]: lines of D elements in the cache
    mask: torch.Tensor  # [n, 1, 1, length], 0 or -inf
    length: int


@dataclass
class _Row:
    """One row of several queries."""

    begin: int
    end: int
    index: torch.Tensor  # [Hkv * length]
    length: int
    first_key: int
    num_cached: int  # position of its first query
    masks: list[torch.Tensor | None]  # a slice of queries each


class CpuAttentionPlan:
    """Where a step's keys lie and which are visible: index arithmetic on the host, once a step for all layers."""

    def __init__(
        self,
        block_tables: torch.Tensor,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        k_cache: torch.Tensor,
        *,
        dtype: torch.dtype,
        window: int = 0,
    ) -> None:
        """block_tables [R, max_blocks] int, by row; `k_cache` gives shape and strides (V's must be the same), dtype is q's.

        query_lens are laid out in q one after another. A row of seq_len 0 is padding: its queries get zeros.
        """
        _blocks, self.num_kv_heads, self.block_size, self.head_dim = k_cache.shape
        self.strides = k_cache.stride()
        self.window = window
        self.dtype = dtype
        if self.strides[3] != 1 or any(stride % self.head_dim for stride in self.strides[:3]):
            raise ValueError(f"cache strides {self.strides} are not whole lines of {self.head_dim}")
        self._lines = [stride // self.head_dim for stride in self.strides[:3]]
        self._tables = block_tables.numpy()
        self.batches: list[_Batch] = []
        self.rows: list[_Row] = []
        self.padding: list[tuple[int, int]] = []
        self._kept = 0
        buckets: dict[int, list[tuple[int, int, int, int]]] = {}
        begin = 0
        for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
            end = begin + query_len
            if seq_len == 0:
                self.padding.append((begin, end))
            elif query_len > seq_len:
                raise ValueError(f"row {row} has {query_len} queries but {seq_len} keys")
            elif query_len:
                first_key = max(0, seq_len - query_len - window + 1) if window else 0
                if query_len == 1:
                    length = _padded_length(seq_len - first_key)
                    buckets.setdefault(length, []).append((row, begin, first_key, seq_len))
                else:
                    self.rows.append(self._plan_row(row, begin, end, first_key, seq_len))
            begin = end
        self.num_tokens = begin
        for length, members in buckets.items():
            self.batches.append(self._plan_batch(members, length))
        most = max([batch.index.numel() for batch in self.batches] + [row.index.numel() for row in self.rows], default=0)
        self._scratch = [torch.empty(most, self.head_dim, dtype=k_cache.dtype) for _ in range(2)]

    def _line_index(self, rows: np.ndarray, keys: np.ndarray) -> torch.Tensor:
        """Cache lines of keys [n, length] of rows [n], as [n * Hkv * length]."""
        blocks = self._tables[rows[:, None], keys // self.block_size].astype(np.int64)
        lines = blocks * self._lines[0] + keys % self.block_size * self._lines[2]
        heads = np.arange(self.num_kv_heads, dtype=np.int64) * self._lines[1]
        return torch.from_numpy((lines[:, None, :] + heads[None, :, None]).reshape(-1))

    def _plan_batch(self, members: list[tuple[int, int, int, int]], length: int) -> _Batch:
        rows, tokens, first_keys, seq_lens = np.array(members, dtype=np.int64).T
        keys = np.minimum(first_keys[:, None] + np.arange(length), seq_lens[:, None] - 1)
        padded = np.arange(length) >= (seq_lens - first_keys)[:, None]
        mask = torch.from_numpy(np.where(padded, np.float32(-np.inf), np.float32(0))).to(self.dtype)
        first, last = int(tokens[0]), int(tokens[-1])
        together = last - first + 1 == len(tokens)
        return _Batch(
            tokens=slice(first, last + 1) if together else torch.from_numpy(tokens.copy()),
            index=self._line_index(rows, keys),
            mask=mask[:, None, None, :],
            length=length,
        )

    def _plan_row(self, row: int, begin: int, end: int, first_key: int, seq_len: int) -> _Row:
        index = self._line_index(np.array([row]), np.arange(first_key, seq_len)[None])
        plan = _Row(begin, end, index, seq_len - first_key, first_key, seq_len - (end - begin), [])
        if plan.num_cached or (self.window and self.window < seq_len):
            for query in range(0, end - begin, _QUERY_SLICE):
                size = min(_QUERY_SLICE, end - begin - query) * plan.length
                self._kept += size
                plan.masks.append(self.slice_mask(plan, query) if self._kept <= _MASK_ELEMENTS_KEPT else None)
        return plan

    def slice_keys(self, row: _Row, query: int) -> tuple[int, int, int]:
        """(last query + 1, first key, last key + 1) of the slice of queries from `query`; keys count from row.first_key."""
        last = min(query + _QUERY_SLICE, row.end - row.begin)
        first_key = max(0, row.num_cached + query - self.window + 1 - row.first_key) if self.window else 0
        return last, first_key, row.num_cached + last - row.first_key

    def slice_mask(self, row: _Row, query: int) -> torch.Tensor:
        """[queries, keys] of 0 or -inf for that slice."""
        last, first_key, end_key = self.slice_keys(row, query)
        positions = torch.arange(query, last)[:, None] + row.num_cached
        keys = torch.arange(first_key, end_key)[None, :] + row.first_key
        hidden = keys > positions
        if self.window:
            hidden |= keys <= positions - self.window
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))

    def gather(self, cache: torch.Tensor, index: torch.Tensor, which: int) -> torch.Tensor:
        """The cache lines at `index`, [len(index), D] in q's dtype; valid until the next gather of the same `which`."""
        if cache.stride() != self.strides:
            raise ValueError(f"cache strides {cache.stride()} are not the plan's, {self.strides}")
        span = 1 + sum((n - 1) * line for n, line in zip(cache.shape[:3], self._lines, strict=True))
        lines = cache.as_strided((span, self.head_dim), (self.head_dim, 1))
        gathered = self._scratch[which][: index.numel()]
        if cache.element_size() == 1:
            torch.index_select(lines.view(torch.uint8), 0, index, out=gathered.view(torch.uint8))
        else:
            torch.index_select(lines, 0, index, out=gathered)
        return gathered.to(self.dtype)


def attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    plan: CpuAttentionPlan,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Causal attention of all rows of the plan: q, out [T, Hq, D], row-strided or not; caches as the plan was told."""
    if k_scale is not None:
        scale = scale * float(k_scale)
    for begin, end in plan.padding:
        out[begin:end] = 0
    for batch in plan.batches:
        _attend_batch(q, k_cache, v_cache, out, plan, batch, scale)
    for row in plan.rows:
        _attend_row(q, k_cache, v_cache, out, plan, row, scale)
    if v_scale is not None:
        out[: plan.num_tokens] *= v_scale.to(out.dtype)


def _attend_batch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    plan: CpuAttentionPlan,
    batch: _Batch,
    scale: float,
) -> None:
    """The heads of a group are SDPA's queries: they share keys and mask, so nothing is expanded."""
    shape = (-1, plan.num_kv_heads, batch.length, plan.head_dim)
    k = plan.gather(k_cache, batch.index, 0).view(shape)
    v = plan.gather(v_cache, batch.index, 1).view(shape)
    grouped = q[batch.tokens].unflatten(1, (plan.num_kv_heads, -1))
    attended = scaled_dot_product_attention(grouped, k, v, attn_mask=batch.mask, scale=scale)
    out[batch.tokens] = attended.flatten(1, 2)


def _attend_row(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    plan: CpuAttentionPlan,
    row: _Row,
    scale: float,
) -> None:
    shape = (1, plan.num_kv_heads, row.length, plan.head_dim)
    k = plan.gather(k_cache, row.index, 0).view(shape)
    v = plan.gather(v_cache, row.index, 1).view(shape)
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
