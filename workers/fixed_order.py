"""`--deterministic`: puts a tuning table in force with which every sum has one order, and refuses models that cannot keep it.

A token then depends on its request alone: not on other rows of its steps, on how its prompt was cut into chunks, on what was
cached, or on whether it was computed again. worker.py calls this once, before it builds the model. The kernels that make it
true are named in kernels/tuning/fixed.py.
"""

import torch

from quire.kernels.tuning import current
from quire.kernels.tuning.fixed import fixed_order
from quire.workers.models.config import ModelConfig, ModelConfigError


def fix_order(model: ModelConfig, device: torch.device) -> None:
    """Raises ModelConfigError, which names the flag, for a model or a device that has no such kernels."""
    attention = [layer.attention for layer in model.layers]
    refused = {
        "a CPU": device.type != "cuda",
        f"quantized weights ({model.quantization.method})" if model.quantization else "": model.quantization is not None,
        "a KV cache of 8 bits": any(spec.cache_dtype is not None for spec in attention),
        f"latent attention ({model.architecture})": any(spec.latent_dim for spec in attention),
        f"recurrent layers ({model.architecture})": any(layer.recurrent is not None for layer in model.layers),
        f"an encoder ({model.architecture})": model.encoder is not None,
        "transformers' model code": model.transformers_config is not None,
    }
    if wrong := [what for what, is_so in refused.items() if is_so]:
        raise ModelConfigError(f"--deterministic does not work with {', '.join(wrong)}; leave it out")
    current.use(fixed_order(current.current()))
