"""ModelConfig -> model: the construction of one rank's part with empty parameters on its device."""

import torch

from quire.workers.layers.formats.schemes import QuantizationError
from quire.workers.layers.linear import Placement
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.decoder import CausalLM
from quire.workers.models.families import FAMILIES
from quire.workers.parallel import Parallel

GPU_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)  # what the GPU kernels are built for; a CPU takes any even size


def build_model(config: ModelConfig, dtype: torch.dtype, parallel: Parallel) -> CausalLM:
    """The rank's part with uninitialised parameters; fill them with weights.load_weights or weights.dummy_weights.

    Raises ModelConfigError for a head size that the device's kernels are not built for, and for a layer that its
    quantization cannot hold.
    """
    head_dims = {layer.attention.head_dim for layer in config.layers if not layer.latent}
    if parallel.device.type == "cuda" and (other := sorted(head_dims.difference(GPU_HEAD_DIMS))):
        sizes = ", ".join(map(str, GPU_HEAD_DIMS))
        raise ModelConfigError(f"head_dim {other[0]} is not supported on a GPU; supported are {sizes}")
    if parallel.device.type == "cuda" and any(layer.attention.cache_dtype == "fp8_e4m3" for layer in config.layers):
        _check_e4m3(parallel.device)
    try:
        return CausalLM(config, FAMILIES[config.architecture].make_block, Placement(dtype, parallel, config.quantization))
    except QuantizationError as error:
        raise ModelConfigError(str(error)) from None


def _check_e4m3(device: torch.device) -> None:
    """Triton converts e4m3 from Ada on."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ModelConfigError(
            f"a KV cache of fp8_e4m3 needs a GPU of compute capability 8.9 or newer, this one has {major}.{minor}: "
            "--kv-cache-dtype fp8_e5m2 works"
        )
