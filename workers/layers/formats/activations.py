"""Inputs rounded as the checkpoint says, by formula: the values that an 8-bit product would see, in the inputs' dtype.

    fp8 dynamic     s = max |x| / 448,        x -> e4m3(x / s) s
    int8 dynamic    s = max |x| / 127,        x -> round(x / s) s, half to even
    int8, not symmetric     s = (max - min) / 255, z = round(-128 - min / s), with min <= 0 <= max
    static          s and z are the checkpoint's; greater values saturate

Dynamic scales are per token, or per group of a token's inputs, so a result never depends on the rest of the batch. Kernels
quantize by the same formulas.
"""

import torch

from quire.workers.layers.formats.format import Format
from quire.workers.loading.quantized.packed_weight import PackedWeight
from quire.workers.loading.quantized.packing_floats import no_zeros
from quire.workers.loading.quantized.schemes import FP8_MAX, INT8_MAX, Activations


def rounded(x: torch.Tensor, how: Activations, scale: float | None = None, zero_point: float | None = None) -> torch.Tensor:
    """x [T, K] -> the values that its quantized values represent. scale, zero_point: of a static quantization."""
    values = x.to(torch.float32)
    if how.is_static:
        if scale is None:
            return x  # dummy weights
        return _round_to(values, how, scale, zero_point).to(x.dtype)
    k = x.shape[-1]
    size = how.group_size or k
    if k % size:
        values = torch.nn.functional.pad(values, (0, size - k % size))
    grouped = values.unflatten(-1, (-1, size))
    return _round_to(grouped, how, *_dynamic(grouped, how)).flatten(-2)[..., :k].to(x.dtype)


def _dynamic(x: torch.Tensor, how: Activations) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point over the last dimension; the scale of zeros is 1."""
    if how.dtype == "int8" and not how.is_symmetric:
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = no_zeros((high - low) / 255)
        return scale, (-128 - low / scale).round().clamp(-128, 127)
    largest = x.abs().amax(-1, keepdim=True)
    # divided by a tensor: on a GPU torch would multiply by the reciprocal of a Python number, and round twice
    return no_zeros(largest / torch.full_like(largest, FP8_MAX if how.dtype == "fp8" else INT8_MAX)), None


def _round_to(
    x: torch.Tensor, how: Activations, scale: torch.Tensor | float, zero_point: torch.Tensor | float | None
) -> torch.Tensor:
    if how.dtype == "fp8":
        return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32) * scale
    zero = 0 if zero_point is None else zero_point
    return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


class RoundedInputs(Format):
    """A format's products of rounded inputs. Layers side by side with different static scales are a product each."""

    def __init__(self, inner: Format, layers: list[tuple[int, PackedWeight | None]]):
        """layers: (outputs, packed weight) in the order of y."""
        self._inner, self._layers = inner, layers

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        done: dict[object, torch.Tensor] = {}
        parts, start = [], 0
        for rows, layer in self._layers:
            key = _key(layer)
            if key not in done:
                done[key] = self._inner.product(rounded_for(x, layer))
            parts.append(done[key][:, start : start + rows])
            start += rows
        y = done.popitem()[1] if len(done) == 1 else torch.cat(parts, -1)
        return y if out is None else out.copy_(y)


def _key(layer: PackedWeight | None) -> object:
    """An equal key for layers with equally rounded inputs."""
    if layer is None or layer.activations is None:
        return None
    return layer.activations, layer.input_scale, layer.input_zero_point


def rounds_alike(one: PackedWeight | None, other: PackedWeight | None) -> bool:
    """Whether both layers' inputs are rounded to the same values."""
    return _key(one) == _key(other)


def rounded_for(x: torch.Tensor, layer: PackedWeight | None) -> torch.Tensor:
    """x [T, K], rounded as the layer wants its inputs."""
    if layer is None or layer.activations is None:
        return x
    return rounded(x, layer.activations, layer.input_scale, layer.input_zero_point)
