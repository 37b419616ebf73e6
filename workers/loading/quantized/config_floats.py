"""--quantization of a float checkpoint: the scheme to which its linear layers are rounded while they are loaded.

The LM head and the embedding stay as they are. If inputs are quantized, too, each token has its own scale; in vLLM's fp8 the
whole batch has one, so that a result depends on the rest of the batch. Called by models/family_table.py.
"""

from quire.workers.loading.quantized.names import HEAD
from quire.workers.loading.quantized.schemes import Activations, PackQuantized, Quantization, QuantizationScheme, Scaled

BLOCK, GROUP = 128, 128

SCHEMES: dict[str, QuantizationScheme] = {
    "fp8_per_tensor": Scaled(dtype="fp8", block=(0, 0), activations=Activations(dtype="fp8"), from_floats=True),
    "fp8_per_channel": Scaled(dtype="fp8", block=(1, 0), activations=Activations(dtype="fp8"), from_floats=True),
    "fp8_per_block": Scaled(
        dtype="fp8", block=(BLOCK, BLOCK), activations=Activations(dtype="fp8", group_size=BLOCK), from_floats=True
    ),
    "int8": Scaled(dtype="int8", block=(1, 0), activations=Activations(dtype="int8"), from_floats=True),
    "int8_per_channel_weight_only": Scaled(dtype="int8", block=(1, 0), from_floats=True),
    "int4": PackQuantized(bits=4, group_size=GROUP, is_symmetric=False, from_floats=True),
}
SCHEMES["fp8"] = SCHEMES["fp8_per_tensor"]


def quantization_while_loading(name: str) -> Quantization:
    """The quantization of this name, one of ipc.quantization.WHILE_LOADING."""
    scheme = SCHEMES[name]
    return Quantization(name, lambda *names: None if HEAD in names else scheme)
