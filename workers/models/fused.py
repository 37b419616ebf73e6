"""How checkpoints store q, k and v, and gate and up: separately, one after another in one tensor, or interleaved by head.

Each function returns a rank's rows of the checkpoint's layers, in the order q|k|v (or gate|up) in which blocks.py computes.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from quire.workers.shard import RowRanges, RowShard, Shard

RowsByName = Mapping[str, RowShard]


class HeadRows(NamedTuple):
    """The query and KV heads of this rank."""

    heads: Shard
    kv_heads: Shard
    head_dim: int

    def rows(self, heads: Shard, first: int = 0) -> tuple[int, int]:
        """The rows [start, stop) of these heads, if head 0 begins at row `first`."""
        return first + heads.start * self.head_dim, first + heads.stop * self.head_dim

    def each(self, heads: Shard) -> list[int]:
        return list(range(heads.start, heads.stop))


RowsOf = Callable[[HeadRows], RowsByName]


def separate(of: HeadRows) -> RowsByName:
    """q_proj, k_proj and v_proj."""
    q, kv = of.heads.times(of.head_dim), of.kv_heads.times(of.head_dim)
    return {"q_proj": q, "k_proj": kv, "v_proj": kv}


def keys_twice(of: HeadRows) -> RowsByName:
    """q_proj and k_proj; the keys are used as values, too."""
    kv = of.kv_heads.times(of.head_dim)
    return {"q_proj": of.heads.times(of.head_dim), "k_proj": RowRanges(kv.full, ((kv.start, kv.stop), (kv.start, kv.stop)))}


def with_gates(of: HeadRows) -> RowsByName:
    """q_proj, which has each head's query before its gate, k_proj and v_proj: gate|q|k|v."""
    kv, size = of.kv_heads.times(of.head_dim), 2 * of.head_dim
    halves = [(head * size + at, head * size + at + of.head_dim) for at in (of.head_dim, 0) for head in of.each(of.heads)]
    return {"q_proj": RowRanges.of(of.heads.full * size, halves), "k_proj": kv, "v_proj": kv}


def queries_alone(of: HeadRows) -> RowsByName:
    """q_proj only, for a layer that reads the keys and values of another."""
    return {"q_proj": of.heads.times(of.head_dim)}


def stacked(name: str) -> RowsOf:
    """All queries, then all keys, then all values."""

    def rows(of: HeadRows) -> RowsByName:
        k, v = of.heads.full * of.head_dim, (of.heads.full + of.kv_heads.full) * of.head_dim
        full = v + of.kv_heads.full * of.head_dim
        return {name: RowRanges.of(full, [of.rows(of.heads), of.rows(of.kv_heads, k), of.rows(of.kv_heads, v)])}

    return rows


def by_group(name: str) -> RowsOf:
    """For each KV head its queries, its key and its value; this is head by head if there are as many KV heads as heads."""

    def rows(of: HeadRows) -> RowsByName:
        group = of.heads.full // of.kv_heads.full
        size = group + 2  # heads of a group

        def head(index: int) -> tuple[int, int]:
            return index * of.head_dim, (index + 1) * of.head_dim

        queries = [head(h // group * size + h % group) for h in of.each(of.heads)]
        keys, values = ([head(g * size + group + i) for g in of.each(of.kv_heads)] for i in (0, 1))
        return {name: RowRanges.of(of.kv_heads.full * size * of.head_dim, [*queries, *keys, *values])}

    return rows


def pair(inner: Shard) -> RowsByName:
    """gate_proj and up_proj."""
    return {"gate_proj": inner, "up_proj": inner}


def stacked_pair(name: str) -> Callable[[Shard], RowsByName]:
    """gate, then up."""

    def rows(inner: Shard) -> RowsByName:
        up = inner.full + inner.start, inner.full + inner.stop
        return {name: RowRanges.of(2 * inner.full, [(inner.start, inner.stop), up])}

    return rows
