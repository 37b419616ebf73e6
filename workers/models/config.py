"""ModelConfig: the frozen description of a model that its blocks, the KV cache, attention and the runner are built from.

It says what each layer computes (`LayerSpec`), not which family it is of: a family's file reads config.json into it
(families.py). Layers with equal specs are of one kind: they run the same kernels, and their attention shares its workspace.
"""

from typing import Literal, NamedTuple

import msgspec

from quire.kernels.experts.experts_reference import SwiGLU
from quire.kernels.experts.routing_reference import Routing
from quire.workers.layers.formats.schemes import Quantization
from quire.workers.parallel import Parallel

RopeType = Literal["default", "linear", "llama3", "yarn"]
CacheDtype = Literal["fp8_e4m3", "fp8_e5m2"]


class ModelConfigError(ValueError):
    """The model cannot be served; the text names the field and is meant for the user."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. Fields that `type` does not use are ignored, as transformers ignores them."""

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: derived from factor, mscale and mscale_all_dim
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


class CacheSpec(NamedTuple):
    """What layers must agree in to share a block table: what they keep of a token, and for how long."""

    window: int
    num_kv_heads: int
    head_dim: int


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's attention: everything its kernels, its rotary table and its cache depend on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the products q·k
    window: int  # 0 sees everything, otherwise the last `window` tokens, the token itself included
    rope: RopeConfig
    qk_norm_eps: float | None = None  # of an RMSNorm of each head of q and k before the rotation; None: there is none
    cache_dtype: CacheDtype | None = None  # of keys and values in the cache; None: the activations'

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(self.window, self.num_kv_heads, self.head_dim)

    def on_rank(self, parallel: Parallel) -> "AttentionSpec":
        """The same with the heads that this rank holds."""
        heads, kv_heads = parallel.split(self.num_heads), parallel.kv_heads(self.num_kv_heads)
        return msgspec.structs.replace(self, num_heads=heads.size, num_kv_heads=kv_heads.size)


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's mixture of experts."""

    routing: Routing
    intermediate_size: int  # of each expert
    shared_size: int = 0  # of the experts that every token passes, together
    act: SwiGLU = SwiGLU()


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer, as its family's block is to build it."""

    attention: AttentionSpec
    intermediate_size: int
    experts: ExpertsSpec | None = None  # in place of the MLP
    attention_bias: bool = False  # of which projections, the block says
    mlp_bias: bool = False

    def mlp_width(self, hidden_size: int) -> int:
        """Of an MLP that takes as much memory for a token, about: of experts, what is computed of each of the token's."""
        if self.experts is None:
            return self.intermediate_size
        e = self.experts
        return e.shared_size + e.routing.top_k * (e.intermediate_size + hidden_size) // 2


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer as its checkpoint describes it."""

    architecture: str  # key of families.FAMILIES
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    dtype: str | None  # float32, bfloat16, float16; None: config.json does not say
    quantization: Quantization | None = None  # of the weights

    def attention_specs(self, parallel: Parallel) -> list[AttentionSpec]:
        """Of each layer, with the heads of this rank."""
        return [layer.attention.on_rank(parallel) for layer in self.layers]
