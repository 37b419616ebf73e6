"""Linear layers on the CPU with weights in oneDNN's own layout: y = x Wᵀ + bias.

torch's own float32 product goes to MKL, which on an AMD machine runs at half the speed of its vector units, and reads a large
W at half the speed of its memory. Measured on one core of a Zen 5 at 16 rows, W [896, 256]: 38 us packed, 80 plain; W
[151936, 896]: 28 ms packed, 101 plain, and at 1 row 13 and 28. bfloat16 gains as much at 1 row.
Packing does not suit 1 row of a small W: a call into oneDNN costs some 8 us more than one into MKL.

Rows are independent: a row's result is, bit for bit, the same beside any others (for two rows and more; one row alone may take
another path). The operators are those that torch's compiler emits; if they are missing, `can_pack` returns False.
"""

import platform

import torch

_REPRESENTATIVE_ROWS = 16  # the layout depends on it; this one serves 1 row and 512 as well as layouts made for them
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this machine has `pack` for the weight's dtype and device."""
    if weight.is_cuda or platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return weight.dtype in (torch.float32, torch.bfloat16) and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy of weight [out, in] in oneDNN's layout: an opaque tensor, for `packed_linear` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _REPRESENTATIVE_ROWS)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] -> [T, out]; x and bias in the weight's dtype."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
