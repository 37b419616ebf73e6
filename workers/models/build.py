"""ModelConfig -> model: the table of model classes, and the construction of one with empty parameters on its device."""

import torch

from quire.workers.layers.linear import WHOLE, Shard
from quire.workers.models.config import GPU_HEAD_DIMS, ModelConfig, ModelConfigError
from quire.workers.models.decoder import CausalLM, Placement
from quire.workers.models.llama import LlamaForCausalLM
from quire.workers.models.mistral import MistralForCausalLM
from quire.workers.models.qwen2 import Qwen2ForCausalLM
from quire.workers.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[LlamaForCausalLM] | type[MistralForCausalLM] | type[Qwen2ForCausalLM] | type[Qwen3ForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, shard: Shard = WHOLE) -> CausalLM:
    """The model with uninitialised parameters; fill them with weights.load_weights or weights.dummy_weights.

    Raises ModelConfigError for a head size that the device's kernels are not built for.
    """
    device = torch.device(device)
    if device.type == "cuda" and config.head_dim not in GPU_HEAD_DIMS:
        sizes = ", ".join(map(str, GPU_HEAD_DIMS))
        raise ModelConfigError(f"head_dim {config.head_dim} is not supported on a GPU; supported are {sizes}")
    return MODELS[config.architecture](config, Placement(dtype, device, shard))
