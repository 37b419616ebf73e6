"""The contents of a GPU's tuning table: which kernel a shape gets and how it is tiled, by number of rows, columns and bytes.

A table is a value, made once for a GPU: `default.py`, `h200.py` and `h100.py` are tables, `benchmarks/tuning/tune.py` makes one
on the GPU at hand, and `current.py` chooses the one in force. The kernels' launchers read it. A table decides speed and, where
it decides the order of a sum, last bits; never whether a kernel can be used at all: the launchers decide that.

Rules are read in order; the first that fits decides. "Rows" are those of x in x @ W^T, W [N, K] has N "columns" of the output
and N * K elements of "weight". Ranges (first, last) include both ends.
"""

import msgspec

from quire.kernels.tuning.configs import (
    DecodeConfig,
    HopperPrefillConfig,
    PairConfig,
    PrefillConfig,
    RowConfig,
    SkinnyConfig,
    SplitConfig,
    TilesConfig,
    WideConfig,
)

BF16 = "bf16"  # dense weights of 16 bits, bfloat16 or float16
ANY = 1 << 62  # no limit

Ranges = tuple[tuple[int, int], ...]
Sizes = tuple[tuple[int, int, int], ...]  # (first, end, step), like range's arguments


class SkinnyRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of `linear` for at most max_rows rows, max_columns and max_weight, and K of at least min_k.

    gated: only products that are gated, or that are not; None: both.
    """

    config: SkinnyConfig
    max_rows: int
    max_columns: int = ANY
    min_k: int = 0
    max_weight: int = ANY
    gated: bool | None = None

    def fits(self, rows: int, n: int, k: int, is_gated: bool) -> bool:
        """Whether this rule applies to rows of x [rows, K] @ W^T [K, n]."""
        if rows > self.max_rows or n > self.max_columns or k < self.min_k or n * k > self.max_weight:
            return False
        return self.gated is None or self.gated == is_gated


class StreamTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `linear_hopper`: a program fills its share of an SM's shared memory with tiles of W."""

    max_rows: int  # with more rows cuBLAS is as fast; at most 64
    min_columns: int  # of a product that is not split over K: fewer are too few programs
    min_parts_columns: int  # of a product that may be split over K, at 2 to 4 rows; below, the vector kernel is faster
    block_k: int
    sharing: int  # programs an SM
    gated_sharing: int
    max_parts: tuple[tuple[int, int], ...]  # (rows up to, splits of K at most), rows ascending


class SplitTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the norm after a product adds up its split-K partial sums (`split_linear`), where `linear_hopper` is not used."""

    config: SplitConfig
    small_columns: int  # a product is small with at most these columns
    small_weight: int  # and at most these elements: our own kernel computes 17 to 64 rows
    max_columns: int  # of any product that is split as a batch
    batched_small: tuple[tuple[int, int, int], ...]  # (first row, last row, splits), beyond 64 rows: by cuBLAS as a batch
    batched_large: tuple[tuple[int, int, int], ...]


class LinearTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Products with weights of one format."""

    skinny: tuple[SkinnyRule, ...]
    stream: StreamTuning
    split: SplitTuning
    cublaslt_columns: int  # of input and output: cuBLAS computes narrower products
    cublaslt_rows: Ranges  # for which cuBLASLt is faster than cuBLAS
    norm_linear_weight: int  # elements up to which one row's norm and product are faster in one kernel
    norm_linear_tiles: tuple[tuple[int, int, int], ...]  # (K up to, output columns of a program, warps), K ascending
    prefetch_weight: int = 0  # elements up to which W is prefetched to L2, for few rows, ahead of the programs that read it


class ScaledTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Products with quantized weights: the rows up to which our kernels are faster than cuBLAS, if that can compute them."""

    fp8_rows: int
    fp8_block_rows: int  # with 2-D scale groups (128 x 128)
    int8_rows: int
    int4_rows: int  # by `int4_wide`; for cuBLAS a weight is dequantized first
    fused_weight: int  # elements up to which one row is quantized to 8 bits within the product
    # On a Hopper `scaled_wide` computes 65 to this many rows, regardless of the three limits of fp8 and int8 above; 0: none.
    fp8_wide_rows: int = 192
    fp8_gated_wide_rows: int = 384  # gate and up, with scales of rows
    fp8_block_wide_rows: int = 192
    int8_wide_rows: int = ANY  # torch._int_mm takes 1.4 to 1.7 times as long, at 1,024 and 8,192 rows
    ring_weight: int = 1 << 24  # elements from which one row goes to Hopper's ring, not to many small programs


class DecodeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Configurations of decode attention, in ascending order of programs an SM (`decode_schedule`)."""

    configs: tuple[DecodeConfig, ...]
    query_bytes: int  # of an element of q
    cache_bytes: int | None = None  # of an element of the cache; None: any
    max_head_dim: int = ANY
    min_query_rows: int = 0  # queries of a row x heads of a group

    def fits(self, query_bytes: int, cache_bytes: int, head_dim: int, query_rows: int) -> bool:
        if query_bytes != self.query_bytes or self.cache_bytes not in (None, cache_bytes):
            return False
        return head_dim <= self.max_head_dim and query_rows >= self.min_query_rows


class PrefillRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of the portable prefill attention; a query tile has at least a group's heads."""

    config: PrefillConfig
    query_bytes: int
    cache_bytes: int | None = None
    max_head_dim: int = ANY

    def fits(self, query_bytes: int, cache_bytes: int, head_dim: int) -> bool:
        return query_bytes == self.query_bytes and self.cache_bytes in (None, cache_bytes) and head_dim <= self.max_head_dim


class HopperPrefillRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How Hopper's own prefill attention is tiled for layers; config None: the portable kernel is used, as it is as fast."""

    config: HopperPrefillConfig | None
    cache_bytes: int | None = None  # of an element of the cache; None: any
    max_head_dim: int = ANY
    max_group: int = ANY  # query heads of a KV head
    max_window: int = ANY
    capped: bool | None = None  # only layers that cap their scores, or that do not; None: both

    def fits(self, cache_bytes: int, head_dim: int, group: int) -> bool:
        return self.cache_bytes in (None, cache_bytes) and head_dim <= self.max_head_dim and group <= self.max_group

    def fits_scores(self, window: int, is_capped: bool) -> bool:
        """window 0 counts as the longest."""
        return (window or ANY) <= self.max_window and self.capped in (None, is_capped)


class AttentionTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    decode: tuple[DecodeRule, ...]
    prefill: tuple[PrefillRule, ...]
    prefill_hopper: tuple[HopperPrefillRule, ...]
    min_split_tiles: int  # KV tiles of the portable prefill that a program must save for a reduction of partial sums to pay
    rope_tiles: tuple[tuple[int, int], ...]  # (tokens up to, elements of a program's tile of heads), tokens ascending


WideRules = tuple[tuple[float, WideConfig | None], ...]  # (rows an expert gets on average, up to), ascending


class ExpertsTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which kernels compute a layer of experts."""

    pair_rows: int  # up to which each pair of row and expert is a product of its own; at most 16
    pair: PairConfig
    tiles: tuple[tuple[float, TilesConfig], ...]  # (rows an expert gets on average, up to), ascending; the last has no limit
    exact: TilesConfig  # of float32
    # For Hopper; if no rule fits, or its config is None, `tiles` and `four_bits_tiles` are as fast.
    wide: WideRules = ()
    wide_four_bits: WideRules = ()
    row: RowConfig = RowConfig(0, 0, 4, 8)  # of 16-bit weights on a Hopper
    four_bits_row: RowConfig = RowConfig(0, 4, 4, 12)
    scaled_row: RowConfig = RowConfig(0, 0, 4, 6)
    router_rows: int = 0  # up to which the router's logits and choice are one launch


class ElementwiseTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    norm_warp_elements: int  # elements of a row that a warp of RMSNorm takes
    silu_block: int  # elements of a program
    silu_warp_elements: int
    embedding_block: int  # elements of a program, at most


class StepTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steps as a whole: the sizes they are padded to, which are captured, how their kernels follow one another."""

    decode_sizes: Sizes  # of decode steps, in rows
    mixed_sizes: Sizes  # of mixed steps, in tokens
    slow_sizes: tuple[int, ...]  # excluded from both: products of the next larger size take less time
    captured_tokens: int  # of a mixed step captured in advance, and of any step if the model is large
    large_weights_bytes: int  # of a model that computes captured_tokens as long as the host takes for an eager step's launches
    early_rows: int  # up to which the next kernel of a chain begins before the wait (`dependent_launch`)
    dependent_rows: int  # up to which launches are dependent, where `linear_hopper` does not compute the products


class ExchangeTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sums over ranks that the norm's kernel computes (`all_reduce_norm`); more rows than fit one launch take several."""

    rows: tuple[tuple[int, int, int], ...]  # (ranks up to, rows of a launch: one-shot up to, two-shot up to), ranks ascending

    def max_rows(self, ranks: int) -> tuple[int, int]:
        """Rows of one-shot, and of two-shot, a multiple of the ranks; 0: never. Both 0: NCCL is always faster."""
        one, two = next(((one, two) for most, one, two in self.rows if ranks <= most), (0, 0))
        return one, two // ranks * ranks

    def kernel(self, ranks: int, rows: int) -> int:
        """A number that is equal for steps that exchange by the same kernel: 0 one-shot, 1 two-shot, 2 NCCL's."""
        one, two = self.max_rows(ranks)
        return 2 if one == two == 0 else int(two > 0 and rows > one)


# One-shot sends (ranks - 1) times a row from each rank; two-shot less than twice, and waits twice. Estimated for eight.
EXCHANGE = ExchangeTuning(rows=((2, 2048, 0), (4, 16, 2048), (8, 8, 2048)))


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU's table."""

    devices: tuple[str, ...]  # names as CUDA reports them; none: any GPU
    linear: dict[str, LinearTuning]  # by weight format
    scaled: ScaledTuning = ScaledTuning(fp8_rows=64, fp8_block_rows=64, int8_rows=512, int4_rows=512, fused_weight=1 << 23)
    attention: AttentionTuning
    experts: ExpertsTuning
    elementwise: ElementwiseTuning
    step: StepTuning
    exchange: ExchangeTuning = EXCHANGE
    fixed_order: bool = False  # every sum has one order, whatever the number of rows (fixed.py)


def padded_sizes(sizes: Sizes, limit: int) -> list[int]:
    """The sizes below limit, ascending."""
    return [size for first, end, step in sizes for size in range(first, min(end, limit), step)]
