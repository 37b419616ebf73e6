"""How an engine divides a device's memory: weights, a step, captured graphs, KV blocks. Bytes in, bytes out, no torch.

The formulas are in one place: workers/memory.py sizes a worker's memory with them, and `quire estimate` predicts it for a
machine that need not exist. Values that a worker measures (a GPU's largest step, memory in use already) are computed here only
for the estimate, with constants that are fitted to measurements on an H100 (figures in tests/frontend/cli/test_estimate.py).
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from quire.ipc.adapters import AdapterLimits

GIB = 1 << 30
MIB = 1 << 20
GRAPHS_BYTES = 512 * MIB  # captured graphs without their buffers, kernels' code, fragmentation
PRIMITIVES_BYTES = 160 * MIB  # code and scratch that oneDNN keeps on a CPU: 147 MB were seen, see layers/formats/packed_cpu.py
PACKED_TWICE_BYTES = 2 << 20  # packed_cpu.py's SMALL_BYTES: estimated
BIG_GPU_BYTES = 70 * 10**9  # GPUs with at least this much memory run 1024 sequences by default
CONTEXT_BYTES = 850 * MIB  # CUDA's context, kernels' code and workspaces: estimated
PROCESSOR_ROW_BYTES = 42 * 1024  # for a slot's logits processors, besides the bytes per token of the vocabulary: estimated
CAPTURED_TOKENS = 2048  # the tuning tables' step.captured_tokens: estimated
LARGE_WEIGHTS_BYTES = 16 * 10**9  # the tuning tables' step.large_weights_bytes: estimated
NULL_BLOCKS = 1  # blocks that hold no tokens
LEAST_STATES = 3  # recurrent states: the dummy, a sequence's own, and one to begin with
STATE_ALIGNMENT = 256  # bytes, of each tensor in a recurrent state
EXCHANGED_ROWS = 2048  # rows in the tuning tables' exchange, which holds about six buffers for each: estimated


class LayerSizes(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # tokens; 0: no window
    intermediate_size: int
    cache_itemsize: int = 0  # bytes of an element in the KV cache; 0: like an activation's
    has_cache: bool = True  # False: it reads another layer's keys and values
    has_values: bool = True  # False: the cached key is the value, too, as in latent attention
    recurrent_elements: int = 0  # of a state, in the states' dtype
    convolution_elements: int = 0  # of a state, in the activations'
    kept_elements: int = 0  # that a recurrent layer keeps of a token whose row has drafts, in the activations'

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class ModelSizes(NamedTuple):
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSizes, ...]
    layer_inputs: int = 0  # values of a token for all layers together, beside its hidden state (Gemma 4)
    state_dtype: str = "float32"  # of recurrent states, by the checkpoint


class ItemSizes(NamedTuple):
    """For a model that takes items beside text, on each rank."""

    parameters: int  # of the encoder
    row_elements: int  # of the encoder cache, for a token
    run_elements: int  # that the encoder's largest run takes for a token: estimated

    def cache_bytes(self, rows: int, itemsize: int) -> int:
        return rows * self.row_elements * itemsize

    def run_bytes(self, rows: int, itemsize: int) -> int:
        """A run over half of the cache's rows, which is the largest item."""
        return max(rows // 2, 1) * self.run_elements * itemsize

    def graphs_bytes(self, rows: int, itemsize: int) -> int:
        """The largest run that is a captured graph, of four patches a token."""
        return min(max(rows // 2, 1), MOST_GRAPH_PATCHES // 4) * self.run_elements * itemsize


MOST_GRAPH_PATCHES = 8192  # of an encoder's run that is a captured graph: the device takes longer than the host for more
MOST_ITEM_TOKENS = 16384  # of an image, where the checkpoint's processor does not say how large it makes them


class CpuAsked(msgspec.Struct, frozen=True):
    """How a CPU's worker would be started, beside SizesAsked's ranks. The answer is the bytes of its weights alone."""

    folder: str | None  # of the checkpoint, if it is here
    overrides: dict[str, Any]  # --hf-overrides
    dtype: str
    model_impl: str
    quantization: str | None
    pipeline_parallel_size: int = 1
    sees: bool = False  # with the encoder of a model that takes items beside text


class AdaptersAsked(msgspec.Struct, frozen=True):
    """How adapters would be served. folders: those that are there from the start. The answer is the bytes of all slots."""

    limits: AdapterLimits
    dtype: str  # of the model
    folders: list[str]


class SizesAsked(msgspec.Struct, frozen=True):
    """The question to workers/sizes.py: how large is one of these ranks of a model, given its config.json?"""

    config: dict[str, Any]
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    cpu: CpuAsked | None = None
    is_of_mtp: bool = False  # how large are its layers that predict further tokens?
    adapters: AdaptersAsked | None = None


class RankSizes(msgspec.Struct, frozen=True):
    """The answer of workers/sizes.py without CpuAsked and AdaptersAsked; it answers with a text instead if it cannot tell."""

    sizes: ModelSizes
    num_parameters: int
    expert_parameters: int  # part of num_parameters
    packed_elements: list[int]  # elements of a tied head, and of the float32 weights that a CPU keeps twice
    items: ItemSizes | None = None  # None: the model takes text alone


# ------------------------------------------------------------------------------------------------------------ defaults
def default_max_num_seqs(gpu_bytes: int, keeps_states: bool = False) -> int:
    """gpu_bytes: memory of the GPU; 0 for a CPU. keeps_states: each sequence of the model has a recurrent state, too."""
    return (1024 if gpu_bytes >= BIG_GPU_BYTES and not keeps_states else 256) if gpu_bytes else 64


def default_max_num_batched_tokens(is_gpu: bool) -> int:
    return 8192 if is_gpu else 512


def default_block_size(is_gpu: bool) -> int:
    return 64 if is_gpu else 16


# -------------------------------------------------------------------------------------------------------------- a step
def cpu_step_bytes(model: ModelSizes, max_tokens: int, max_rows: int, itemsize: int) -> int:
    """Most bytes of a step on a CPU beside weights and KV cache: activations of the largest step, logits, oneDNN's code."""
    layer = max(model.layers, key=lambda layer: layer.q_size + 2 * layer.kv_size)
    attention = 2 * (layer.q_size + 2 * layer.kv_size) + 2 * layer.q_size  # qkv before and after rotary; output, padded and not
    mlp = 4 * max(layer.intermediate_size for layer in model.layers)  # gate and up, and their product; a copy padded
    per_token = 4 * model.hidden_size + max(attention, mlp) + 3 * model.layer_inputs  # the last: two terms, one also normed
    logits = max_rows * model.vocab_size * (itemsize + 3 * 4)  # in the model's type, and float32 copies in the sampler
    return max_tokens * per_token * itemsize + logits + PRIMITIVES_BYTES


def gpu_step_bytes(model: ModelSizes, max_tokens: int, itemsize: int) -> int:
    """Activations of the largest step on a GPU: residual, normed, a sublayer's output and input; and its widest tensors.

    It estimates what a worker measures: 0.906 GiB for 0.91 measured with an 8B, 0.203 GiB for 0.20 with a 0.6B.
    """
    attention = max(2 * layer.q_size + 2 * layer.kv_size for layer in model.layers)
    mlp = 3 * max(layer.intermediate_size for layer in model.layers)  # gate and up, and their product
    return max_tokens * (4 * model.hidden_size + max(attention, mlp) + 3 * model.layer_inputs) * itemsize


def cpu_packed_bytes(model: ModelSizes, is_tied: bool, itemsize: int) -> int:
    """Bytes of second copies on a CPU: small float32 weights, and a head that is the embedding (formats/packed_cpu.py)."""
    hidden, head = model.hidden_size, model.vocab_size * model.hidden_size * itemsize
    total = head if is_tied or (itemsize == 4 and head <= PACKED_TWICE_BYTES) else 0
    for layer in model.layers:
        sizes = (layer.q_size + 2 * layer.kv_size, layer.q_size, 2 * layer.intermediate_size, layer.intermediate_size)
        total += sum(n * hidden * itemsize for n in sizes if itemsize == 4 and n * hidden * itemsize <= PACKED_TWICE_BYTES)
    return total


def captured_tokens(weights_bytes: int, max_num_batched_tokens: int) -> int:
    """Tokens of the largest captured step, by the default tuning table: more for smaller models."""
    most = max(CAPTURED_TOKENS, CAPTURED_TOKENS * LARGE_WEIGHTS_BYTES // weights_bytes)
    return min(most, max_num_batched_tokens)


def graphs_bytes(captured: int, max_num_batched_tokens: int, activation_bytes: int, logits_bytes: int) -> int:
    """Memory of the captured graphs' buffers: their logits, and the activations of the largest captured step."""
    return logits_bytes + activation_bytes * captured // max_num_batched_tokens


def tables_bytes(
    model: ModelSizes,
    max_num_seqs: int,
    max_model_len: int,
    max_tokens: int,
    block_size: int,
    max_samples: int = 0,
    *,
    draws: bool = True,
) -> int:
    """Estimated bytes that stay on a GPU beside weights and KV cache: context, tables by slot, sampler, rotary tables.
    max_samples: of a step where rows have drafts, if there are more than rows. draws: whether tokens are sampled at all."""
    vocab, rows = model.vocab_size, max_num_seqs
    processors = rows * draws * (vocab + vocab // 8 + PROCESSOR_ROW_BYTES)
    sampler = max(rows, max_samples) * draws * (2 * vocab // 8 + 2 * 4 * 4096 + 3 * 4 * vocab // 512)
    block_table = 4 * rows * -(-max_model_len // block_size)
    rotary = 4 * max_model_len * max(layer.head_dim for layer in model.layers)
    return CONTEXT_BYTES + processors + sampler + block_table + rotary + 32 * max_tokens


def exchange_bytes(model: ModelSizes, ranks: int, itemsize: int) -> int:
    """Bytes of the buffers for other ranks' rows (workers/group/cuda.py), for families in which norms sum over the ranks."""
    return 6 * EXCHANGED_ROWS * model.hidden_size * itemsize if ranks > 1 else 0


# ----------------------------------------------------------------------------------------------------------- KV blocks
def kv_groups(model: ModelSizes) -> dict[tuple[int, int, int], int]:
    """Number of layers of each (window, KV heads, head size); layers that agree in these share a block table."""
    groups: dict[tuple[int, int, int], int] = {}
    for layer in model.layers:
        if not layer.has_cache:
            continue
        kind = (layer.window, layer.num_kv_heads, layer.head_dim)
        groups[kind] = groups.get(kind, 0) + 1
    return groups


def kv_block_bytes(model: ModelSizes, block_size: int, itemsize: int, *, one_table: bool = False) -> int:
    """Bytes of a KV block. KV groups share tensors of equal shape and dtype, as many as the largest group has layers.
    one_table: of a draft model, where every layer has its own."""
    makers = [layer._replace(window=0) if one_table else layer for layer in model.layers if layer.has_cache]
    layers = Counter((x.window, x.num_kv_heads, x.head_dim, x.cache_itemsize, x.has_values) for x in makers)
    most: dict[tuple[int, int, int, bool], int] = {}
    for (_, *kind), count in layers.items():
        heads, dim, cached, has_values = kind
        most[heads, dim, cached, bool(has_values)] = max(most.get((heads, dim, cached, bool(has_values)), 0), count)
    return sum(
        count * block_bytes([(heads, block_size, dim, cached or itemsize)]) // (1 if has_values else 2)
        for (heads, dim, cached, has_values), count in most.items()
    )


def block_bytes(shapes: Iterable[tuple[int, int, int, int]]) -> int:
    """shapes: (KV heads, block size, head size, bytes of an element) of each pair of tensors, keys' and values'."""
    return 2 * sum(heads * size * dim * itemsize for heads, size, dim, itemsize in shapes)


def blocks_in(room: int, block_bytes: int) -> int:
    """KV blocks that fit into `room` bytes. A model without attention has only the null block, which takes no bytes."""
    return room // block_bytes if block_bytes else NULL_BLOCKS


def useful_states(max_num_seqs: int, keeps_prefixes: bool) -> int:
    """Recurrent states for max_num_seqs rows, for as many checkpoints if prefixes are cached, and the dummy."""
    return max(1 + max_num_seqs * (2 if keeps_prefixes else 1), LEAST_STATES)


def state_bytes(model: ModelSizes, itemsize: int, state_itemsize: int) -> int:
    """Bytes of a recurrent state: of each layer with one, a tensor of each kind."""
    sizes = [x.recurrent_elements * state_itemsize for x in model.layers]
    sizes += [x.convolution_elements * itemsize for x in model.layers]
    return sum(-(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT for size in sizes)


def kept_bytes(model: ModelSizes, max_samples: int, itemsize: int) -> int:
    """Bytes of what recurrent layers keep of decode rows with drafts, in two halves, each for the samples of a step."""
    return 2 * max_samples * sum(layer.kept_elements for layer in model.layers) * itemsize


def states_in(room: int, block_bytes: int, state_bytes: int, wanted: int) -> int:
    """Recurrent states that get a part of `room` bytes: two thirds at most, unless the model has no KV blocks."""
    share = 2 * room // 3 if block_bytes else room
    return max(min(share // state_bytes, wanted), LEAST_STATES) if state_bytes else wanted


def least_blocks(block_bytes: int) -> int:
    """KV blocks without which nothing runs: the null block, and one more if blocks hold anything."""
    return NULL_BLOCKS + 1 if block_bytes else NULL_BLOCKS


def most_useful_blocks(num_groups: int, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """KV blocks for max_num_seqs requests of the largest length, and the null block."""
    return num_groups * max_num_seqs * -(-max_model_len // block_size) + 1


def cached_tokens(num_blocks: int, block_size: int, num_groups: int) -> int:
    """Tokens the KV cache can hold: each needs a place in every KV group; block 0 is the null block. 0 without groups."""
    return max(num_blocks - NULL_BLOCKS, 0) * block_size // max(num_groups, 1)
