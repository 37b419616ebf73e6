"""Decode attention that rotates and writes by itself, against `rope_kv` (and its torch oracle) followed by attention.

The caches are poisoned as in test_attention.py, and NaN is where the new keys and values go.
"""

from types import ModuleType

import pytest
import torch
from attention_cases import GPU_DECODE_ROWS, GPU_DTYPES, Case, assert_matches

from quire.kernels.attention import rope_kv_reference
from quire.kernels.attention.attention_reference import attention_reference

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # out, k_cache, v_cache


class Step:
    """Rows of one query, whose last keys and values are still in qkv, not rotated. Every run is on copies."""

    def __init__(self, lengths: list[int], table_positions: int = 0, **shape):
        case = self.case = Case([(keys, 1) for keys in lengths], **shape)
        gen = torch.Generator().manual_seed(len(lengths))
        width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
        self.qkv = torch.randn(len(lengths), width + 8, generator=gen).to(case.device, case.dtype)[:, :width]
        angles = torch.randn(table_positions or max(lengths), case.head_dim // 2, generator=gen)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(case.device)
        self.positions = (case.seq_lens - 1).clamp(0, len(angles) - 1)
        size, last = case.block_size, (case.seq_lens.long() - 1).clamp(0)
        self.slots = case.block_table[case.row_slots.long(), last // size] * size + last % size
        self.slots[case.seq_lens == 0] = -1
        written = self.slots[self.slots >= 0]
        for cache in (case.k_cache, case.v_cache):
            cache[written // size, :, written % size] = float("nan")

    def _copy(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        case, qkv = self.case, self.qkv.clone()
        q = qkv[:, : case.num_heads * case.head_dim].unflatten(1, (case.num_heads, case.head_dim))
        return qkv, q, case.k_cache.clone(), case.v_cache.clone(), torch.full_like(case.out, float("nan"))

    def _rope_kv(self, module: ModuleType, qkv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        module.rope_kv(qkv, self.positions, self.cos_sin, self.slots, k, v, self.case.num_heads, **self.case.scales)

    def expected(self) -> Result:
        qkv, q, k, v, out = self._copy()
        self._rope_kv(rope_kv_reference, qkv, k, v)
        c, want = self.case, out.float()
        attention_reference(
            q, k, v, c.block_table, c.row_slots, c.query_start, c.seq_lens, want, scale=c.scale, window=c.window, **c.scales
        )
        return want, k, v

    def run(self, fused: bool, layers: int = 1, mode: int = 0, **options) -> Result:
        from quire.kernels.attention import rope_kv
        from quire.kernels.attention.decode import decode_attention
        from quire.kernels.attention.decode_rope import Rope
        from quire.kernels.attention.decode_schedule import DecodeWorkspace, decode_schedule

        c = self.case
        heads = c.num_heads, c.num_kv_heads, c.head_dim
        workspace = DecodeWorkspace.allocate(
            len(c.rows) + 1, *heads, 1, c.device, c.dtype, cache_dtype=c.k_cache.dtype, **options
        )
        workspace.partial_out.fill_(float("nan"))
        schedule = workspace.new_schedule(c.window)
        qkv, q, k, v, out = self._copy()
        decode_schedule(workspace, schedule, c.query_start, c.seq_lens, q.shape[0], c.max_blocks * c.block_size)
        if not fused:
            self._rope_kv(rope_kv, qkv, k, v)
        rope = Rope(qkv, self.cos_sin, self.slots) if fused else None
        for _layer in range(layers):
            decode_attention(
                *(q, k, v, c.block_table, c.row_slots, c.query_start, c.seq_lens, out),
                scale=c.scale,
                workspace=workspace,
                schedule=schedule,
                rope=rope,
                dependent_launch=mode,
                **c.scales,
            )
        assert not workspace.arrivals.any()
        assert not fused or torch.equal(qkv, self.qkv)
        return out, k, v


def assert_same(got: Result, want: Result) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def assert_close(got: Result, want: Result, dtype: torch.dtype) -> None:
    """Against the oracle: caches may differ in a last bit, and are NaN in the same places."""
    assert_matches(got[0], want[0], dtype)
    step = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}[dtype]
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=step, atol=step, equal_nan=True)


LENGTHS = [1, 40, 16, 0, 17, 33]


def tiles_of(tile: int):
    from quire.kernels.tuning.configs import DecodeConfig

    return DecodeConfig(tile=tile, num_warps=4, num_stages=2, programs_per_sm=1)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "heads",
    [
        (2, 2, 16),
        (3, 1, 16),
        (14, 1, 16),
        *(pytest.param(heads, marks=pytest.mark.slow) for heads in [(4, 2, 32), (4, 1, 64), (7, 1, 16)]),
    ],
)
def test_interpreted_equals_rope_kv_then_attention(heads):
    step = Step(LENGTHS, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
    options = {"config": tiles_of(16), "num_programs": 4, "split_tokens": 0}
    got = step.run(fused=True, layers=2, **options)
    assert_same(got, step.run(fused=False, **options))
    assert_close(got, step.expected(), torch.float32)


@pytest.mark.interpret
@pytest.mark.parametrize("window", [0, 1, 9])
@pytest.mark.parametrize("num_programs", [1, pytest.param(5, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize("block_size,tile", [(16, 32), (32, 16)])
def test_interpreted_cut_anywhere(block_size, tile, num_programs, window):
    step = Step([100, 0, 3, 65, 1], window=window, block_size=block_size)
    got = step.run(fused=True, config=tiles_of(tile), num_programs=num_programs, split_tokens=0)
    assert_close(got, step.expected(), torch.float32)


@pytest.mark.interpret
@pytest.mark.parametrize("window", [0, 20])
def test_interpreted_fixed_splits(window):
    step = Step([100, 0, 3, 64, 1, 33], window=window)
    got = step.run(fused=True, config=tiles_of(16), num_programs=5, split_tokens=16, fixed_splits=3)
    assert_close(got, step.expected(), torch.float32)


@pytest.mark.interpret
def test_interpreted_half_precision_and_positions_beyond_the_table():
    step = Step(LENGTHS, table_positions=30, dtype=torch.float16)
    got = step.run(fused=True, config=tiles_of(16), num_programs=3)
    assert_close(got, step.expected(), torch.float16)


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.interpret
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("cache_dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_8_bit_caches(dtype, cache_dtype, scaled):
    """Written and read as `rope_kv` and attention do, to the bit; large values saturate."""
    step = Step(LENGTHS, dtype=dtype, cache_dtype=cache_dtype, scaled=scaled)
    step.qkv[:, -3:] = 1e6
    options = {"config": tiles_of(16), "num_programs": 4, "split_tokens": 0}
    got = step.run(fused=True, layers=2, **options)
    assert_same(got, step.run(fused=False, **options))


@pytest.mark.interpret
def test_interpreted_writes_nothing_where_no_slot_is():
    """Attention then sees what the cache holds there, as it does after `rope_kv`."""
    step = Step([5, 20, 33])
    for cache in (step.case.k_cache, step.case.v_cache):
        cache[cache.isnan()] = 0.5
    step.slots[0], step.slots[2] = -1, len(step.case.k_cache) * step.case.block_size
    got = step.run(fused=True, config=tiles_of(16), num_programs=2)
    assert_same(got, step.run(fused=False, config=tiles_of(16), num_programs=2))
    assert int((got[1] != step.case.k_cache).any(-1).any(1).sum()) == 1


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    from quire.kernels.attention.decode_rope import can_fuse
    from quire.kernels.attention.decode_schedule import DecodeWorkspace

    def fits(num_heads=4, head_dim=16, max_query_len=1, rotary_dim=None):
        workspace = DecodeWorkspace.allocate(
            2, num_heads, 1, head_dim, max_query_len, "cpu", torch.float32, config=tiles_of(16), num_programs=1
        )
        return can_fuse(workspace, torch.zeros(3, rotary_dim or head_dim))

    assert fits() and fits(num_heads=14) and fits(num_heads=30, head_dim=128)
    assert not (fits(head_dim=24) or fits(max_query_len=2) or fits(rotary_dim=8))
    assert not (fits(num_heads=15) or fits(num_heads=16) or fits(num_heads=32))

    def refused(match, **changes):
        step = Step([3, 4])
        step.__dict__.update(changes)
        with pytest.raises(ValueError, match=match):
            step.run(fused=True, config=tiles_of(16), num_programs=1)

    refused("slot_mapping", slots=torch.zeros(3, dtype=torch.int64))
    refused("slot_mapping", slots=torch.zeros(2, dtype=torch.int32))
    refused("can_fuse", cos_sin=torch.zeros(4, 8))
    refused("float32", cos_sin=torch.zeros(4, 16, dtype=torch.float64))


GPU_HEADS = [(32, 8, 128), (16, 8, 128), (14, 2, 64)]
ROWS = {name: [keys for keys, _queries in rows] for name, rows in GPU_DECODE_ROWS.items() if name != "queries"}


def gpu_step(lengths, heads, dtype, window=0, **cached) -> Step:
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2], "window": window, **cached}
    return Step(lengths, block_size=64, dtype=dtype, device="cuda", **shape)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", GPU_HEADS)
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_gpu_equals_rope_kv_then_attention(lengths, dtype, heads):
    step = gpu_step(lengths, heads, dtype)
    got = step.run(fused=True, layers=2)
    assert_close(got, step.expected(), dtype)
    assert_same(got, step.run(fused=False))


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("cache_dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("heads", GPU_HEADS)
@pytest.mark.parametrize("lengths", [ROWS["skewed"], ROWS["lengths"]], ids=["skewed", "lengths"])
def test_gpu_8_bit_caches(lengths, heads, cache_dtype, scaled):
    step = gpu_step(lengths, heads, torch.bfloat16, cache_dtype=cache_dtype, scaled=scaled)
    got = step.run(fused=True, layers=2)
    assert_same(got, step.run(fused=False))
    assert_matches(got[0], step.expected()[0], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_gpu_windows(dtype, window):
    step = gpu_step(ROWS["few_rows"] + ROWS["lengths"], (16, 8, 128), dtype, window)
    assert_close(step.run(fused=True), step.expected(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("heads", GPU_HEADS)
@pytest.mark.parametrize("rows", [1, 3, 16, 60, 300])
def test_gpu_dependent_launch_changes_nothing(rows, heads, mode):
    lengths = ([9000, 33, 700, 1] * 75)[:rows]
    step = gpu_step(lengths, heads, torch.bfloat16)
    assert_same(step.run(fused=True, layers=20, mode=mode), step.run(fused=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("rows", [2, 17, 64, 128, 256])
def test_gpu_any_number_of_rows(rows, dtype):
    step = gpu_step([1 + (977 * i + 131 * rows) % 1500 for i in range(rows)], (16, 8, 128), dtype)
    assert_close(step.run(fused=True), step.expected(), dtype)
