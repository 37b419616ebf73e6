"""Linear layers on the CPU with weights in float16 and activations in float32: y = x Wᵀ, for a head in 16 bits.

FBGEMM, which torch has on x86-64, reads W in 2 bytes a value, and multiplies and adds in float32. bfloat16 values are float16
values, too, if they are less than 65,504; those below 6e-5 lose bits that are worth less than 3e-8. Measured on one core of a
Zen 5, W [128256, 4096], in ms: 29 at 1 row, 94 at 16; float32 in oneDNN's layout 60 and 116, bfloat16 turned into float32 by
blocks (blocks_cpu.py) 80 and 170.
"""

from typing import Any

import torch

LARGEST = 65504.0


def can_pack_float16() -> bool:
    """Whether this torch and this machine have the operators."""
    has_operators = all(hasattr(torch.ops.quantized, name) for name in ("linear_prepack_fp16", "linear_dynamic_fp16"))
    return has_operators and "fbgemm" in torch.backends.quantized.supported_engines


def fits_float16(weight: torch.Tensor) -> bool:
    return bool(weight.abs().amax() <= LARGEST)


def pack_float16(weight: torch.Tensor) -> Any:
    """weight [N, K] of floats for `float16_linear`: an opaque object."""
    return torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), None)


def float16_linear(x: torch.Tensor, packed: Any) -> torch.Tensor:
    """x float32 [T, K] -> x Wᵀ [T, N]."""
    y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.contiguous(), packed)
    return y
