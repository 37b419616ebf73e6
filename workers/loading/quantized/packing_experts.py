"""Tensors with all experts of a layer: gpt-oss's mxfp4, and gate and up with interleaved rows."""

from collections.abc import Iterator

import torch

from quire.workers.loading.quantized.packing import QuantizedWeight, Tensors, TensorSpec
from quire.workers.loading.quantized.packing_codes import MxFp4Packing, StoredCodes
from quire.workers.loading.quantized.schemes import MX_GROUP, MxFp4


def halves(gate_up: torch.Tensor, are_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate's rows and up's of gate_up [E, 2 I, ...], which are one after the other or interleaved."""
    if are_interleaved:
        return gate_up[:, 0::2], gate_up[:, 1::2]
    gate, up = gate_up.chunk(2, 1)
    return gate, up


class StackedMxFp4Packing:
    """<name>_blocks uint8 [E, N, K / 32, 16], <name>_scales e8m0 [E, N, K / 32], of weights [E, N, K]; see `MxFp4Packing`.

    `parts` is 2 if N is gate's rows and up's, interleaved or not: the same rows are taken of both.
    """

    spec = None
    activations = None

    def __init__(self, name: str, experts: int, n: int, k: int, *, parts: int = 1, are_interleaved: bool = False):
        self.name, self.experts, self.n, self.k = name, experts, n, k
        self._parts, self._are_interleaved = parts, are_interleaved
        self._one = MxFp4Packing(MxFp4(), name, n, k)
        self.one = MxFp4Packing(MxFp4(), name, n // parts, k)  # gate's rows of an expert, up's or down's

    def tensor_specs(self) -> dict[str, TensorSpec]:
        shape = (self.experts, self.n, self.k // MX_GROUP)
        return {
            f"{self.name}_blocks": TensorSpec(((*shape, MX_GROUP // 2), (self.experts, self.n, self.k // 2)), ("U8",)),
            f"{self.name}_scales": TensorSpec((shape,), ("U8", "F8_E8M0")),
        }

    def chunks(self, tensors: Tensors, rows: slice, columns: slice) -> Iterator[QuantizedWeight]:
        raise NotImplementedError("several weights are not one")

    def codes(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and exponents as stored: uint8 [E, N, K / 2], two codes per byte, and uint8 [E, N, K / 32]."""
        blocks, scales = tensors[f"{self.name}_blocks"], tensors[f"{self.name}_scales"]
        return blocks.reshape(self.experts, self.n, -1), scales.view(torch.uint8)

    def stored(self, tensors: Tensors, expert: int) -> list[StoredCodes]:
        """One expert's codes: of all rows, or gate's and up's. Raises ValueError as MxFp4Packing."""
        parts = (self.of_expert(tensors[f"{self.name}_{kind}"], expert) for kind in ("blocks", "scales"))
        return [self.one.stored({"weight_blocks": b, "weight_scales": s}) for b, s in zip(*parts, strict=True)]

    def of_expert(self, tensor: torch.Tensor, expert: int) -> tuple[torch.Tensor, ...]:
        """An expert's rows of a tensor [E, N, ...]: all, or gate's and up's."""
        if self._parts == 1:
            return (tensor[expert],)
        gate, up = halves(tensor[expert : expert + 1], self._are_interleaved)
        return gate[0], up[0]

    def dequantize_into(self, tensors: Tensors, out: torch.Tensor, rows: slice, columns: slice) -> None:
        """Write the rows (of gate and of up) and columns to out [E, rows, columns]. Raises ValueError as MxFp4Packing."""
        blocks, scales = tensors[f"{self.name}_blocks"], tensors[f"{self.name}_scales"]
        whole = torch.empty(1, self.n, self.k, dtype=out.dtype, device=out.device)
        for expert, into in enumerate(out):
            one = {"weight_blocks": blocks[expert], "weight_scales": scales[expert]}
            self._one.dequantize_into(one, whole[0], slice(None), slice(None))
            some = halves(whole, self._are_interleaved) if self._parts == 2 else (whole,)
            into.copy_(torch.cat([part[0, rows, columns] for part in some]))
