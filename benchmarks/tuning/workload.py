"""The products and heads that a table is tuned with: those of commonly served models, and of a tiny one for a dry run."""

from typing import NamedTuple


class Model(NamedTuple):
    """A decoder's sizes."""

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head size."""
        return self.q_heads, self.kv_heads, self.head_dim

    @property
    def products(self) -> "list[Product]":
        """The products of a layer, and the head."""
        width = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        return [
            Product("qkv", width, self.hidden),
            Product("o", self.hidden, self.q_heads * self.head_dim, split_k=True),
            Product("gate_up", 2 * self.intermediate, self.hidden, is_gated=True),
            Product("down", self.hidden, self.intermediate, split_k=True),
            Product("head", self.vocab, self.hidden),
        ]


class Product(NamedTuple):
    """x [M, k] @ W^T [k, n]. split_k: a norm follows, which can add up the partial sums of a product split over K."""

    name: str
    n: int
    k: int
    is_gated: bool = False
    split_k: bool = False

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.n // 2 if self.is_gated else self.n


class Mixture(NamedTuple):
    """Sizes of a layer of experts."""

    hidden: int
    intermediate: int  # of each
    experts: int
    top_k: int


class Workload(NamedTuple):
    small: Model  # Qwen3-0.6B
    large: Model  # Llama-3.1-8B
    middle: Model  # Qwen3-1.7B
    most_tokens: int  # of a step
    most_rows: int  # of a step with attention
    longest: int  # keys of a row
    mixtures: tuple[Mixture, ...]  # Qwen3-30B-A3B, DeepSeek-V2-Lite


SERVED = Workload(
    small=Model(1024, 3072, 16, 8, 128, 151936),
    large=Model(4096, 14336, 32, 8, 128, 128256),
    middle=Model(2048, 6144, 16, 8, 128, 151936),
    most_tokens=8192,
    most_rows=1024,
    longest=32768,
    mixtures=(Mixture(2048, 768, 128, 8), Mixture(2048, 1408, 64, 6)),
)
_TINY = Model(16, 32, 2, 1, 16, 48)
DRY_RUN = Workload(
    small=_TINY, large=_TINY, middle=_TINY, most_tokens=80, most_rows=2, longest=48, mixtures=(Mixture(16, 16, 4, 2),)
)
