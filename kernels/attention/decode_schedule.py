"""The division of work in decode attention: tile sizes, device memory, and the split of a step's work, made on the device.

Units and programs: see decode.py. One launch of one program per step and window; the layers only read the result.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.attention.tile import first_visible_key, row_lengths, windowed
from quire.kernels.tuning.configs import DecodeConfig
from quire.kernels.tuning.current import current

MAX_QUERY_LEN = 16
MAX_QUERY_ROWS = 128  # queries of a row x heads of a group: a program holds them all
MAX_QUERY_ELEMENTS = 1 << 15  # of the sums of a program: twice as many would not fit into an SM's registers


@triton.jit
def row_tiles(query_len, seq_len, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """(first KV tile, number of KV tiles) that the row's queries see."""
    first_key = first_visible_key(seq_len - query_len, window, WINDOWED)
    first_tile = first_key // TILE
    return first_tile, tl.maximum(tl.cdiv(seq_len, TILE) - first_tile, 0)


@triton.jit
def tiles_per_split(tiles, SPLIT_TILES: tl.constexpr, FIXED_SPLITS: tl.constexpr):
    """Fixed mode: SPLIT_TILES tiles a split, more only if the row would need over FIXED_SPLITS splits."""
    return tl.maximum(tl.cdiv(tiles, FIXED_SPLITS), SPLIT_TILES)


@triton.jit
def program_start(program, units, longer):
    """The first unit of a program: the first `longer` programs take units + 1 each, the others `units`."""
    return program * units + tl.minimum(program, longer)


@triton.jit
def program_of(unit, units, longer):
    """The program that takes a unit."""
    border = longer * (units + 1)
    return tl.where(unit < border, unit // (units + 1), longer + (unit - border) // units)


@triton.jit
def _load_rows(
    query_start_ptr, seq_lens_ptr, rows, limit, num_tokens, max_keys, window,
    MAX_QUERY: tl.constexpr, TILE: tl.constexpr, SPLIT_TILES: tl.constexpr, FIXED_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """(units of one KV head, whether a row is padded). A padded row has no units: its zeros are written separately."""
    live = rows < limit
    safe = tl.where(live, rows, 0)
    _start, query_len, seq_len = row_lengths(query_start_ptr, seq_lens_ptr, safe, num_tokens, max_keys, MAX_QUERY)
    _first, units = row_tiles(query_len, seq_len, window, TILE, WINDOWED)
    if FIXED_SPLITS > 0:
        units = tl.cdiv(units, tiles_per_split(units, SPLIT_TILES, FIXED_SPLITS))
    live = live & (query_len > 0)
    return tl.where(live, units, 0), (live & (seq_len == 0)).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "max_keys", "window", "num_programs", "whole_tiles"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "num_decode_rows_ptr"],  # slices of a step's buffers
)
def _schedule_kernel(
    query_start_ptr,
    seq_lens_ptr,
    num_decode_rows_ptr,
    header_ptr,
    unit_starts_ptr,
    first_rows_ptr,
    padded_rows_ptr,
    num_rows,
    num_tokens,
    max_keys,
    window,
    num_programs,
    whole_tiles,
    NUM_KV_HEADS: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """One program. header = [units a program, programs with one more, all units, padded rows]; unit_starts[r] = units (of one
    head) before row r.
    """
    lanes = tl.arange(0, BLOCK)
    limit = num_rows
    if HAS_LIMIT:
        limit = tl.minimum(tl.maximum(tl.load(num_decode_rows_ptr), 0), num_rows)
    total = num_rows * 0
    padded = num_rows * 0
    most_units = num_rows * 0 + 1
    for base in range(0, num_rows, BLOCK):
        units, is_padded = _load_rows(
            query_start_ptr, seq_lens_ptr, base + lanes, limit, num_tokens, max_keys, window,
            MAX_QUERY, TILE, SPLIT_TILES, FIXED_SPLITS, WINDOWED,
        )  # fmt: skip
        tl.store(padded_rows_ptr + padded + tl.cumsum(is_padded, 0) - 1, base + lanes, mask=is_padded != 0)
        total += tl.sum(units, 0)
        padded += tl.sum(is_padded, 0)
        most_units = tl.maximum(most_units, tl.max(units, 0))
    per_program = tl.maximum(tl.cdiv(total * NUM_KV_HEADS, num_programs), 1)
    if most_units <= whole_tiles:
        per_program = tl.maximum(per_program, most_units)

    # If every (row, head) can have programs of its own, round its units up to a multiple of theirs: then each program has one
    # (row, head), and the partial sums of each are as few as possible.
    part = num_rows * 0 + 1
    if FIXED_SPLITS == 0:
        larger = per_program + tl.cdiv(per_program, 8)
        parts = num_rows * 0
        parts_if_larger = num_rows * 0
        for base in range(0, num_rows, BLOCK):
            units, is_padded = _load_rows(
                query_start_ptr, seq_lens_ptr, base + lanes, limit, num_tokens, max_keys, window,
                MAX_QUERY, TILE, SPLIT_TILES, FIXED_SPLITS, WINDOWED,
            )  # fmt: skip
            parts += tl.sum(tl.cdiv(units, per_program), 0)
            parts_if_larger += tl.sum(tl.cdiv(units, larger), 0)
        if parts * NUM_KV_HEADS <= num_programs:
            part = per_program
        elif parts_if_larger * NUM_KV_HEADS <= num_programs:
            part = larger
            per_program = larger

    total = num_rows * 0
    for base in range(0, num_rows, BLOCK):
        rows = base + lanes
        units, is_padded = _load_rows(
            query_start_ptr, seq_lens_ptr, rows, limit, num_tokens, max_keys, window,
            MAX_QUERY, TILE, SPLIT_TILES, FIXED_SPLITS, WINDOWED,
        )  # fmt: skip
        units = tl.cdiv(units, part) * part
        tl.store(unit_starts_ptr + rows, total + tl.cumsum(units, 0) - units, mask=rows < num_rows)
        total += tl.sum(units, 0)
    tl.store(unit_starts_ptr + num_rows, total)
    total = total * NUM_KV_HEADS
    # Else cut stretches of one length, or, if that would leave over 1/16 of all programs idle, of lengths within one unit. The
    # latter alone is 1-2 % slower: where rows are equally long, the former's stretches more often end with a row.
    longer = num_rows * 0
    if FIXED_SPLITS == 0:
        idle = per_program * num_programs - total
        if (part == 1) & (total >= num_programs) & (idle * 16 > total):
            per_program = total // num_programs
            longer = total - per_program * num_programs
    tl.store(header_ptr, per_program)
    tl.store(header_ptr + 1, longer)
    tl.store(header_ptr + 2, total)
    tl.store(header_ptr + 3, padded)
    tl.debug_barrier()
    # The last row that starts at or before a program's first unit: a binary search for all programs at once.
    for base in range(0, num_programs, BLOCK):
        programs = base + lanes
        target = program_start(programs, per_program, longer) // NUM_KV_HEADS
        low = tl.zeros([BLOCK], tl.int32)
        high = low + num_rows
        for _ in tl.static_range(SEARCH_STEPS):
            middle = (low + high) // 2
            go_up = (tl.load(unit_starts_ptr + middle) <= target) & (high - low > 1)
            go_down = (high - low > 1) & (go_up == 0)
            low = tl.where(go_up, middle, low)
            high = tl.where(go_down, middle, high)
        tl.store(first_rows_ptr + programs, low, mask=programs < num_programs)


def choose_decode_configs(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, query_rows: int
) -> tuple[DecodeConfig, ...]:
    """The tuning table's first rule that fits; query_rows = max_query_len * group.

    In ascending order of programs an SM: a step gets the first that has a program for each (row, KV head), else the last.
    """
    shape = (dtype.itemsize, cache_dtype.itemsize, head_dim, query_rows)
    return next(rule.configs for rule in current().attention.decode if rule.fits(*shape))


def takes_queries(dtype: torch.dtype, head_dim: int, group: int, max_query_len: int) -> bool:
    """Whether decode attention is for rows of up to max_query_len queries; else prefill attention computes them.

    In fp32 each row has partial sums of its own, which windows of many rows would make too large.
    """
    query_rows = max_query_len * group
    elements = triton.next_power_of_2(query_rows) * triton.next_power_of_2(head_dim)
    return dtype != torch.float32 and query_rows <= MAX_QUERY_ROWS and elements <= MAX_QUERY_ELEMENTS


@dataclass(frozen=True)
class DecodeSchedule:
    """Written by `decode_schedule` and read by `decode_attention`: one per window in the model, rewritten every step."""

    header: torch.Tensor  # [4] int32: units a program, programs with one more, all units, padded rows
    unit_starts: torch.Tensor  # [max_rows + 1] int32: units of one KV head before each row
    first_rows: torch.Tensor  # [programs] int32: the row in which each program starts
    padded_rows: torch.Tensor  # [max_rows] int32: rows to be written as zeros
    window: int
    is_chunked: bool  # a query sees the keys of its chunk of `window` keys, not the last `window` keys

    @property
    def windowed(self) -> int:
        """WINDOWED of the kernels."""
        return windowed(self.window, self.is_chunked)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Device memory of decode attention, allocated once and shared by all layers of one shape.

    partial_out [slots, rows, D], partial_max and partial_sum [slots, rows] fp32, where rows = max_query_len * group up to
    a power of two; slots = 2 a program, or max_rows * Hkv * fixed_splits. arrivals [max_rows * Hkv] int32: 0 between launches.
    """

    max_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_query_len: int
    dtype: torch.dtype
    configs: tuple[tuple[DecodeConfig, int], ...]  # and their numbers of programs, ascending
    split_tokens: int  # 0: split by load; else the keys of a split (more if a row would need over fixed_splits splits)
    fixed_splits: int  # 0: split by load
    partial_out: torch.Tensor
    partial_max: torch.Tensor
    partial_sum: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_query_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        cache_dtype: torch.dtype | None = None,
        split_tokens: int | None = None,
        fixed_splits: int = 8,
        config: DecodeConfig | None = None,
        num_programs: int | None = None,
    ) -> "DecodeWorkspace":
        """`split_tokens=None` means by load, but 1024 for fp32; `config` and `num_programs` are for tuning and tests."""
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} KV heads")
        if not 1 <= max_query_len <= MAX_QUERY_LEN:
            raise ValueError(f"max_query_len must be 1..{MAX_QUERY_LEN}, not {max_query_len}")
        device = torch.device(device)
        query_rows = max_query_len * num_heads // num_kv_heads
        if split_tokens is None:
            split_tokens = 1024 if dtype == torch.float32 else 0
        choices = (config,) if config else choose_decode_configs(dtype, cache_dtype or dtype, head_dim, query_rows)
        if device.type == "cuda" and config is None:
            line = 2 * triton.next_power_of_2(head_dim) * (cache_dtype or dtype).itemsize
            limit = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 1 << 30)
            choices = tuple(c for c in choices if c.ring_bytes(line) <= limit) or choices[-1:]
        if split_tokens:  # a row's result must not depend on the number of rows
            choices = choices[-1:]
        if num_programs is None:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            configs = tuple((choice, num_sms * choice.programs_per_sm) for choice in choices)
        else:
            configs = tuple((choice, num_programs) for choice in choices)
        tile, num_programs = configs[-1][0].tile, configs[-1][1]
        if split_tokens % tile:
            raise ValueError(f"split_tokens {split_tokens} is not a multiple of the tile, {tile}")
        if not split_tokens:
            fixed_splits = 0
        slots = max_rows * num_kv_heads * fixed_splits if split_tokens else 2 * num_programs
        rows = triton.next_power_of_2(query_rows)
        return cls(
            max_rows=max_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_query_len=max_query_len,
            dtype=dtype,
            configs=configs,
            split_tokens=split_tokens,
            fixed_splits=fixed_splits,
            partial_out=torch.empty(slots, rows, head_dim, dtype=torch.float32, device=device),
            partial_max=torch.empty(slots, rows, dtype=torch.float32, device=device),
            partial_sum=torch.empty(slots, rows, dtype=torch.float32, device=device),
            arrivals=torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
        )

    def launch(self, num_rows: int) -> tuple[DecodeConfig, int]:
        """(config, programs) of a step of that many rows."""
        pairs = num_rows * self.num_kv_heads
        return next((choice for choice in self.configs if pairs <= choice[1]), self.configs[-1])

    def new_schedule(self, window: int = 0, is_chunked: bool = False) -> DecodeSchedule:
        def ints(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=self.arrivals.device)

        tables = ints(4), ints(self.max_rows + 1), ints(self.configs[-1][1]), ints(self.max_rows)
        return DecodeSchedule(*tables, window, is_chunked)


def decode_schedule(
    workspace: DecodeWorkspace,
    schedule: DecodeSchedule,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    max_keys: int,
    num_decode_rows: torch.Tensor | None = None,
) -> None:
    """Fill `schedule` for the R rows of `seq_lens` [R]: one launch a step and window, before the layers' attention.

    num_tokens = q.shape[0]; max_keys = block_table.shape[1] * block_size: clamps, which the attention call repeats.
    num_decode_rows [1] int32 on the device: rows from there on are not decode rows and are skipped.
    """
    num_rows = seq_lens.shape[0]
    if not 1 <= num_rows <= workspace.max_rows or query_start.shape[0] != num_rows + 1:
        raise ValueError(f"{num_rows} rows, {query_start.shape[0]} query starts, workspace for {workspace.max_rows} rows")
    config, num_programs = workspace.launch(num_rows)
    _schedule_kernel[(1,)](
        query_start,
        seq_lens,
        num_decode_rows,
        schedule.header,
        schedule.unit_starts,
        schedule.first_rows,
        schedule.padded_rows,
        num_rows,
        num_tokens,
        max_keys,
        schedule.window,
        num_programs,
        0 if workspace.fixed_splits else config.whole_tiles,
        NUM_KV_HEADS=workspace.num_kv_heads,
        MAX_QUERY=workspace.max_query_len,
        TILE=config.tile,
        SPLIT_TILES=workspace.split_tokens // config.tile,
        FIXED_SPLITS=workspace.fixed_splits,
        WINDOWED=schedule.windowed,
        HAS_LIMIT=num_decode_rows is not None,
        BLOCK=512,
        SEARCH_STEPS=workspace.max_rows.bit_length(),
        num_warps=4,
    )
