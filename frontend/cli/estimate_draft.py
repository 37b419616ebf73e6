"""Memory of a device that a draft model takes, for `quire estimate`: its weights, and its keys and values in each KV block.

Its worker builds it like the model, with the type and the ranks of the model and without the model's other flags. An EAGLE-3
head is counted as a Llama of one layer, with the weights that its file has.
"""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.frontend.cli.estimate_cpu import cpu_packed_bytes, weights_on_cpu
from quire.frontend.cli.estimate_model import ITEMSIZE, read_model
from quire.frontend.cli.estimate_sizes import EstimateError
from quire.frontend.cli.estimate_stage import share_of
from quire.frontend.cli.estimate_weights import check_quantization, weights_bytes
from quire.ipc import memory_plan as plan
from quire.ipc.config import EngineConfig


class DraftSizes(NamedTuple):
    """Bytes on one rank."""

    weights: int = 0
    block: int = 0  # of a KV block
    step: int = 0  # of its largest pass


def draft_sizes(
    config: EngineConfig, dtype: str, tokens: int, rows: int, block_size: int, *, is_gpu: bool, has_fp8: bool
) -> DraftSizes:
    """Sizes of the draft model that `config` asks for; zeros without one. tokens, rows: most of a step.

    Raises EstimateError.
    """
    asked = config.speculative_config
    if asked is None or asked.model is None:
        return DraftSizes()
    if asked.method == "eagle3":
        return _head_sizes(asked.model, config, ITEMSIZE[dtype], tokens, rows, block_size, is_gpu=is_gpu)
    plain = {"hf_overrides": {}, "model_impl": "auto", "enable_expert_parallel": False, "speculative_config": None}
    own = msgspec.structs.replace(config, quantization=asked.quantization, **plain)
    whole = read_model(asked.model, asked.revision, config.download_dir, config.hf_token, {})
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
