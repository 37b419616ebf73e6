"""quantization_config of NVIDIA's ModelOpt: 8-bit floats, by one algorithm for all layers or one for each.

Newer exports have it in config.json, older ones in hf_quant_config.json beside it, under other names. The head is quantized
only where a list of layers names it. Layers that are left out are named as in a shell; older exports name parts of them, too.
"""

from fnmatch import fnmatchcase
from typing import Literal

from quire.workers.loading.quantized.names import HEAD, names_of
from quire.workers.loading.quantized.schemes import (
    Activations,
    Json,
    QuantizationError,
    Scaled,
    SchemeOf,
    field,
    given,
    one_of,
)

WHERE = "quantization_config"
MIXED = "MIXED_PRECISION"
BLOCK = 128
ALGORITHMS = {
    "FP8": Scaled(dtype="fp8", block=(0, 0), activations=Activations(dtype="fp8", is_static=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": Scaled(dtype="fp8", block=(1, 0), activations=Activations(dtype="fp8")),
    "FP8_PB_WO": Scaled(dtype="fp8", block=(BLOCK, BLOCK)),  # weights only
}


def beside(config: Json) -> Json:
    """The object of hf_quant_config.json as a quantization_config."""
    return {"quant_method": "modelopt", **field(config, "quantization", dict, {}, "hf_quant_config.json")}


def read_modelopt(config: Json) -> SchemeOf:
    """The scheme of a layer's algorithm, unless the layer is left out."""
    skipped = names_of(config, "exclude_modules", "ignore")
    if config.get("quant_algo") == MIXED:
        layers = field(config, "quantized_layers", dict, {})
        by_name = {name: _scheme(entry, f"{WHERE}: quantized_layers.{name}") for name, entry in layers.items()}
        return lambda *names: next((by_name[name] for name in names if name in by_name), None)
    if config.get("quant_algo") is None and _kv_cache_algorithm(config):
        return lambda *names: None  # only the KV cache has 8 bits
    scheme = _scheme(config, WHERE)
    return lambda *names: None if HEAD in names or _is_left_out(names, skipped) else scheme


def _scheme(entry: object, where: str) -> Scaled:
    if not isinstance(entry, dict):
        raise QuantizationError(f"{where} must be an object, not {entry!r:.60}")
    return ALGORITHMS[one_of(entry.get("quant_algo"), tuple(ALGORITHMS), f"{where}: quant_algo")]


def _is_left_out(names: tuple[str, ...], patterns: list[str]) -> bool:
    return any(f".{pattern}." in f".{name}." or fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _kv_cache_algorithm(config: Json) -> str | None:
    algorithm = one_of(config.get("kv_cache_quant_algo"), (None, "FP8"), f"{WHERE}: kv_cache_quant_algo")
    scheme = field(config, "kv_cache_scheme", dict, None)
    if scheme is not None:
        one_of(given(scheme, "num_bits", 8), (8,), f"{WHERE}: kv_cache_scheme.num_bits")
        one_of(given(scheme, "type", "float"), ("float",), f"{WHERE}: kv_cache_scheme.type")
        return "FP8"
    return algorithm


def read_kv_cache_of_modelopt(config: Json) -> Literal["fp8_e4m3"] | None:
    """8-bit floats with one scale per tensor, or None. Raises QuantizationError."""
    return "fp8_e4m3" if _kv_cache_algorithm(config) else None
