"""Cases of paged attention with the oracle's answer, and shapes for a GPU. See tests/kernels/test_attention.py."""

from dataclasses import dataclass, field

import torch

from quire.kernels.attention.attention_reference import attention_reference
from quire.kernels.attention.score_shape import ScoreShape

ODD_HEADS = [
    (1, 1, 64),
    (3, 1, 80),
    (5, 5, 96),
    (10, 2, 112),
    (7, 1, 128),
    (16, 1, 192),
    (6, 2, 256),
    (8, 1, 512),
    (32, 8, 128),
]
# what a layer may do to its scores, apart and together, by name
SHAPES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "rounded_alibi": {"alibi": True, "alibi_scale": 0.4, "rounds_alibi": True},
    "sinks": {"sinks": True},
    "all": {"softcap": 2.0, "alibi": True, "sinks": True},
}
GPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GPU_DECODE_ROWS = {
    "one_token": [(1, 1)],
    "one_long_row": [(20001, 1)],
    "lengths": [(1, 1), (64, 1), (0, 1), (65, 1), (1000, 1), (127, 1), (3, 1), (0, 1)],
    "many": [(17 * i % 613 + 1, 1) for i in range(300)],
    "skewed": [(15000, 1)] + [(100 + i, 1) for i in range(40)],
    "few_rows": [(700, 1), (130, 1), (1, 1), (3000, 1)],
    "queries": [(8, 8), (0, 2), (500, 3), (64, 4), (2000, 7), (5, 1)],
    "drafts": [(16, 16), (0, 0), (500, 3), (64, 16), (5000, 16), (5, 1)],
}
GPU_PREFILL_ROWS = {
    "one_token": [(1, 1)],
    "one_row": [(1000, 1000)],
    "rows": [(17, 17), (64, 64), (129, 129), (1, 1), (300, 300)],
    "chunks": [(500, 60), (65, 1), (2000, 513), (128, 128), (1000, 2)],
    "suffixes": [(9000, 40), (70, 5), (5000, 33)],
}


@dataclass
class Case:
    """Rows of (keys, queries), laid out in a paged cache, with q a slice of a fused qkv buffer."""

    rows: list[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int = 0
    is_chunked: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    device: str = "cpu"
    seed: int = 0
    scaled: bool = False
    interleaved: bool = False
    num_blocks: int = 0
    shape: dict = field(default_factory=dict)  # of SHAPES
    ahead: list[tuple[int, int, int]] = field(default_factory=list)  # (row, first, last position) that see each other
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        self.scale = self.head_dim**-0.5
        cache_dtype = self.cache_dtype or self.dtype
        needed = [-(-keys // self.block_size) for keys, _queries in self.rows]
        num_blocks = max(self.num_blocks, sum(needed) + 3)
        # With a large pool, the blocks at its very end: 64-bit offsets.
        ids = num_blocks - 1 - torch.randperm(sum(needed) + 2, generator=gen)
        num_slots = len(self.rows) + 2
        self.max_blocks = max(needed) + 1
        shape = (num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        if self.interleaved:
            both = torch.full((num_blocks, 2, *shape[1:]), float("nan")).to(self.device, cache_dtype)
            self.k_cache, self.v_cache = both[:, 0], both[:, 1]
        else:
            self.k_cache = torch.empty(shape, device=self.device, dtype=cache_dtype).fill_(float("nan"))
            self.v_cache = torch.empty(shape, device=self.device, dtype=cache_dtype).fill_(float("nan"))
        block_table = torch.full((num_slots, self.max_blocks), 10**6, dtype=torch.int32)
        self.row_slots = torch.randperm(num_slots, generator=gen)[: len(self.rows)].to(torch.int32)
        taken = 0
        for row, (keys, queries) in enumerate(self.rows):
            blocks = ids[taken : taken + needed[row]]
            taken += needed[row]
            slot = int(self.row_slots[row])
            block_table[slot, : needed[row]] = blocks
            # As the engine does: blocks that the row's window has left behind are freed, and their entries point to block 0.
            first_key = max(0, keys - queries - self.window + 1) if self.window > 0 else 0
            if self.window and self.is_chunked:
                first_key = max(0, keys - queries) // self.window * self.window
            block_table[slot, : first_key // self.block_size] = 0
            positions = torch.arange(first_key // self.block_size * self.block_size, keys)
            where = (ids.new_tensor(blocks.tolist())[positions // self.block_size], slice(None), positions % self.block_size)
            for cache in (self.k_cache, self.v_cache):
                values = torch.randn(len(positions), self.num_kv_heads, self.head_dim, generator=gen)
                cache[tuple(i.to(self.device) if isinstance(i, torch.Tensor) else i for i in where)] = values.to(
                    self.device, cache_dtype
                )
        self.block_table = block_table.to(self.device)
        self.row_slots = self.row_slots.to(self.device)
        starts = torch.tensor([0, *(queries for _keys, queries in self.rows)]).cumsum(0)
        self.query_start = starts.to(self.device, torch.int32)
        self.seq_lens = torch.tensor([keys for keys, _queries in self.rows], dtype=torch.int32, device=self.device)
        tokens = int(starts[-1])
        self.last_visible = self._last_visible() if self.ahead else None
        qkv = torch.randn(tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim, generator=gen)
        self.q = qkv.to(self.device, self.dtype)[:, : self.num_heads]
        self.out = torch.full((tokens, self.num_heads, self.head_dim), float("nan"), device=self.device, dtype=self.dtype)
        self.k_scale = torch.tensor([0.7], device=self.device) if self.scaled else None
        self.v_scale = torch.tensor([1.3], device=self.device) if self.scaled else None

    def _last_visible(self) -> torch.Tensor:
        found = torch.zeros(int(self.query_start[-1]), dtype=torch.int32)
        for row, first, last in self.ahead:
            keys, queries = self.rows[row]
            at = int(self.query_start[row]) + torch.arange(max(first - keys + queries, 0), last + 1 - keys + queries)
            found[at] = last
        return found.to(self.device)

    @property
    def score_shape(self) -> ScoreShape:
        given = dict(self.shape)
        gen = torch.Generator().manual_seed(self.num_heads)
        slopes, sinks = torch.rand(self.num_heads, generator=gen), torch.randn(self.num_heads, generator=gen)
        sink = given.pop("sinks", False)
        if isinstance(sink, float):  # of all heads
            sinks.fill_(sink)
        return ScoreShape(
            slopes=slopes.to(self.device) if given.pop("alibi", False) else None,
            sinks=sinks.to(self.device, self.dtype) if sink else None,
            **given,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.row_slots, self.query_start, self.seq_lens, self.out

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def expected(self) -> torch.Tensor:
        want = torch.full(self.out.shape, float("nan"), device=self.device, dtype=torch.float32)
        given = {"scale": self.scale, "window": self.window, "is_chunked": self.is_chunked, "shape": self.score_shape}
        attention_reference(*self.tensors[:-1], want, **given, **self.scales, last_visible=self.last_visible)
        return want


def assert_matches(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """fp32: last bits of sums in another order. fp16, bf16: rounding of the weights and of the result (2^-11, 2^-8)."""
    atol, rtol = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.5e-2, 1.6e-2)}[dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=rtol)


def run_prefill(case: Case, num_decode_rows: torch.Tensor | None = None, hopper: bool = False, **options):
    from quire.kernels.attention.prefill import prefill_attention
    from quire.kernels.attention.prefill_schedule import PrefillWorkspace, prefill_schedule

    tokens = case.q.shape[0]
    workspace = PrefillWorkspace.allocate(
        len(case.rows) + 1, tokens, case.num_heads, case.num_kv_heads, case.head_dim, case.device, case.dtype, hopper=hopper,
        cache_dtype=case.k_cache.dtype, **options,
    )  # fmt: skip
    max_keys = case.max_blocks * case.block_size
    prefill_schedule(workspace, case.query_start, case.seq_lens, tokens, max_keys, num_decode_rows, window=case.window)
    for _layer in range(2):
        case.out.fill_(float("nan"))
        given = {"scale": case.scale, "workspace": workspace, "window": case.window, "is_chunked": case.is_chunked}
        prefill_attention(*case.tensors, **given, shape=case.score_shape, **case.scales, last_visible=case.last_visible)
    assert not workspace.counters.any()
    return case.out


def run_decode(case: Case, max_query_len: int | None = None, num_decode_rows: torch.Tensor | None = None, **options):
    from quire.kernels.attention.decode import decode_attention
    from quire.kernels.attention.decode_schedule import DecodeWorkspace, decode_schedule

    max_query_len = max_query_len or max(queries for _keys, queries in case.rows)
    workspace = DecodeWorkspace.allocate(
        len(case.rows) + 1, case.num_heads, case.num_kv_heads, case.head_dim, max_query_len, case.device, case.dtype, **options
    )
    workspace.partial_out.fill_(float("nan"))
    schedule = workspace.new_schedule(case.window, case.is_chunked)
    max_keys = case.max_blocks * case.block_size
    decode_schedule(workspace, schedule, case.query_start, case.seq_lens, case.q.shape[0], max_keys, num_decode_rows)
    for _layer in range(2):
        case.out.fill_(float("nan"))
        given = {"scale": case.scale, "workspace": workspace, "schedule": schedule, "shape": case.score_shape}
        decode_attention(*case.tensors, **given, **case.scales)
    assert not workspace.arrivals.any()
    return case.out


INTERPRET_DECODE_ROWS = {
    "one_token": [(1, 1)],
    "lengths": [(1, 1), (40, 1), (16, 1), (0, 1), (17, 1)],
    "queries": [(5, 2), (0, 1), (33, 3), (3, 3)],
    "drafts": [(16, 16), (41, 5), (0, 0), (35, 1)],
}
CPU_ROWS = {
    "one_token": [(1, 1)],
    "decode": [(1, 1), (16, 1), (17, 1), (100, 1), (3, 1), (65, 1), (101, 1), (102, 1)],
    "prefill": [(1, 1), (17, 17), (40, 40)],
    "chunks": [(50, 7), (64, 32), (33, 32), (300, 290)],
    "speculative": [(9, 3), (80, 8), (2, 2), (16, 16), (40, 15)],
    "mixed_and_padded": [(70, 1), (0, 1), (20, 1), (33, 33), (0, 0), (90, 45), (5, 1)],
}


def run_cpu(case: Case) -> torch.Tensor:
    from quire.kernels.attention.attention_cpu import CpuAttentionPlan, attention_cpu

    plan = CpuAttentionPlan(
        case.block_table[case.row_slots.long()],
        [keys for keys, _queries in case.rows],
        [queries for _keys, queries in case.rows],
        case.k_cache,
        dtype=case.dtype,
        window=case.window,
        is_chunked=case.is_chunked,
        last_visible=None if case.last_visible is None else case.last_visible.numpy(),
    )
    given = {"scale": case.scale, "shape": case.score_shape}
    attention_cpu(case.q, case.k_cache, case.v_cache, case.out, plan, **given, **case.scales)
    return case.out
