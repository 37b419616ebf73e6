"""Sweeps of a tuning table's parts for attention, for rotation and KV write, and for the elementwise kernels.

Each takes a bench, a workload and a table, and returns the table with its results. Attention is measured on caches of several
layers in turn, blocks in random order, 16-bit, heads of 128: other rules of the table stay as they are.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from bench import Bench, Call
from msgspec.structs import replace
from workload import Model, Workload

from quire.kernels.attention import rope_kv
from quire.kernels.attention.decode import decode_attention
from quire.kernels.attention.decode_schedule import DecodeWorkspace, decode_schedule
from quire.kernels.attention.prefill import prefill_attention
from quire.kernels.attention.prefill_schedule import PrefillWorkspace, prefill_schedule
from quire.kernels.elementwise import activation, norm
from quire.kernels.triton_support import hopper
from quire.kernels.tuning.configs import DecodeConfig, HopperPrefillConfig, PrefillConfig
from quire.kernels.tuning.current import using
from quire.kernels.tuning.table import ANY, AttentionTuning, Tuning

BLOCK_SIZE = 64
# Rows of (rows, keys, queries) that separate the configurations: few (row, KV head) pairs, some, many.
DECODE_ROWS = (((1, 2048), (16, 256), (16, 1024)), ((32, 256), (32, 1024)), ((64, 1024), (256, 512), (64, 4096)))
PREFILL_ROWS = ((16, 512), (4, 2048), (1, 8192))
ROPE_TOKENS = (16, 64, 128, 256, 512, 1024, 2048)
ROPE_TILES = (512, 1024, 2048, 4096)


class Rows:
    """`rows` rows of equal numbers of keys and queries, in caches of several layers that take turns."""

    def __init__(self, bench: Bench, model: Model, rows: int, keys: int, queries: int) -> None:
        self.heads = heads, kv_heads, dim = model.heads
        self.rows, self.keys, self.tokens = rows, keys, rows * queries
        blocks = -(-keys // BLOCK_SIZE)
        size = (rows * blocks + 1, kv_heads, BLOCK_SIZE, dim)
        self.scale, self.max_keys = dim**-0.5, blocks * BLOCK_SIZE
        layers = bench.copies(2 * size[0] * kv_heads * BLOCK_SIZE * dim * 2)
        self.caches = [(bench.random(*size), bench.random(*size)) for _ in range(layers)]
        self.q, self.out = bench.random(self.tokens, heads, dim), bench.random(self.tokens, heads, dim)
        ids = torch.randperm(rows * blocks, device=bench.device).to(torch.int32) + 1
        self.table = ids.view(rows, blocks)
        self.slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * queries
        self.seq_lens = torch.full((rows,), keys, dtype=torch.int32, device=bench.device)

    def calls(self, attend: Callable[..., None]) -> list[Call]:
        """One call for each layer."""

        def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            attend(self.q, k, v, self.table, self.slots, self.starts, self.seq_lens, self.out, scale=self.scale)
            return self.out

        return [functools.partial(call, *cache) for cache in self.caches]


def sweep_decode(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """The configurations of 16-bit caches, each measured with the numbers of rows that it is for."""
    rules = list(table.attention.decode)
    size, dim = bench.dtype.itemsize, workload.large.head_dim
    number = next(n for n, rule in enumerate(rules) if rule.fits(size, size, dim, workload.large.q_heads))
    configs = list(rules[number].configs)
    for index, config in enumerate(configs):
        rows = DECODE_ROWS[min(index, len(DECODE_ROWS) - 1)] if len(configs) > 1 else DECODE_ROWS[0]
        limited = {(min(n, workload.most_rows), min(keys, workload.longest)) for n, keys in rows}
        cases = [_decode_case(bench, m, *each) for m in (workload.large, workload.small) for each in sorted(limited)]
        name = f"decode, {config.programs_per_sm} programs an SM"
        configs[index] = bench.fastest(name, config, _decode_candidates(config), cases)
        whole = [replace(configs[index], whole_tiles=tiles) for tiles in (0, 2, 3, 4, 6)]
        configs[index] = bench.fastest(f"{name}, whole rows", configs[index], whole, cases)
    rules[number] = replace(rules[number], configs=tuple(configs))
    return replace(table, attention=replace(table.attention, decode=tuple(rules)))


def _decode_candidates(config: DecodeConfig) -> list[DecodeConfig]:
    found = [replace(config, num_stages=stages) for stages in range(2, 7) if abs(stages - config.num_stages) == 1]
    found += [replace(config, tile=config.tile // 2, num_stages=config.num_stages + more) for more in (0, 1, 2)]
    found += [replace(config, tile=config.tile * 2, num_stages=max(2, config.num_stages - less)) for less in (0, 1)]
    return [*found, replace(config, num_warps=config.num_warps * 2)]


def _decode_case(bench: Bench, model: Model, num_rows: int, keys: int) -> Callable[[DecodeConfig], list[Call]]:
    rows = Rows(bench, model, num_rows, keys, 1)

    def calls(config: DecodeConfig) -> list[Call]:
        programs = bench.num_sms * config.programs_per_sm
        workspace = DecodeWorkspace.allocate(
            num_rows, *rows.heads, 1, bench.device, bench.dtype, config=config, num_programs=programs, split_tokens=0
        )
        schedule = workspace.new_schedule()
        decode_schedule(workspace, schedule, rows.starts, rows.seq_lens, rows.tokens, rows.max_keys)
        return rows.calls(functools.partial(decode_attention, workspace=workspace, schedule=schedule))

    return calls


def sweep_prefill(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """The portable kernel's configuration for 16-bit caches, and on a Hopper its own kernel's."""
    attention, size, dim = table.attention, bench.dtype.itemsize, workload.large.head_dim
    rules = list(attention.prefill)
    number = next(n for n, rule in enumerate(rules) if rule.fits(size, size, dim))
    limited = {(min(n, workload.most_rows), min(keys, workload.longest)) for n, keys in PREFILL_ROWS}
    inputs = [Rows(bench, workload.large, n, keys, keys) for n, keys in sorted(limited)]
    config = rules[number].config
    cases = [_prefill_case(bench, table, rows) for rows in inputs]
    rules[number] = replace(rules[number], config=bench.fastest("prefill", config, _prefill_candidates(config), cases))
    attention = replace(attention, prefill=tuple(rules))
    if hopper.available(bench.device):
        attention = _sweep_hopper(bench, workload, replace(table, attention=attention), inputs)
    return replace(table, attention=attention)


def _sweep_hopper(bench: Bench, workload: Workload, table: Tuning, inputs: list[Rows]) -> AttentionTuning:
    """The rule for the model's layers without a window."""
    heads, kv_heads, dim = workload.large.heads
    rules = list(table.attention.prefill_hopper)
    shape = (bench.dtype.itemsize, dim, heads // kv_heads)
    number = next((n for n, rule in enumerate(rules) if rule.fits(*shape) and rule.fits_scores(0, False)), None)
    if number is None or (present := rules[number].config) is None:
        return table.attention
    candidates = [
        replace(present, tile=tile, stages=stages, ping_pong=turns)
        for (tile, stages), turns in itertools.product(((128, 2), (64, 4), (64, 3), (64, 2)), (True, False))
    ]

    def with_config(config: HopperPrefillConfig) -> AttentionTuning:
        changed = [*rules[:number], replace(rules[number], config=config), *rules[number + 1 :]]
        return replace(table.attention, prefill_hopper=tuple(changed))

    def case(rows: Rows) -> Callable[[HopperPrefillConfig], list[Call]]:
        def calls(config: HopperPrefillConfig) -> list[Call]:
            with using(replace(table, attention=with_config(config))):
                return _prefill_calls(bench, rows, bench.num_sms, is_hopper=True, config=None)

        return calls

    return with_config(bench.fastest("prefill on Hopper", present, candidates, [case(rows) for rows in inputs]))


def _prefill_candidates(config: PrefillConfig) -> list[PrefillConfig]:
    """Candidates with the same number of query rows, which Hopper's kernel shares."""
    found = [replace(config, num_stages=stages, programs_per_sm=n) for stages, n in ((2, 1), (3, 1), (3, 2))]
    return [*found, replace(config, tile=config.tile * 2, programs_per_sm=1), replace(config, tile=config.tile // 2)]


def _prefill_calls(bench: Bench, rows: Rows, num_sms: int, *, is_hopper: bool, config: PrefillConfig | None) -> list[Call]:
    programs = num_sms * config.programs_per_sm if config is not None else None
    workspace = PrefillWorkspace.allocate(
        *(rows.rows, rows.tokens, *rows.heads, bench.device, bench.dtype),
        config=config,
        num_programs=programs,
        hopper=is_hopper,
    )
    prefill_schedule(workspace, rows.starts, rows.seq_lens, rows.tokens, rows.max_keys)
    return rows.calls(functools.partial(prefill_attention, workspace=workspace))


def _prefill_case(bench: Bench, table: Tuning, rows: Rows) -> Callable[[PrefillConfig], list[Call]]:
    def calls(config: PrefillConfig) -> list[Call]:
        with using(table):
            return _prefill_calls(bench, rows, bench.num_sms, is_hopper=False, config=config)

    return calls


def sweep_rope(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """The tile for few tokens, the tile for many, and the number of tokens that separates them."""
    tiles = table.attention.rope_tiles
    if len(tiles) != 2:
        return table
    (limit, few), (_, many) = tiles
    counts = [tokens for tokens in ROPE_TOKENS if tokens <= workload.most_tokens]
    cases = {tokens: _rope_case(bench, workload.large, tokens) for tokens in counts}
    few = bench.fastest("rope tile, few tokens", few, ROPE_TILES, [cases[n] for n in counts if n <= 128])
    if large := [cases[n] for n in counts if n >= 1024]:
        many = bench.fastest("rope tile, many tokens", many, ROPE_TILES, large)
    between = [tokens for tokens in counts if 128 < tokens < 1024]
    present = [limit] * bool(between)
    for tokens in between:
        chosen = bench.fastest(f"rope tile, {tokens} tokens", few if tokens <= limit else many, (few, many), [cases[tokens]])
        present = [tokens] if chosen == few and tokens > limit else present
        present = [max(128, tokens - 1)] if chosen != few and tokens <= limit else present
    limit = present[0] if present else limit
    return replace(table, attention=replace(table.attention, rope_tiles=((limit, few), (ANY, many))))


def _rope_case(bench: Bench, model: Model, tokens: int) -> Callable[[int], list[Call]]:
    heads, dim = model.q_heads + 2 * model.kv_heads, model.head_dim
    positions = torch.randint(0, 4096, (tokens,), device=bench.device, dtype=torch.int32)
    angles = bench.random(4096, dim, dtype=torch.float32)
    blocks = -(-tokens // BLOCK_SIZE)
    slots = torch.randperm(blocks * BLOCK_SIZE, device=bench.device)[:tokens]
    cache = bench.random(2, blocks, model.kv_heads, BLOCK_SIZE, dim)
    each = [bench.random(tokens, heads * dim) for _ in range(min(bench.copies(tokens * heads * dim * 2), 16))]

    def call(qkv: torch.Tensor, tile: int) -> torch.Tensor:
        rope_kv.rope_kv(qkv, positions, angles, slots, cache[0], cache[1], model.q_heads, tile=tile)
        return cache[1]

    return lambda tile: [functools.partial(call, qkv, tile) for qkv in each]


def sweep_elementwise(bench: Bench, workload: Workload, table: Tuning) -> Tuning:
    """Elements per warp of RMSNorm, and per program and per warp of SiLU."""
    part = table.elementwise
    rows = [min(rows, workload.most_tokens) for rows in (16, 256, 2048)]
    models = (workload.large, workload.small)
    norms = [_norm_case(bench, table, model.hidden, n) for model in models for n in rows]
    part = replace(part, norm_warp_elements=bench.fastest("norm warp", part.norm_warp_elements, (256, 512, 1024), norms))
    present = (part.silu_block, part.silu_warp_elements)
    options = [(block, elements) for block in (512, 1024, 2048, 4096) for elements in (256, 512) if block >= elements]
    products = [_silu_case(bench, model.intermediate, n) for model in models for n in rows]
    block, elements = bench.fastest("silu block, warp", present, options, products)
    return replace(table, elementwise=replace(part, silu_block=block, silu_warp_elements=elements))


def _norm_case(bench: Bench, table: Tuning, width: int, rows: int) -> Callable[[int], list[Call]]:
    pairs = [(bench.random(rows, width), bench.random(rows, width)) for _ in range(bench.copies(4 * rows * width))]
    weight = bench.random(width)

    def calls(elements: int) -> list[Call]:
        tuned = replace(table, elementwise=replace(table.elementwise, norm_warp_elements=elements))

        def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            with using(tuned):
                return norm.rms_norm(x, weight, 1e-6, out)

        return [functools.partial(call, *pair) for pair in pairs]

    return calls


def _silu_case(bench: Bench, width: int, rows: int) -> Callable[[tuple[int, int]], list[Call]]:
    copies = bench.copies(6 * rows * width)
    pairs = [(bench.random(rows, 2 * width), bench.random(rows, width)) for _ in range(copies)]

    def calls(config: tuple[int, int]) -> list[Call]:
        block, elements = config
        tuned = activation.Config(block, max(block // elements, 1))
        return [functools.partial(activation.silu_mul, *pair, config=tuned) for pair in pairs]

    return calls
