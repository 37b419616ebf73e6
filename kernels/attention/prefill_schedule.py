"""The order of work in prefill attention: the list of a step's query tiles, made on the device, once for all layers.

A query tile is 64-128 rows (tokens x the heads of a group or some of them); the last tile of a row comes first, since it sees
most keys. If there are few query tiles but many keys (a short prompt behind a long cached one), the schedule also splits the
keys.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from msgspec.structs import replace

from quire.kernels.attention.score_shape import ScoreShape
from quire.kernels.attention.tile import row_lengths
from quire.kernels.triton_support import hopper
from quire.kernels.tuning.configs import HopperPrefillConfig, PrefillConfig
from quire.kernels.tuning.current import current
from quire.kernels.tuning.table import HopperPrefillRule

HOPPER_ROWS = 128  # of a query tile: two warpgroups of 64 rows, what one wgmma takes


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "max_keys", "num_entries", "num_sms", "window"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "num_decode_rows_ptr"],  # slices of a step's buffers
)
def _schedule_kernel(
    query_start_ptr,
    seq_lens_ptr,
    num_decode_rows_ptr,
    header_ptr,
    tile_starts_ptr,
    tile_rows_ptr,
    tile_indices_ptr,
    num_rows,
    num_tokens,
    max_keys,
    num_entries,
    num_sms,
    window,
    NUM_KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """One program. header = [query tiles, splits]; tile_starts[r] = query tiles before row r; entry e of the list = (row, index
    of the tile in the row)."""
    lanes = tl.arange(0, BLOCK)
    first_row = num_rows * 0
    if HAS_LIMIT:
        first_row = tl.maximum(tl.load(num_decode_rows_ptr), 0)
    total = num_rows * 0
    most_keys = num_rows * 0
    for base in range(0, num_rows, BLOCK):
        rows = base + lanes
        live = (rows >= first_row) & (rows < num_rows)
        safe = tl.where(live, rows, 0)
        _start, query_len, seq_len = row_lengths(query_start_ptr, seq_lens_ptr, safe, num_tokens, max_keys, 0)
        tiles = tl.where(live & (seq_len > 0), tl.cdiv(query_len, TOKENS), 0)
        tl.store(tile_starts_ptr + rows, total + tl.cumsum(tiles, 0) - tiles, mask=rows < num_rows)
        total += tl.sum(tiles, 0)
        most_keys = tl.maximum(most_keys, tl.max(tl.where(tiles > 0, seq_len, 0), 0))
    tl.store(tile_starts_ptr + num_rows, total)
    tl.store(header_ptr, tl.minimum(total, num_entries))
    splits = num_rows * 0 + 1
    if MAY_SPLIT:
        # Few query tiles, but many keys (a short prompt behind a long cached one): split the keys, too.
        most_keys = tl.where(window > 0, tl.minimum(most_keys, window + TOKENS), most_keys)
        splits = tl.minimum(num_sms // tl.maximum(total * NUM_KV_HEADS, 1), tl.cdiv(most_keys, MIN_SPLIT_TILES * TILE))
    tl.store(header_ptr + 1, tl.maximum(splits, 1))
    tl.debug_barrier()
    for base in range(0, tl.minimum(total, num_entries), BLOCK):
        entries = base + lanes
        low = tl.zeros([BLOCK], tl.int32)
        high = low + num_rows
        for _ in tl.static_range(SEARCH_STEPS):
            middle = (low + high) // 2
            go_up = (tl.load(tile_starts_ptr + middle) <= entries) & (high - low > 1)
            go_down = (high - low > 1) & (go_up == 0)
            low = tl.where(go_up, middle, low)
            high = tl.where(go_down, middle, high)
        live = entries < tl.minimum(total, num_entries)
        last = tl.load(tile_starts_ptr + low + 1) - 1
        tl.store(tile_rows_ptr + entries, low, mask=live)
        tl.store(tile_indices_ptr + entries, last - entries, mask=live)


def choose_prefill_config(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, group: int) -> PrefillConfig:
    """The tuning table's first rule that fits, with a query tile that holds at least a group's heads."""
    shape = (dtype.itemsize, cache_dtype.itemsize, head_dim)
    config = next(rule.config for rule in current().attention.prefill if rule.fits(*shape))
    return replace(config, query_rows=max(config.query_rows, triton.next_power_of_2(group)))


def hopper_tile(group: int) -> tuple[int, int]:
    """(heads, tokens) of a query tile of Hopper's kernel: of the ways to cut a group, the one that leaves fewest rows idle.

    Tokens come in eights, since TMA swizzles lines in eights. One head and 128 tokens would suit any group, but not rows that
    have few queries.
    """

    def rows(heads: int) -> tuple[float, int]:
        return group / -(-group // heads) * (HOPPER_ROWS // heads // 8 * 8), heads

    heads = max(range(min(group, 3), min(group, 16) + 1), key=rows)
    return heads, HOPPER_ROWS // heads // 8 * 8


@dataclass(frozen=True)
class PrefillWorkspace:
    """Device memory of prefill attention: the step's list of query tiles, shared by all layers (windows included)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    config: PrefillConfig
    tile_heads: int  # of a query tile: a group's, or on a Hopper some of them
    tile_tokens: int
    hopper_rules: tuple[HopperPrefillRule, ...]
    min_split_tiles: int  # KV tiles of `config` that a program must save for a reduction of partial sums to pay
    num_programs: int
    max_rows: int
    hopper: bool  # prefill_hopper.py computes the layers that the rules assign to it
    may_split: bool  # splits keys if there are few queries; not for fp32: a row's result must be the same in any batch
    header: torch.Tensor  # [2] int32: number of query tiles, number of splits of the keys of each
    tile_starts: torch.Tensor  # [max_rows + 1] int32
    tile_rows: torch.Tensor  # [entries] int32
    tile_indices: torch.Tensor  # [entries] int32
    partial_out: torch.Tensor  # [programs, query_rows, D, up to a power of two] fp32: partial sums of split keys
    partial_max: torch.Tensor  # [programs, query_rows] fp32
    partial_sum: torch.Tensor  # [programs, query_rows] fp32
    counters: torch.Tensor  # [2 + programs] int32: next unit, finished programs, finished splits; 0 between launches

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        cache_dtype: torch.dtype | None = None,
        config: PrefillConfig | None = None,
        num_programs: int | None = None,
        hopper: bool = True,
    ) -> "PrefillWorkspace":
        """For steps of at most max_rows rows and max_tokens tokens; the last three are for tuning and tests."""
        tuning = current().attention
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} KV heads")
        device = torch.device(device)
        group = num_heads // num_kv_heads
        config = config or choose_prefill_config(dtype, cache_dtype or dtype, head_dim, group)
        if config.query_rows < group:
            raise ValueError(f"a tile of {config.query_rows} rows does not hold a group of {group} heads")
        supported = _hopper_supports(device, dtype, cache_dtype or dtype, head_dim)
        hopper = hopper and config.query_rows == HOPPER_ROWS and supported and not current().fixed_order
        heads, tokens = hopper_tile(group) if hopper else (group, config.query_rows // group)
        rules = tuple(rule for rule in tuning.prefill_hopper if rule.fits((cache_dtype or dtype).itemsize, head_dim, group))
        if num_programs is None:
            num_programs = torch.cuda.get_device_properties(device).multi_processor_count * config.programs_per_sm
        # ceil(q / n) summed over rows is at most T // n + rows.
        entries = max_tokens // tokens + max_rows

        def ints(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        may_split = dtype != torch.float32 and not current().fixed_order

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(num_programs if may_split else 0, config.query_rows, *shape, dtype=torch.float32, device=device)

        return cls(
            num_heads, num_kv_heads, head_dim, config, heads, tokens, rules, tuning.min_split_tiles, num_programs, max_rows,
            hopper, may_split,
            ints(2), ints(max_rows + 1), ints(entries), ints(entries),
            floats(triton.next_power_of_2(head_dim)), floats(), floats(), ints(2 + num_programs),
        )  # fmt: skip

    @property
    def group_parts(self) -> int:
        """Number of query tiles that share a group's heads."""
        return -(-(self.num_heads // self.num_kv_heads) // self.tile_heads)

    def hopper_config(self, window: int, shape: ScoreShape) -> HopperPrefillConfig | None:
        """How Hopper's kernel is cut for layers of this window and shape of scores; None: the portable kernel computes them."""
        if shape.slopes is not None or window < 0:
            return None
        return next((rule.config for rule in self.hopper_rules if rule.fits_scores(window, shape.softcap > 0)), None)


def _hopper_supports(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> bool:
    shape_fits = 64 <= head_dim <= 256 and head_dim % 16 == 0
    cache_fits = cache_dtype == dtype or cache_dtype.itemsize == 1
    return dtype.itemsize == 2 and cache_fits and shape_fits and hopper.available(device)


def prefill_schedule(
    workspace: PrefillWorkspace,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    max_keys: int,
    num_decode_rows: torch.Tensor | None = None,
    *,
    window: int = 0,
) -> None:
    """List the query tiles of the R rows of `seq_lens` [R]: one launch a step, before the layers' attention.

    num_tokens = q.shape[0]; max_keys = block_table.shape[1] * block_size: clamps, which the attention call repeats.
    num_decode_rows [1] int32 on the device: rows before it are decode rows and are skipped. Rows of seq_len 0 are skipped too.
    `window` is the largest of the layers', 0 if one has none: keys beyond it are never seen and do not count for splitting.
    """
    num_rows = seq_lens.shape[0]
    if not 1 <= num_rows <= workspace.max_rows or query_start.shape[0] != num_rows + 1:
        raise ValueError(f"{num_rows} rows, {query_start.shape[0]} query starts, workspace for {workspace.max_rows} rows")
    _schedule_kernel[(1,)](
        query_start,
        seq_lens,
        num_decode_rows,
        workspace.header,
        workspace.tile_starts,
        workspace.tile_rows,
        workspace.tile_indices,
        num_rows,
        num_tokens,
        max_keys,
        workspace.tile_rows.shape[0],
        max(1, workspace.num_programs // workspace.config.programs_per_sm),
        window,
        NUM_KV_HEADS=workspace.num_kv_heads * workspace.group_parts,
        TILE=workspace.config.tile,
        MAY_SPLIT=workspace.may_split,
        MIN_SPLIT_TILES=workspace.min_split_tiles,
        TOKENS=workspace.tile_tokens,
        HAS_LIMIT=num_decode_rows is not None,
        BLOCK=512,
        SEARCH_STEPS=workspace.max_rows.bit_length(),
        num_warps=4,
    )
