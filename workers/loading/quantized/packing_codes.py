"""Packings of codes: bitsandbytes' 4-bit indices into a table of 16 values, its int8 with a scale per row, and mxfp4's floats.

bitsandbytes' codes run along the flattened weight, two per byte, the *high* nibble first, with a scale (absmax) for each group
of `blocksize` elements, across rows. Nested scales are codes themselves: absmax = nested_quant_map[code] * nested_absmax +
offset. The offset and the sizes are in a JSON tensor, quant_state.
"""

import json
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from quire.workers.loading.quantized.packing import (
    ANY,
    E8M0_NAN,
    SCALES,
    IntegerPacking,
    QuantizedSpec,
    QuantizedWeight,
    Tensors,
    TensorSpec,
    refuse,
    row_chunks,
)
from quire.workers.loading.quantized.schemes import MX_GROUP, FourBitCodes, MxFp4

INT8_RANGE = 127.0
E2M1_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values of e2m1, from 0 up; the highest bit of a code is the sign
E8M0_BIAS = 127


class StoredCodes(NamedTuple):
    """Codes of [N, K] values: octets uint8 of two each, along the flattened weight; 16 values; a scale for each group."""

    octets: torch.Tensor
    table: torch.Tensor
    scales: torch.Tensor
    group_size: int
    is_high_first: bool


class FourBitPacking:
    """weight uint8 [⌈N·K/2⌉, 1], weight.absmax, weight.quant_map, weight.nested_*, weight.quant_state.bitsandbytes__*."""

    spec = None
    activations = None

    def __init__(self, scheme: FourBitCodes, n: int, k: int):
        self.scheme, self.n, self.k = scheme, n, k
        self.state = f"weight.quant_state.bitsandbytes__{scheme.quant_type}"

    def tensor_specs(self) -> dict[str, TensorSpec]:
        num_bytes = -(-self.n * self.k // 2)
        found = {
            "weight": TensorSpec(((num_bytes, 1), (1, num_bytes)), ("U8",)),
            "weight.absmax": TensorSpec(((ANY,),), ("U8",) if self.scheme.is_nested else ("F32",)),
            "weight.quant_map": TensorSpec(((16,),), ("F32",)),
            self.state: TensorSpec(((ANY,),), ("U8",)),
        }
        if self.scheme.is_nested:
            found["weight.nested_absmax"] = TensorSpec(((ANY,),), ("F32",))
            found["weight.nested_quant_map"] = TensorSpec(((256,),), ("F32",))
        return found

    def chunks(self, tensors: Tensors, rows: slice, columns: slice) -> Iterator[QuantizedWeight]:
        raise NotImplementedError("codes are no integers")

    def stored(self, tensors: Tensors) -> "StoredCodes":
        """The codes and their scales. Raises ValueError for a quant_state that contradicts the layer."""
        state = quant_state(tensors[self.state])
        shape = state.get("shape")
        if shape != [self.n, self.k] or state.get("quant_type", self.scheme.quant_type) != self.scheme.quant_type:
            raise ValueError(f"quant_state says {state.get('quant_type')} of {shape}, expected {[self.n, self.k]}")
        scales = tensors["weight.absmax"]
        if self.scheme.is_nested:
            table = tensors["weight.nested_quant_map"].index_select(0, scales.to(torch.int32))
            scales = _times_blocks(table, tensors["weight.nested_absmax"], _size(state, "nested_blocksize"))
            scales = scales + _number(state, "nested_offset")
        size = _size(state, "blocksize")
        _check_blocks(self.n * self.k, scales, size)
        return StoredCodes(tensors["weight"].flatten(), tensors["weight.quant_map"], scales, size, True)

    def dequantize_into(self, tensors: Tensors, out: torch.Tensor, rows: slice, columns: slice) -> None:
        octets, _, scales, size, _ = self.stored(tensors)
        values = torch.empty(2 * len(octets), dtype=torch.float32, device=octets.device)
        for part in row_chunks(len(octets), 2, octets.device):
            codes = torch.stack((octets[part] >> 4, octets[part] & 15), -1).flatten()
            values[2 * part.start : 2 * part.stop] = tensors["weight.quant_map"].index_select(0, codes.to(torch.int32))
        values = _times_blocks(values[: self.n * self.k], scales, size)
        out.copy_(values.view(self.n, self.k)[rows, columns])


def quant_state(octets: torch.Tensor) -> dict[str, object]:
    """The JSON object in a tensor's bytes. Raises ValueError."""
    try:
        state = json.loads(bytes(octets.cpu().tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"quant_state is no JSON: {error}") from None
    if not isinstance(state, dict):
        raise ValueError("quant_state is not a JSON object")
    return state


def _size(state: dict[str, object], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"quant_state: {name} must be a positive integer, not {value!r:.40}")
    return value


def _number(state: dict[str, object], name: str) -> float:
    value = state.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"quant_state: {name} must be a number, not {value!r:.40}")
    return float(value)


def _check_blocks(values: int, scales: torch.Tensor, size: int) -> int:
    """The number of blocks of so many values. Raises ValueError if there are not as many scales."""
    blocks = -(-values // size)
    if len(scales) != blocks:
        raise ValueError(f"{values} values in blocks of {size} need {blocks} scales, not {len(scales)}")
    return blocks


def _times_blocks(values: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Flat values, each group of `size` times its scale; the last group may be short. Raises ValueError."""
    blocks = _check_blocks(len(values), scales, size)
    if len(values) % size == 0:
        return (values.view(blocks, size) * scales[:, None]).flatten()
    return values * scales.repeat_interleave(size)[: len(values)]


class RowInt8Packing(IntegerPacking):
    """weight int8 [N, K], SCB [N]; weight_format is 0: row-major."""

    def __init__(self, n: int, k: int):
        self.n, self.k = n, k
        self.spec = QuantizedSpec("int8", (1, k))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec(((self.n, self.k),), ("I8",)),
            "SCB": TensorSpec(((self.n,),), SCALES),
            "weight_format": TensorSpec(((), (1,)), ("U8", "I8", "I32", "I64"), is_optional=True),
        }

    def unpacked(self, tensors: Tensors) -> QuantizedWeight:
        """Raises ValueError for a weight that is tiled."""
        if "weight_format" in tensors and int(tensors["weight_format"]):
            raise ValueError("weight_format must be 0 (row)")
        return QuantizedWeight(tensors["weight"], (tensors["SCB"].to(torch.float32) / INT8_RANGE)[:, None], (1, self.k))


class MxFp4Packing(IntegerPacking):
    """codes uint8 [N, K / 32, 16] or [N, K / 2], low nibble first; scales e8m0 [N, K / 32], the exponent plus 127."""

    def __init__(self, scheme: MxFp4, layer: str, n: int, k: int):
        self.scheme, self.n, self.k = scheme, n, k
        self.spec = QuantizedSpec("int8", (1, MX_GROUP))
        if k % MX_GROUP:
            raise refuse(layer, f"has {k} inputs", f"mxfp4 needs a multiple of {MX_GROUP}")

    def tensor_specs(self) -> dict[str, TensorSpec]:
        n, groups = self.n, self.k // MX_GROUP
        return {
            self.scheme.codes_name: TensorSpec(((n, groups, MX_GROUP // 2), (n, self.k // 2)), ("U8",)),
            self.scheme.scales_name: TensorSpec(((n, groups),), ("U8", "F8_E8M0")),
        }

    def codes(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and exponents as stored: uint8 [N, K / 2], two codes per byte, and uint8 [N, K / 32]."""
        return tensors[self.scheme.codes_name].reshape(self.n, -1), tensors[self.scheme.scales_name].view(torch.uint8)

    def stored(self, tensors: Tensors) -> StoredCodes:
        """The codes as they are. Raises ValueError for a NaN scale."""
        octets, exponents = self.codes(tensors)
        table = torch.tensor([*E2M1_HALVES, *(-x for x in E2M1_HALVES)], dtype=torch.float32)
        return StoredCodes(octets.flatten(), table, self._scales(exponents).bfloat16().flatten(), MX_GROUP, False)

    def _scales(self, exponents: torch.Tensor) -> torch.Tensor:
        """Half of each group's power of two, float32."""
        if (exponents == E8M0_NAN).any():
            raise ValueError(f"{self.scheme.scales_name} has a NaN (255)")
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.to(torch.int32) - E8M0_BIAS - 1)

    def unpacked(self, tensors: Tensors) -> QuantizedWeight:
        """q holds twice the values, which are multiples of 1/2, and scales are halved. Raises ValueError for a NaN scale."""
        octets, exponents = self.codes(tensors)
        scales = self._scales(exponents)
        table = torch.tensor([*E2M1_HALVES, *(-x for x in E2M1_HALVES)], dtype=torch.int8, device=octets.device)
        q = torch.empty(self.n, self.k, dtype=torch.int8, device=octets.device)
        for part in row_chunks(self.n, self.k, octets.device):
            codes = torch.stack((octets[part] & 15, octets[part] >> 4), -1).flatten(1)
            q[part] = table[codes.to(torch.int32)]
        return QuantizedWeight(q, scales, (1, MX_GROUP))
