"""The settings besides the model's files that determine a worker's answers, for ipc/numerics.py: flags with defaults resolved.

All ranks of an engine report the same, for all have the whole model's configuration.
"""

import torch

from quire.ipc.numerics import Numerics
from quire.ipc.worker_config import ResolvedEngineConfig
from quire.workers.models.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def numerics_of(config: ResolvedEngineConfig, model: ModelConfig, dtype: torch.dtype) -> Numerics:
    ropes = [layer.attention.rope for layer in model.layers]
    return Numerics(
        dtype=str(dtype).removeprefix("torch."),
        quantization=_quantization(model),
        kv_cache_dtype=_kv_cache_dtype(model),
        long_rope=any(
            rope is not None and rope.long_factor and config.max_model_len > rope.original_max_position_embeddings
            for rope in ropes
        ),
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        logits_processors=[name.rpartition(":")[2] for name in config.logits_processors],
    )


def _quantization(model: ModelConfig) -> str:
    method = model.quantization.method if model.quantization is not None else ""
    return "fp8" if method == "fp8_per_tensor" else method  # two names of one method


def _kv_cache_dtype(model: ModelConfig) -> str:
    dtypes = {i: layer.attention.cache_dtype for i, layer in enumerate(model.layers) if layer.attention.is_there}
    named = sorted({dtype for dtype in dtypes.values() if dtype is not None})
    others = [str(i) for i, dtype in dtypes.items() if dtype is None]
    return (", ".join(named) or "auto") + (f" but for layers {' '.join(others)}" if named and others else "")


def choose_dtype(name: str, config: ModelConfig, device: str) -> torch.dtype:
    """The type of weights and activations by --dtype. `auto`: float32 on a CPU, the checkpoint's own on a GPU."""
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device == "cpu" else DTYPES[config.dtype or "bfloat16"]
