"""What a model on the CPU gets once its weights are loaded: the layout that its products read fastest, and quick attributes.

`pack_weights` brings weights into oneDNN's layout (kernels/linear/linear_cpu.py): they cannot be read as tensors any more. A
packed weight takes its place. Both are kept where one row of a small float32 weight goes faster through the plain
one, and where the embedding shares the head's weight, for it looks up rows: the one place where packing takes memory that
counts, vocabulary x hidden size. It pays: at one row the head of a 0.5B model takes 13 ms packed and 28 plain.
"""

import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.linear.linear_cpu import can_pack, pack, packed_linear
from quire.workers.layers import ops
from quire.workers.layers.linear import Linear, LMHead

# float32 weights up to here take one row faster by the plain product: 1 MB 15 us and 18 packed, 0.1 MB 5 and 12
SMALL_BYTES = 2 << 20


class Packed:
    """A weight format: oneDNN's layout, and the plain weight beside it if that is small."""

    def __init__(self, weight: torch.Tensor):
        self.packed = pack(weight)
        is_small = weight.dtype == torch.float32 and weight.numel() * weight.element_size() <= SMALL_BYTES
        self.plain = weight if is_small else None

    def apply(self, layer: Linear | LMHead, x: torch.Tensor) -> torch.Tensor:
        if self.plain is not None and x.shape[0] == 1:
            return F.linear(x, self.plain, layer.bias)
        return packed_linear(x, self.packed, layer.bias)

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_mul(self.apply(layer, x))


def prepare_model(model: nn.Module) -> None:
    """To be called once, when the weights are in place."""
    pack_weights(model)
    quicken_attributes(model)


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of all products of a model in place; leaves those alone for which this machine has no such layout."""
    for module in model.modules():
        if not isinstance(module, Linear | LMHead) or not can_pack(module.weight):
            continue
        module.format = packed = Packed(module.weight)
        if packed.plain is None and not (isinstance(module, LMHead) and module.tied):
            module.weight = nn.Parameter(packed.packed, requires_grad=False)


def quicken_attributes(model: nn.Module) -> None:
    """Let modules find their children and parameters as plain attributes.

    nn.Module looks in its own tables only after an ordinary lookup has failed, at some 0.4 us each: 50 us a step of a model of
    6 layers, of 1,000. An assignment later still does what it should, for nn.Module clears the plain attribute.
    """
    for module in model.modules():
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)
