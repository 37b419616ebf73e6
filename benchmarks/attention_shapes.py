"""The batches that the benchmarks of attention measure: rows of (keys, queries), with the heads of models people run."""

from dataclasses import dataclass

import torch

from quire.kernels.attention.score_shape import ScoreShape

LLAMA, QWEN_06B, SMALL_HEADS, WIDE_HEADS = (32, 8, 128), (16, 8, 128), (32, 8, 64), (16, 8, 256)


@dataclass(frozen=True)
class AttentionShape:
    name: str
    rows: tuple[tuple[int, int], ...]  # (keys, queries)
    heads: tuple[int, int, int] = LLAMA  # query heads, KV heads, head size
    block_size: int = 64
    window: int = 0
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    softcap: float = 0.0
    sinks: bool = False

    @property
    def scores(self) -> ScoreShape:
        return ScoreShape(
            self.softcap, sinks=torch.zeros(self.heads[0], device="cuda", dtype=self.dtype) if self.sinks else None
        )

    @property
    def uniform(self) -> bool:
        return len(set(self.rows)) == 1

    def visible(self) -> tuple[int, int]:
        """(keys read, pairs computed) by one head."""
        keys = pairs = 0
        for seq_len, query_len in self.rows:
            window = self.window or seq_len
            first = max(0, seq_len - query_len - window + 1)
            keys += seq_len - first
            pairs += sum(min(position + 1, window) for position in range(seq_len - query_len, seq_len))
        return keys, pairs


def same(n: int, keys: int, queries: int = 1) -> tuple[tuple[int, int], ...]:
    return ((keys, queries),) * n


SKEWED = same(1, 32768) + same(4, 8192) + same(59, 512)
RAGGED = tuple((128 + 37 * i % 2000, 1) for i in range(128))
DECODE = [
    AttentionShape("64 x 4096", same(64, 4096)),
    AttentionShape("64 x 4096", same(64, 4096), block_size=16),
    AttentionShape("256 x 512", same(256, 512)),
    AttentionShape("256 x 512", same(256, 512), block_size=16),
    AttentionShape("256 x 192", same(256, 192)),
    AttentionShape("1 x 32768", same(1, 32768)),
    AttentionShape("1 x 32768", same(1, 32768), block_size=16),
    AttentionShape("skewed 64 rows", SKEWED),
    AttentionShape("ragged 128 rows", RAGGED),
    AttentionShape("1 x 256", same(1, 256)),
    AttentionShape("1 x 384", same(1, 384)),
    AttentionShape("1 x 2048", same(1, 2048)),
    AttentionShape("16 x 1024", same(16, 1024)),
    AttentionShape("16 x 256", same(16, 256)),
    AttentionShape("32 x 256", same(32, 256)),
    AttentionShape("64 x 192", same(64, 192)),
    AttentionShape("64 x 320", same(64, 320)),
    AttentionShape("64 x 4096, 4 queries", same(64, 4096, 4)),
    AttentionShape("64 x 4096, 8 queries", same(64, 4096, 8)),
    AttentionShape("64 x 8192, window 1024", same(64, 8192), window=1024),
    AttentionShape("64 x 4096, fp8 cache", same(64, 4096), cache_dtype=torch.float8_e4m3fn),
    AttentionShape("0.6B: 1 x 256", same(1, 256), QWEN_06B),
    AttentionShape("0.6B: 64 x 256", same(64, 256), QWEN_06B),
    AttentionShape("0.6B: 64 x 1024", same(64, 1024), QWEN_06B),
    AttentionShape("0.6B: 256 x 512", same(256, 512), QWEN_06B),
    AttentionShape("0.6B: 256 x 192", same(256, 192), QWEN_06B),
    AttentionShape("D 64: 64 x 4096", same(64, 4096), SMALL_HEADS),
    AttentionShape("D 256: 64 x 2048", same(64, 2048), WIDE_HEADS),
]
PREFILL = [
    AttentionShape("8 x 4096", same(8, 4096, 4096)),
    AttentionShape("8 x 4096", same(8, 4096, 4096), block_size=16),
    AttentionShape("64 x 128", same(64, 128, 128)),
    AttentionShape("16 x 512", same(16, 512, 512)),
    AttentionShape("4 x 2048", same(4, 2048, 2048)),
    AttentionShape("1 x 8192", same(1, 8192, 8192)),
    AttentionShape("1 x 32768", same(1, 32768, 32768)),
    AttentionShape("ragged 16 rows", tuple((100 + 131 * i, 100 + 131 * i) for i in range(16))),
    AttentionShape("2048 behind 30720", same(1, 32768, 2048)),
    AttentionShape("64 behind 8128", same(1, 8192, 64)),
    AttentionShape("8 x 4096, window 1024", same(8, 4096, 4096), window=1024),
    AttentionShape("8 x 4096, fp8 cache", same(8, 4096, 4096), cache_dtype=torch.float8_e4m3fn),
    AttentionShape("0.6B: 8 x 4096", same(8, 4096, 4096), QWEN_06B),
    AttentionShape("0.6B: 8 x 1024", same(8, 1024, 1024), QWEN_06B),
    AttentionShape("D 64: 8 x 4096", same(8, 4096, 4096), SMALL_HEADS),
    AttentionShape("D 256: 8 x 4096", same(8, 4096, 4096), WIDE_HEADS),
]
GPT_OSS, GEMMA_9B, GEMMA_27B = (64, 8, 64), (16, 8, 256), (32, 16, 128)
ODD_PREFILL = [  # what Hopper's kernel has features for
    AttentionShape("8 x 4096, window 1024", same(8, 4096, 4096), window=1024),
    AttentionShape("2 x 8192, window 4096", same(2, 8192, 8192), window=4096),
    AttentionShape("64 behind 8128, window 1024", same(1, 8192, 64), window=1024),
    AttentionShape("gpt-oss: 4 x 4096, sinks", same(4, 4096, 4096), GPT_OSS, sinks=True),
    AttentionShape("gpt-oss: 4 x 4096, window 128", same(4, 4096, 4096), GPT_OSS, window=128, sinks=True),
    AttentionShape("gpt-oss: 64 x 128, window 128", same(64, 128, 128), GPT_OSS, window=128, sinks=True),
    AttentionShape("D 256: 4 x 4096", same(4, 4096, 4096), GEMMA_9B),
    AttentionShape("D 256: 64 x 128", same(64, 128, 128), GEMMA_9B),
    AttentionShape("Gemma 2 9B: 4 x 4096, capped", same(4, 4096, 4096), GEMMA_9B, softcap=50.0),
    AttentionShape("Gemma 2 9B: window 4096", same(2, 8192, 8192), GEMMA_9B, window=4096, softcap=50.0),
    AttentionShape("Gemma 2 27B: 4 x 4096, capped", same(4, 4096, 4096), GEMMA_27B, softcap=50.0),
    AttentionShape("Gemma 3 12B: window 1024", same(4, 4096, 4096), GEMMA_9B, window=1024),
    AttentionShape("Gemma 3 12B: fp8 cache", same(4, 4096, 4096), GEMMA_9B, window=1024, cache_dtype=torch.float8_e4m3fn),
    AttentionShape("group of 3: 4 x 4096", same(4, 4096, 4096), (24, 8, 128)),
    AttentionShape("group of 3: 80 x 100", same(80, 100, 100), (24, 8, 128)),
    AttentionShape("group of 5: 4 x 4096", same(4, 4096, 4096), (40, 8, 128)),
    AttentionShape("group of 6: 4 x 4096", same(4, 4096, 4096), (12, 2, 128)),
    AttentionShape("group of 7: 4 x 4096", same(4, 4096, 4096), (28, 4, 128)),
    AttentionShape("Falcon 7B: 4 x 2048", same(4, 2048, 2048), (71, 1, 64)),
    AttentionShape("Falcon 7B: 64 behind 1984", same(4, 2048, 64), (71, 1, 64)),
    AttentionShape("D 96: 4 x 4096", same(4, 4096, 4096), (32, 32, 96)),
    AttentionShape("D 80: 4 x 2048", same(4, 2048, 2048), (32, 32, 80)),
]


def describe(shape: AttentionShape) -> str:
    return f"{shape.name:26s} {shape.heads[0]:2d}/{shape.heads[1]}/{shape.heads[2]:3d} block {shape.block_size:3d}"
