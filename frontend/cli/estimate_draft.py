"""Memory of a device that a draft model takes, for `quire estimate`: its weights, and its keys and values in each KV block.

Its worker builds it like the model, with the type and the ranks of the model and without the model's other flags. An EAGLE-3
head is counted as a Llama of one layer, with the weights that its file has, and the model's own layers as a worker builds them.
"""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.frontend.cli.estimate_cpu import cpu_packed_bytes, weights_on_cpu
from quire.frontend.cli.estimate_model import ITEMSIZE, read_model
from quire.frontend.cli.estimate_sizes import EstimateError, sizes_on_rank
from quire.frontend.cli.estimate_stage import share_of
from quire.frontend.cli.estimate_weights import check_quantization, weights_bytes
from quire.ipc import memory_plan as plan
from quire.ipc.bundled import CHAT_MODEL
from quire.ipc.config import EngineConfig

TAPS = 3  # layers of the target that an EAGLE-3 head reads, as a rule


class DraftSizes(NamedTuple):
    """Bytes on one rank."""

    weights: int = 0  # and the hidden states that a head reads
    block: int = 0  # of a KV block
    step: int = 0  # of its largest pass


def draft_sizes(
    config: EngineConfig,
    dtype: str,
    tokens: int,
    rows: int,
    block_size: int,
    hidden_size: int,
    *,
    is_gpu: bool,
    has_fp8: bool,
) -> DraftSizes:
    """Sizes of the draft model that `config` asks for; zeros without one. tokens, rows: most of a step.

    hidden_size: the target's. Raises EstimateError.
    """
    asked = config.speculative_config
    if asked is not None and asked.method == "mtp":
        return _mtp_sizes(config, dtype, tokens, rows, block_size, is_gpu=is_gpu, has_fp8=has_fp8)
    if asked is None or asked.method == "ngram":
        return DraftSizes()
    name = asked.model or str(CHAT_MODEL.folder.with_name("bundled_drafts") / asked.method)
    if asked.method == "eagle3":
        taps = (tokens + rows) * TAPS * hidden_size * ITEMSIZE[dtype]
        found = _head_sizes(name, config, ITEMSIZE[dtype], tokens, rows, block_size, is_gpu=is_gpu)
        return found._replace(weights=found.weights + taps)
    plain = {"hf_overrides": {}, "model_impl": "auto", "enable_expert_parallel": False, "speculative_config": None}
    own = msgspec.structs.replace(config, quantization=asked.quantization, **plain)
    whole = read_model(name, asked.revision, config.download_dir, config.hf_token, {})
    check_quantization(whole, asked.quantization)
    model, item = share_of(whole, config.tensor_parallel_size, 1), ITEMSIZE[dtype]
    block = plan.kv_block_bytes(model.sizes, block_size, item, one_table=True)
    if is_gpu:
        weights = weights_bytes(model, asked.quantization, item, has_fp8=has_fp8)
        return DraftSizes(weights, block, plan.gpu_step_bytes(model.sizes, tokens, item))
    weights = weights_on_cpu(model, own, dtype, model.num_parameters * item + cpu_packed_bytes(model, item))
    return DraftSizes(weights, block, plan.cpu_step_bytes(model.sizes, tokens, rows, item))


def _head_sizes(
    name: str, config: EngineConfig, item: int, tokens: int, rows: int, block_size: int, *, is_gpu: bool
) -> DraftSizes:
    try:
        fields = json.loads((Path(name).expanduser() / "config.json").read_bytes())
        inner = fields.get("transformer_layer_config") or {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise EstimateError(f"{name}: of a head, a local folder is read: {error}") from None
    plain = {**inner, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    model = share_of(read_model(name, None, None, None, plain), config.tensor_parallel_size, 1)
    block = plan.kv_block_bytes(model.sizes, block_size, item) + model.sizes.hidden_size * item  # the last token's feature
    if is_gpu:
        return DraftSizes(model.num_parameters * item, block, plan.gpu_step_bytes(model.sizes, tokens, item))
    weights = model.num_parameters * item + cpu_packed_bytes(model, item)
    return DraftSizes(weights, block, plan.cpu_step_bytes(model.sizes, tokens, rows, item))


def _mtp_sizes(
    config: EngineConfig, dtype: str, tokens: int, rows: int, block_size: int, *, is_gpu: bool, has_fp8: bool
) -> DraftSizes:
    """The sizes of the model's own layers for further tokens. Their weights take as many bits as the model's do on average."""
    item, name = ITEMSIZE[dtype], config.model or ""
    model = read_model(name, config.revision, config.download_dir, config.hf_token, config.hf_overrides)
    found = sizes_on_rank(name, model.config or {}, config.tensor_parallel_size, is_of_mtp=True)
    hidden = found.sizes.hidden_size * item
    block = plan.kv_block_bytes(found.sizes, block_size, item, one_table=True) + hidden
    taps, weights = (tokens + rows) * hidden, found.num_parameters * item
    if is_gpu:
        whole = weights_bytes(model, config.quantization, item, has_fp8=has_fp8)
        weights = weights * whole // (model.num_parameters * item)
        return DraftSizes(weights + taps, block, plan.gpu_step_bytes(found.sizes, tokens, item))
    weights += found.packed_elements[1] * item if item == 4 else 0
    return DraftSizes(weights + taps, block, plan.cpu_step_bytes(found.sizes, tokens, rows, item))
