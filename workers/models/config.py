"""ModelConfig: the frozen description of a model, from which its blocks, KV cache, attention and runner are built.

It describes what each layer computes (`LayerSpec`), not its family: the family's file reads config.json into it
(family_table.py). Layers with equal specs are of one kind: they run the same kernels, and their attention shares a workspace.
"""

from typing import Literal, NamedTuple

import msgspec

from quire.kernels.elementwise.activation_cpu import Activation
from quire.kernels.elementwise.norm_reference import Weighs
from quire.kernels.experts.experts_reference import Act, SwiGLU
from quire.kernels.experts.routing_reference import Routing
from quire.workers.layers.heads import HeadSpec
from quire.workers.layers.norm import NormSpec
from quire.workers.loading.names import CheckpointNames
from quire.workers.loading.quantized.schemes import Quantization
from quire.workers.models.media.spec import MediaSpec
from quire.workers.parallel import Parallel

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
CacheDtype = Literal["fp8_e4m3", "fp8_e5m2"]


class ModelConfigError(ValueError):
    """The model cannot be served; the text, for the user, names the field."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. Fields that `type` does not use are ignored, as transformers ignores them."""

    type: RopeType = "default"
    rotary_dim: int = 0  # number of elements, the first of a head, that are rotated; 0: all
    interleaved: bool = False  # pairs are neighbors (x[2i], x[2i + 1]); otherwise (x[i], x[i + rotary_dim / 2])
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope; None: derived from factor, and yarn's from the mscales
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, if no sequence may be longer than the original positions
    long_factor: tuple[float, ...] = ()  # longrope otherwise
    axes: tuple[int, ...] = ()  # the axis of each pair's position (media/spec.py); empty: positions are plain
    proportion: float = 1.0  # proportional: share of a head's pairs that rotate, the first ones; frequencies of the whole head


class AlibiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attention with linear biases: adds slope * (key position - query position) to scores. Press et al., arXiv:2108.12409."""

    slopes: tuple[float, ...]  # of the query heads
    scale: float = 1.0  # of the biases
    is_rounded: bool = False  # slope, position and product are rounded to bfloat16, in every dtype of the model


class TemperatureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Queries times 1 + beta * log(1 + floor((position + first) / original_max_position_embeddings)): Llama 4's temperature."""

    beta: float
    original_max_position_embeddings: int
    first: int = 0  # the number of the first position


class CacheSpec(NamedTuple):
    """The properties that layers must share to share a block table: what they store for a token, and for how long."""

    window: int
    num_kv_heads: int
    head_dim: int
    is_chunked: bool = False  # see AttentionSpec
    latent_dim: int = 0  # not 0: values are the last latent_dim of an entry's head_dim elements, and none are stored apart


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's attention: everything its kernels, its rotary table and its cache depend on.

    Norms over all heads, and learned tensors such as attention sinks, belong to the block (blocks.SelfAttention).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the products q·k
    window: int  # 0 sees everything, -1 all but the first; otherwise the last `window` tokens, the token itself included
    is_causal: bool = True  # False: a token sees those after it, too, with a window as many as before it, and nothing is cached
    is_chunked: bool = False  # a token sees its chunk of `window` tokens up to itself
    sees_ahead: bool = False  # a token of an item sees those behind it, too, up to the end of the item's span
    rope: RopeConfig | None  # None: nothing is rotated
    qk_norm_eps: float | None = None  # of an RMSNorm of each head of q and k before the rotation; None: there is none
    qk_norm_weighs: Weighs = "rounded"  # how that norm's weights are applied
    has_qk_weights: bool = True  # whether that norm has weights
    softcap: float = 0.0  # scores are softcap * tanh(score / softcap); 0: none
    alibi: AlibiConfig | None = None
    temperature: TemperatureConfig | None = None  # of queries, by their positions, after the rotation
    has_sinks: bool = False  # a learned logit for each head, which every query sees
    latent_dim: int = 0  # latent attention (mla.py): values are the last latent_dim elements of keys; 0: not latent
    shares: int | None = None  # the layer that it reads keys and values from; None: it has its own
    cache_dtype: CacheDtype | None = None  # of keys and values in the cache; None: the activations'

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def is_there(self) -> bool:
        """False for NO_ATTENTION, with whatever changed."""
        return self.num_heads > 0

    @property
    def has_cache(self) -> bool:
        """Whether the layer stores keys and values of its own."""
        return self.is_there and self.shares is None and self.is_causal

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(self.window, self.num_kv_heads, self.head_dim, self.is_chunked, self.latent_dim)

    def on_rank(self, parallel: Parallel) -> "AttentionSpec":
        """The same spec with the heads of this rank."""
        if not self.is_there:
            return self
        heads, kv_heads = parallel.split(self.num_heads), parallel.kv_heads(self.num_kv_heads)
        alibi = self.alibi and msgspec.structs.replace(self.alibi, slopes=self.alibi.slopes[heads.slice])
        return msgspec.structs.replace(self, num_heads=heads.size, num_kv_heads=kv_heads.size, alibi=alibi)


# The spec of a layer without attention: it has no heads.
NO_ATTENTION = AttentionSpec(num_heads=0, num_kv_heads=0, head_dim=0, scale=1.0, window=0, rope=None)


class StateTensor(NamedTuple):
    """A tensor of a recurrent layer's state: of one sequence, on one rank."""

    shape: tuple[int, ...]
    is_recurrent: bool  # in the states' dtype; False: in the activations', as the inputs that a convolution looks back at


class RecurrentSpec(msgspec.Struct, frozen=True):
    """Base of a recurrent layer's sizes, which its mixer's file defines. Layers of equal specs run the same kernels."""

    def tensors(self, parallel: Parallel) -> tuple[StateTensor, ...]:
        """The state that the layer keeps for a sequence on this rank."""
        raise NotImplementedError

    def kept_sizes(self, parallel: Parallel) -> tuple[int, ...]:
        """Elements of each tensor that the layer keeps of a token of a window, in the activations' dtype, on this rank."""
        raise NotImplementedError

    def mlp_width(self, parallel: Parallel) -> int:
        """Width of a plain MLP that takes about as much memory per token on this rank; 0: no more than others of the layer."""
        return 0

    def misfit(self, size: int) -> str | None:
        """The first number that cannot be split over `size` ranks, as text; None if all can."""
        raise NotImplementedError


class LatentSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Elements in latent attention (mla.py)."""

    nope: int  # of a head's query and key, not rotated
    rotary: int  # of a head's query and key, rotated
    value: int  # of a head's value
    latent: int  # of the latent that a token's keys and values are made of
    q_latent: int  # of the latent that queries are made of; 0: they are made of the hidden state


class ValueHeads(NamedTuple):
    """Values with fewer elements than keys. Kernels and the cache have them padded with zeros to the keys' size."""

    head_dim: int
    scale: float = 1.0  # factor of values


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's mixture of experts."""

    routing: Routing
    intermediate_size: int  # of each expert
    shared_size: int = 0  # of the shared experts, which every token passes, together
    latent_size: int = 0  # elements of what experts read and write, projected from and to the hidden state; 0: the state itself
    act: Act = SwiGLU()
    weighs_input: bool = False  # weights multiply an expert's input, not its output
    has_correction: bool = True  # of the router's scores, where the family's may have one
    has_bias: bool = False  # the shared experts, and the projections to a latent and from it


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layer, as its family's block builds it."""

    attention: AttentionSpec  # NO_ATTENTION if it has none
    recurrent: RecurrentSpec | None = None  # beside attention or in its place
    intermediate_size: int
    experts: ExpertsSpec | None = None  # in place of the MLP
    latent: LatentSizes | None = None  # of the projections around latent attention
    attention_bias: bool = False  # the block decides of which projections
    output_bias: bool | None = None  # of attention's output projection in LlamaBlock; None: as attention_bias
    mlp_bias: bool = False
    down_bias: bool | None = None  # of the MLP's last product in an encoder; None: as mlp_bias
    activation: Activation = "silu"  # of the MLP
    has_gate: bool = True  # whether the MLP has one, in an encoder that is published with and without
    norms_qk: bool = False  # by a norm of the block, if the attention's spec has none
    values: ValueHeads | None = None  # if their heads have another size than keys'
    keys_are_values: bool = False  # before QK-norm and rotation
    is_parallel: bool = False  # attention and MLP see the same input
    has_mlp_norm: bool = True  # without one, a parallel block norms once for both

    def mlp_width(self, hidden_size: int, parallel: Parallel) -> int:
        """Width of a plain MLP that takes about as much memory per token on this rank. For a mixture, this assumes that all
        experts of a token are here."""
        if self.experts is None:
            recurrent = 0 if self.recurrent is None else self.recurrent.mlp_width(parallel)
            return max(self.intermediate_size // parallel.size, recurrent)
        e = self.experts
        inner = parallel.of_each_expert(e.intermediate_size).size
        return e.shared_size // parallel.size + e.routing.top_k * (inner + (e.latent_size or hidden_size)) // 2


class PerLayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of each layer besides the residual stream (per_layer_inputs.py)."""

    size: int  # elements for one layer
    vocab_size: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The modules around the layers, and the norms within them, as the family's file reads them."""

    norm: NormSpec
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # to the embedding's dtype
    embedding_norm: NormSpec | None = None
    per_layer: PerLayerSpec | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits are softcap * tanh(logit / softcap); 0: none


class MergedAdapter(NamedTuple):
    """Which of a checkpoint's adapters is added to its weights, and by which factor."""

    task: int
    scale: float


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about what an encoder has around its layers besides the modules of `ModelSpec` (encoder.py)."""

    num_positions: int = 0  # rows of the table of learned positions; 0: none
    first_position: int = 0  # the table's row of a text's first token
    num_token_types: int = 0  # rows of the table of token types; 0: none
    num_buckets: int = 0  # of a bias by relative position, which all layers share; 0: none
    has_final_norm: bool = False
    head: HeadSpec | None = None  # None: it ends with the hidden states
    adapter: MergedAdapter | None = None


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The heads behind the layers of a model that pools: over the vocabulary, of labels, or neither."""

    generates: bool = False
    num_labels: int = 0  # 0: no head of labels
    has_bias: bool = False  # of that head
    label_tokens: tuple[int, ...] = ()  # their rows of the head over the vocabulary are the weights of the labels'
    is_reward: bool = False  # the head of labels has two products
    is_difference: bool = False  # there are two such tokens, and one score: of the second one over the first


class MTPSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of a checkpoint that predict a further token, as a drafter uses them (speculation/mtp.py)."""

    layers: tuple[LayerSpec, ...]  # of the first further token: blocks of the model's kind, one of them with attention
    # (in the checkpoint under the model's names, in the drafter): of mtp.enorm, mtp.hnorm, mtp.fc, mtp.norm and mtp.layers
    prefixes: tuple[tuple[str, str], ...]
    hidden_first: bool = False  # its input is the hidden state beside the embedding, in this order; else the other way round
    before_norm: bool = False  # it reads the hidden state before the model's final norm; else the one behind it
    why_not: str | None = None  # why these layers cannot be served, for the user; None: they can


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer, or an encoder, as its checkpoint describes it."""

    architecture: str  # key of family_table.FAMILIES, if transformers_config is None
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    model: ModelSpec
    names: CheckpointNames
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    dtype: str | None  # float32, bfloat16, float16; None: config.json does not say
    quantization: Quantization | None = None  # of the weights
    transformers_config: str | None = None  # the text of config.json, if transformers' model is run
    state_dtype: str | None = None  # of recurrent states; None: config.json does not say, so float32
    longest: int | None = None  # most positions that the model has, if fewer than its config says
    encoder: EncoderSpec | None = None  # None: it is a decoder
    pooling: PoolingSpec | None = None  # None: it generates, and does not pool
    mtp: MTPSpec | None = None  # None: no layers that predict further tokens are known of its family
    task_adapter: str | None = None  # folder of an adapter that is added to the weights
    media: MediaSpec | None = None  # None: it takes text alone

    @property
    def num_axes(self) -> int:
        """Axes of rotary positions; 0: they are plain."""
        return 0 if self.media is None or self.media.axes is None else len(self.media.axes.sections)

    @property
    def sees_ahead(self) -> bool:
        """Whether tokens of an item see each other in some layer."""
        return any(layer.attention.sees_ahead for layer in self.layers)

    @property
    def of_items(self) -> tuple[int, bool]:
        """The fields of items that a step's buffers must hold."""
        return self.num_axes, self.sees_ahead

    @property
    def rms_norm_eps(self) -> float:
        return self.model.norm.eps

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: not by a model that only pools."""
        return self.encoder is None and (self.pooling is None or self.pooling.generates)

    def attention_specs(self, parallel: Parallel) -> list[AttentionSpec]:
        """Each layer's spec, with the heads of this rank."""
        return [layer.attention.on_rank(parallel) for layer in self.layers]

    def state_tensors(self, parallel: Parallel) -> dict[int, tuple[StateTensor, ...]]:
        """The state of each layer that keeps one, on this rank; layers of all stages."""
        recurrent = {i: layer.recurrent for i, layer in enumerate(self.layers)}
        return {i: spec.tensors(parallel) for i, spec in recurrent.items() if spec is not None}

    def kept_sizes(self, parallel: Parallel) -> dict[int, tuple[int, ...]]:
        """Sizes of what each recurrent layer keeps of a token of a window, on this rank: see RecurrentSpec."""
        recurrent = {i: layer.recurrent for i, layer in enumerate(self.layers)}
        return {i: spec.kept_sizes(parallel) for i, spec in recurrent.items() if spec is not None}
