"""Packings of integers in words: GPTQ's, AWQ's and compressed-tensors' pack-quantized, unpacked into `QuantizedWeight`.

Words are int32, little-endian; the low nibble of a byte comes first. No code loops over columns: a word is viewed as four bytes
and a byte as two nibbles; for AWQ it loops over eight places.
"""

from collections.abc import Iterator
from typing import Literal

import torch

from quire.workers.loading.quantized.packing import (
    SCALES,
    IntegerPacking,
    QuantizedSpec,
    QuantizedWeight,
    Tensors,
    TensorSpec,
    input_tensors,
    num_groups,
    refuse,
    refuse_groups,
    row_chunks,
)
from quire.workers.loading.quantized.schemes import Awq, Gptq, PackQuantized

I32 = ("I32",)
OUTPUTS = 64  # a chunk has a multiple: kernels on a CPU pack so many together
WORD = 8  # 4-bit values in a word; a multiple of the number of 8-bit values
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the places of columns 0 to 7 in a word, from its low end


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., W] -> uint8 [..., W · 32 / bits], low bits first; bits 4 or 8."""
    octets = words.contiguous().flatten().view(torch.uint8).view(*words.shape[:-1], -1)  # flat: strides of 1-sized ones vary
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def ones_per_value(bits: int) -> int:
    """A word in which each value is 1."""
    return 0x11111111 if bits == 4 else 0x01010101


class WordPacking(IntegerPacking):
    """A packing that can unpack some outputs at a time: whole words of outputs if it packs along N."""

    n: int
    k: int

    def outputs(self, tensors: Tensors, start: int, stop: int) -> Tensors:
        """The tensors of these outputs alone. start and stop are multiples of eight; stop may be beyond the last output."""
        raise NotImplementedError

    def chunks(self, tensors: Tensors, rows: slice, columns: slice) -> Iterator[QuantizedWeight]:
        device = next(iter(tensors.values())).device
        first = rows.start // WORD * WORD
        for part in row_chunks(num_groups(rows.stop - first, OUTPUTS), OUTPUTS * self.k, device):
            start, stop = first + part.start * OUTPUTS, min(first + part.stop * OUTPUTS, num_groups(self.n, WORD) * WORD)
            quantized = self.unpacked(self.outputs(tensors, start, stop))
            yield quantized.shard(slice(max(start, rows.start) - start, min(stop, rows.stop) - start), columns)


class GptqPacking(WordPacking):
    """qweight [⌈K·b/32⌉, N], qzeros [G, N·b/32], scales [G, N], g_idx [K]."""

    def __init__(self, scheme: Gptq, layer: str, n: int, k: int):
        self.scheme, self.n, self.k = scheme, n, k
        self.per_word = 32 // scheme.bits
        if n % self.per_word:
            raise refuse(layer, f"has {n} outputs", f"GPTQ of {scheme.bits} bits needs a multiple of {self.per_word}")
        self.group_size = scheme.group_size or k
        self.spec = QuantizedSpec("uint4" if scheme.bits == 4 else "uint8", (1, self.group_size), True, scheme.desc_act)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        groups = num_groups(self.k, self.group_size)
        return {
            "qweight": TensorSpec(((num_groups(self.k, self.per_word), self.n),), I32),
            "qzeros": TensorSpec(((groups, self.n // self.per_word),), I32),
            "scales": TensorSpec(((groups, self.n),), SCALES),
            "g_idx": TensorSpec(((self.k,),), I32, is_optional=not self.scheme.desc_act),
        }

    def outputs(self, tensors: Tensors, start: int, stop: int) -> Tensors:
        of_words = slice(start // self.per_word, stop // self.per_word)
        cut = {"qweight": slice(start, stop), "qzeros": of_words, "scales": slice(start, stop)}
        return {name: tensor[:, cut[name]] if name in cut else tensor for name, tensor in tensors.items()}

    def unpacked(self, tensors: Tensors) -> QuantizedWeight:
        """If z = stored + 1, 1s are added to whole words, as GPTQModel subtracts them: a 0 there borrows from the next one."""
        q = unpack_words(tensors["qweight"].t(), self.scheme.bits)[:, : self.k]
        words = tensors["qzeros"]
        if self.scheme.zeros_less_one:
            words = words + ones_per_value(self.scheme.bits)
        zeros = unpack_words(words, self.scheme.bits).t().to(torch.int32)
        g_idx = tensors.get("g_idx")
        if g_idx is not None and not self.scheme.desc_act and not g_idx.any():
            g_idx = None  # some packers write zeros if inputs are in order
        order = group_order(g_idx, self.group_size)
        return QuantizedWeight(
            q if order is None else q.index_select(1, order), tensors["scales"].t(), (1, self.group_size), zeros, order
        )


def group_order(g_idx: torch.Tensor | None, group_size: int) -> torch.Tensor | None:
    """The order of inputs that makes groups consecutive; None if they already are.

    Raises ValueError if a group other than the last does not have `group_size` inputs.
    """
    if g_idx is None:
        return None
    plain = torch.arange(len(g_idx), device=g_idx.device, dtype=g_idx.dtype) // group_size
    if torch.equal(g_idx, plain):
        return None
    values, order = torch.sort(g_idx.to(torch.int64), stable=True)
    if not torch.equal(values, plain.to(torch.int64)):
        raise ValueError(f"g_idx does not have {group_size} inputs in each group")
    return order


class AwqPacking(WordPacking):
    """qweight [K, N/8], qzeros [K/g, N/8], scales [K/g, N]; words are packed along N."""

    def __init__(self, scheme: Awq, layer: str, n: int, k: int):
        self.n, self.k, self.group_size = n, k, scheme.group_size or k
        self.spec = QuantizedSpec("uint4", (1, self.group_size), True)
        if n % 8:
            raise refuse(layer, f"has {n} outputs", "AWQ needs a multiple of 8")
        if k % self.group_size:
            raise refuse_groups(layer, k, self.group_size, "AWQ")

    def tensor_specs(self) -> dict[str, TensorSpec]:
        groups = self.k // self.group_size
        return {
            "qweight": TensorSpec(((self.k, self.n // 8),), I32),
            "qzeros": TensorSpec(((groups, self.n // 8),), I32),
            "scales": TensorSpec(((groups, self.n),), SCALES),
        }

    def outputs(self, tensors: Tensors, start: int, stop: int) -> Tensors:
        words = slice(start // 8, stop // 8)
        return {name: tensor[:, slice(start, stop) if name == "scales" else words] for name, tensor in tensors.items()}

    def unpacked(self, tensors: Tensors) -> QuantizedWeight:
        q, zeros = (_awq_values(tensors[name]) for name in ("qweight", "qzeros"))
        return QuantizedWeight(q, tensors["scales"].t(), (1, self.group_size), zeros.to(torch.int32))


def _awq_values(words: torch.Tensor) -> torch.Tensor:
    """[R, W] -> uint8 [8 W, R]. Words are transposed first, being eight times fewer than values; then one pass per place."""
    words = words.t().contiguous()
    values = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8, device=words.device)
    for column, place in enumerate(AWQ_PLACES):
        values[:, column] = words >> 4 * place & 15
    return values.flatten(0, 1)


class PackQuantizedPacking(WordPacking):
    """weight_packed [N, ⌈K·b/32⌉] along K, weight_zero_point [⌈N·b/32⌉, G] along N, both plus 2^(b-1), weight_scale [N, G]."""

    def __init__(self, scheme: PackQuantized, layer: str, n: int, k: int):
        self.scheme, self.activations, self.n, self.k = scheme, scheme.activations, n, k
        self.group_size = scheme.group_size or k
        self.per_word = 32 // scheme.bits
        values: Literal["uint4", "uint8"] = "uint4" if scheme.bits == 4 else "uint8"
        self.spec = QuantizedSpec(values, (1, self.group_size), not scheme.is_symmetric, scheme.has_order)
        if k % self.group_size:
            raise refuse_groups(layer, k, self.group_size, "compressed-tensors")

    def tensor_specs(self) -> dict[str, TensorSpec]:
        groups, s = self.k // self.group_size, self.scheme
        scale_shapes = ((self.n, groups), (self.n,), (1,), ()) if groups == 1 else ((self.n, groups),)
        found = {
            "weight_packed": TensorSpec(((self.n, num_groups(self.k, self.per_word)),), I32),
            "weight_scale": TensorSpec(scale_shapes, SCALES),
            "weight_shape": TensorSpec(((2,),), ("I64", "I32"), is_optional=True),
        }
        if not s.is_symmetric:
            packed = (num_groups(self.n, self.per_word), groups)
            found["weight_zero_point"] = TensorSpec((packed, (1,)) if groups == 1 else (packed,), (*I32, "I8"))
        if s.has_order:
            found["weight_g_idx"] = TensorSpec(((self.k,),), ("I32", "I64"), is_optional=True)  # absent if inputs are in order
        return found | input_tensors(s.activations)

    def outputs(self, tensors: Tensors, start: int, stop: int) -> Tensors:
        zeros, scales = tensors.get("weight_zero_point"), tensors["weight_scale"]
        found = tensors | {"weight_packed": tensors["weight_packed"][start:stop]}
        if scales.dim() and len(scales) == self.n:
            found["weight_scale"] = scales[start:stop]
        return (
            found
            if zeros is None or zeros.dtype == torch.int8
            else found | {"weight_zero_point": zeros[start // self.per_word : stop // self.per_word]}
        )

    def unpacked(self, tensors: Tensors) -> QuantizedWeight:
        bits, groups = self.scheme.bits, self.k // self.group_size
        if "weight_shape" in tensors and (shape := tensors["weight_shape"].tolist()) != [self.n, self.k]:
            raise ValueError(f"weight_shape says {shape}, expected {[self.n, self.k]}")
        q = unpack_words(tensors["weight_packed"], bits)[:, : self.k]
        scales = tensors["weight_scale"]
        scales = scales.reshape(-1, groups) if groups == 1 else scales
        if self.scheme.is_symmetric:
            zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.int32)
        elif tensors["weight_zero_point"].dtype == torch.int8:  # one for the whole tensor, not packed
            zeros = (tensors["weight_zero_point"].to(torch.int32) + (1 << bits - 1)).view(1, 1)
        else:
            zeros = unpack_words(tensors["weight_zero_point"].t(), bits)[:, : len(q)].t().to(torch.int32)
        g_idx = tensors.get("weight_g_idx")
        if g_idx is not None and (g_idx == -1).all():
            g_idx = None  # llm-compressor writes -1 for inputs that it has not ordered
        order = group_order(g_idx, self.group_size)
        return QuantizedWeight(q if order is None else q.index_select(1, order), scales, (1, self.group_size), zeros, order)
