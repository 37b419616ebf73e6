"""Quantization schemes: how a checkpoint stores one linear layer. config.py reads them; packing.py unpacks tensors by them.

K is the number of a layer's inputs, N of its outputs. A group is a number of consecutive inputs (0: all) that share a scale; a
2-D group is several outputs as well. Plain values without torch, so an unsupported scheme is refused before anything is loaded.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

Json = dict[str, Any]
MX_GROUP = 32  # inputs per scale of mxfp4
FP8_MAX, INT8_MAX = 448.0, 127.0  # the greatest value of e4m3, and the greatest of int8 that is symmetric


class QuantizationError(ValueError):
    """The checkpoint's quantization cannot be served. One line names the field, the layer and values that would work."""

    def __init__(self, text: str):
        super().__init__(text.replace("\n", "\\n"))  # a name in the config may have newlines


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """How a layer's inputs are quantized before its product. Dynamic scales are per token, never of the whole batch."""

    dtype: Literal["fp8", "int8"]
    is_static: bool = False  # the checkpoint has one scale, `input_scale`
    is_symmetric: bool = True
    group_size: int = 0


class Gptq(msgspec.Struct, frozen=True, kw_only=True):
    """Values (q - z) s, packed along K (qweight) and N (qzeros)."""

    bits: int
    group_size: int
    desc_act: bool = False
    zeros_less_one: bool = True  # z is stored as z - 1


class Awq(msgspec.Struct, frozen=True, kw_only=True):
    """Values (q - z) s, packed along N in AWQ's order of nibbles."""

    group_size: int


class PackQuantized(msgspec.Struct, frozen=True, kw_only=True):
    """compressed-tensors' integers, packed along K and stored as q + 2^(bits - 1)."""

    bits: int
    group_size: int
    is_symmetric: bool = True
    has_order: bool = False  # weight_g_idx
    activations: Activations | None = None
    from_floats: bool = False  # the checkpoint has floats, which are rounded to this while they are loaded


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """int8 or e4m3 elements with a scale for each group of `block` (outputs, inputs); 0: all of them."""

    dtype: Literal["fp8", "int8"]
    block: tuple[int, int]
    scale_names: tuple[str, ...] = ("weight_scale",)  # any of them
    is_symmetric: bool = True
    activations: Activations | None = None
    from_floats: bool = False  # see PackQuantized


class FourBitCodes(msgspec.Struct, frozen=True, kw_only=True):
    """bitsandbytes' nf4 or fp4: a table of 16 values, and a scale for each group of the flattened weight."""

    quant_type: Literal["nf4", "fp4"]
    is_nested: bool  # the scales are quantized, too


class RowInt8(msgspec.Struct, frozen=True, kw_only=True):
    """bitsandbytes' int8: SCB / 127 is the scale of a row."""


class MxFp4(msgspec.Struct, frozen=True, kw_only=True):
    """e2m1, two per byte, with a power of two (e8m0) as the scale of 32 inputs."""

    codes_name: str = "weight_blocks"
    scales_name: str = "weight_scales"


QuantizationScheme = Gptq | Awq | PackQuantized | Scaled | FourBitCodes | RowInt8 | MxFp4


def described(scheme: QuantizationScheme | None) -> str:
    """A layer's scheme in words, for messages."""
    match scheme:
        case None:
            return "not quantized"
        case Gptq():
            return f"{scheme.bits} bits, group_size {scheme.group_size or -1}, desc_act {scheme.desc_act}"
        case Awq():
            return f"4 bits, group_size {scheme.group_size or -1}"
        case PackQuantized():
            kind = "symmetric" if scheme.is_symmetric else "not symmetric"
            return f"{scheme.bits} bits, group_size {scheme.group_size or -1}, {kind}, actorder {scheme.has_order}"
        case Scaled():
            rows, columns = (size or "all" for size in scheme.block)
            return f"{scheme.dtype}, a scale for {rows} outputs by {columns} inputs"
        case FourBitCodes():
            return f"{scheme.quant_type}, {'' if scheme.is_nested else 'not '}double quantized"
        case RowInt8():
            return "int8, a scale an output"
        case MxFp4():
            return "mxfp4"


class SchemeOf(Protocol):
    """The scheme of a linear layer; None: it is not quantized. A rule applies to a layer if it applies to any of its names."""

    def __call__(self, *names: str) -> QuantizationScheme | None: ...


class Quantization(NamedTuple):
    """A checkpoint's quantization: the method, and the scheme of each layer."""

    method: str  # quant_method
    scheme_of: SchemeOf
    kv_cache_dtype: Literal["fp8_e4m3"] | None = None  # that the checkpoint was made for; None: it does not say
    # whether the checkpoint's files have a layer; None: scheme_of has not seen the files, and does not know plain layers
    holds: Callable[[str], bool] | None = None
    table_dtype: Literal["bfloat16", "float16"] | None = (
        None  # of the embedding and the head in the files; None: other or unknown
    )


def field(config: Json, name: str, kind: type | tuple[type, ...], default: Any, where: str = "quantization_config") -> Any:
    """A field of one of these types, or the default if it is absent or null. Raises QuantizationError."""
    value = config.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        raise QuantizationError(f"{where}: {name} must be {' or '.join(k.__name__ for k in kinds)}, not {value!r:.80}")
    return value


def given(config: Json, name: str, default: Any) -> Any:
    """A field of any type, or the default if it is absent or null."""
    value = config.get(name)
    return default if value is None else value


def one_of(value: Any, allowed: tuple[Any, ...], what: str, instead: str = "") -> Any:
    """`value`, if it is one of `allowed` and of the same type: 4.0 is not 4.

    Raises QuantizationError that names `what` and what would work.
    """
    if not any(type(value) is type(x) and value == x for x in allowed):
        *most, last = map(repr, allowed)
        supported = f"supported are {', '.join(most)} and {last}" if most else f"supported is {last}"
        raise QuantizationError(f"{what} is {value!r:.80}: {supported}{instead and '; ' + instead}")
    return value


def group(config: Json, name: str = "group_size", where: str = "quantization_config") -> int:
    """The number of a group's inputs, 0 for all (-1 or absent). Raises QuantizationError."""
    value = field(config, name, int, -1, where)
    if value != -1 and not 8 <= value <= 1 << 20:
        raise QuantizationError(
            f"{where}: {name} is {value}: supported are -1 (all inputs) and sizes from 8, like 32, 64 and 128"
        )
    return max(value, 0)
