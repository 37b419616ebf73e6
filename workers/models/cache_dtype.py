"""--kv-cache-dtype and --kv-cache-dtype-skip-layers: which layers keep keys and values in 8 bits.

`auto` takes the checkpoint's type (compressed-tensors' kv_cache_scheme), else that of the activations. Called by
family_table.py; the result is in each layer's AttentionSpec, for the cache and its kernels.
"""

from collections.abc import Sequence

import msgspec

from quire.workers.loading.quantized.schemes import Quantization
from quire.workers.models.config import CacheDtype, LayerSpec, ModelConfigError

DTYPES: dict[str, CacheDtype] = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
SLIDING = "sliding_window"


def with_cache_dtype(
    layers: tuple[LayerSpec, ...], asked: str, skipped: Sequence[str], quantization: Quantization | None
) -> tuple[LayerSpec, ...]:
    """The layers with their cache's dtype. Raises ModelConfigError for flags that are impossible or have no effect."""
    dtype = quantization.kv_cache_dtype if asked == "auto" and quantization is not None else DTYPES.get(asked)
    indices = {int(name) for name in skipped if name != SLIDING}
    if absent := sorted(index for index in indices if index >= len(layers)):
        raise ModelConfigError(f"--kv-cache-dtype-skip-layers {absent[0]}: the model has layers 0 to {len(layers) - 1}")
    if dtype is None:
        if skipped:
            raise ModelConfigError("--kv-cache-dtype-skip-layers: no layer's cache has 8 bits without --kv-cache-dtype fp8")
        return layers
    if any(layer.attention.latent_dim for layer in layers):
        who, works = (f"--kv-cache-dtype {asked}", ": auto works") if asked != "auto" else ("config.json's kv_cache_scheme", "")
        raise ModelConfigError(f"{who}: of latent attention the cache has the model's dtype{works}")

    def is_skipped(index: int, layer: LayerSpec) -> bool:
        index = index if layer.attention.shares is None else layer.attention.shares
        return not layer.attention.is_there or index in indices or (SLIDING in skipped and layer.attention.window > 0)

    replace = msgspec.structs.replace
    return tuple(
        layer if is_skipped(i, layer) else replace(layer, attention=replace(layer.attention, cache_dtype=dtype))
        for i, layer in enumerate(layers)
    )
