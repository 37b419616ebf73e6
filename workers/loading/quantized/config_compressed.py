"""quantization_config of compressed-tensors: groups of layers by name, regex or class, each with its own scheme.

A name takes precedence over a regex, and a regex over a class, as in compressed-tensors; among equals the first group counts.
"""

import re
from collections.abc import Sequence
from typing import Literal

from quire.workers.loading.quantized.names import checked
from quire.workers.loading.quantized.schemes import (
    MX_GROUP,
    Activations,
    Json,
    MxFp4,
    PackQuantized,
    QuantizationError,
    QuantizationScheme,
    Scaled,
    SchemeOf,
    field,
    given,
    group,
    one_of,
)

WHERE = "quantization_config"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
ARGUMENTS = (  # of weights and of activations; the last four matter to the packer only
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder",
    "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
LINEAR = ("Linear", "LinearBase", "Module")  # classes that a linear layer is of


def read_compressed(config: Json) -> SchemeOf:
    """The scheme of a layer's group, unless it is ignored."""
    one_of(field(config, "sparsity_config", dict, {}).get("format", "dense"), ("dense",), f"{WHERE}: sparsity_config.format")
    if field(config, "transform_config", dict, {}).get("config_groups"):
        raise QuantizationError(f"{WHERE}: transform_config is set: rotated weights are not supported, plain ones are")
    groups = field(config, "config_groups", dict, {})
    if not groups and not config.get("kv_cache_scheme"):  # a checkpoint that has only an 8-bit KV cache has no groups
        raise QuantizationError(f"{WHERE}: config_groups must have at least one group")
    ranked: list[tuple[str, QuantizationScheme | None]] = []
    for name, entry in groups.items():
        if not isinstance(entry, dict):
            raise QuantizationError(f"{WHERE}: config_groups.{name} must be an object, not {entry!r:.60}")
        if entry.get("targets") is None:
            raise QuantizationError(f"{WHERE}: config_groups.{name}.targets must list layers or their class, Linear")
        scheme = _scheme(entry, given(entry, "format", config.get("format")), f"{WHERE}: config_groups.{name}")
        ranked += [(target, scheme) for target in _targets(entry, "targets", f"config_groups.{name}.targets")]
    ranked.sort(key=lambda found: _rank(found[0]))
    ignored = _targets(config, "ignore", "ignore")

    def scheme_of(*names: str) -> QuantizationScheme | None:
        if any(_matches(pattern, names) for pattern in ignored):
            return None
        return next((scheme for target, scheme in ranked if _matches(target, names)), None)

    return scheme_of


def _targets(entry: Json, name: str, where: str) -> list[str]:
    found = field(entry, name, list, [])
    if not all(isinstance(x, str) for x in found):
        raise QuantizationError(f"{WHERE}: {where} must list names of layers")
    checked([x.removeprefix("re:") for x in found if x.startswith("re:")], where)
    return list(found)


def _rank(target: str) -> int:
    return 2 if target in LINEAR else 1 if target.startswith("re:") else 0


def _matches(target: str, names: Sequence[str]) -> bool:
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in names)
    return target in names or target in LINEAR


def _scheme(entry: Json, format_name: object, where: str) -> QuantizationScheme | None:
    weights = field(entry, "weights", dict, None, where)
    if weights is None:
        one_of(entry.get("input_activations"), (None,), f"{where}.input_activations of a group without weights")
        return None
    weights_at = f"{where}.weights"
    _refuse_unknown(weights, weights_at)
    kind = one_of(given(weights, "type", "int"), ("int", "float"), f"{weights_at}.type")
    one_of(field(weights, "dynamic", bool, False, weights_at), (False,), f"{weights_at}.dynamic")
    bits = given(weights, "num_bits", 8)
    strategy = _strategy(weights, weights_at)
    is_symmetric = field(weights, "symmetric", bool, True, weights_at)
    activations = _activations(field(entry, "input_activations", dict, None, where), f"{where}.input_activations")
    if entry.get("output_activations") is not None:
        raise QuantizationError(f"{where}.output_activations is set: supported are input_activations")
    layout = one_of(format_name, FORMATS, f"{where}: format")
    if layout == "mxfp4-pack-quantized":
        for name, found, supported in (("type", kind, "float"), ("num_bits", bits, 4), ("strategy", strategy, "group")):
            one_of(found, (supported,), f"{weights_at}.{name}")
        one_of(weights.get("group_size"), (MX_GROUP,), f"{weights_at}.group_size")
        one_of(activations, (None,), f"{where}.input_activations")
        return MxFp4(codes_name="weight_packed", scales_name="weight_scale")
    if layout == "pack-quantized":
        one_of(kind, ("int",), f"{weights_at}.type")
        one_of(strategy, ("group", "channel", "tensor"), f"{weights_at}.strategy")
        return PackQuantized(
            bits=one_of(bits, (4, 8), f"{weights_at}.num_bits"),
            group_size=group(weights, where=weights_at) if strategy == "group" else 0,
            is_symmetric=is_symmetric,
            has_order=_actorder(weights, weights_at) == "group",
            activations=activations,
        )
    one_of(_actorder(weights, weights_at), (None, "weight"), f"{weights_at}.actorder")
    one_of(bits, (8,) if kind == "float" else (4, 8), f"{weights_at}.num_bits")
    return Scaled(
        dtype="fp8" if kind == "float" else "int8",
        block=_block(weights, strategy, weights_at),
        is_symmetric=is_symmetric,
        activations=activations,
    )


def _refuse_unknown(arguments: Json, where: str) -> None:
    """compressed-tensors does not take others, either; a null changes nothing."""
    if other := sorted(name for name, value in arguments.items() if name not in ARGUMENTS and value is not None):
        raise QuantizationError(f"{where}.{other[0]} is not known: supported are {', '.join(ARGUMENTS)}")


def read_kv_cache_scheme(config: Json) -> Literal["fp8_e4m3"] | None:
    """8-bit floats with one scale per tensor, or None. Raises QuantizationError."""
    scheme, where = field(config, "kv_cache_scheme", dict, None), f"{WHERE}: kv_cache_scheme"
    if scheme is None:
        return None
    one_of(given(scheme, "type", "int"), ("float",), f"{where}.type")
    one_of(given(scheme, "num_bits", 8), (8,), f"{where}.num_bits")
    one_of(given(scheme, "strategy", "tensor"), ("tensor",), f"{where}.strategy")
    one_of(given(scheme, "dynamic", False), (False,), f"{where}.dynamic")
    one_of(field(scheme, "symmetric", bool, True, where), (True,), f"{where}.symmetric")
    return "fp8_e4m3"


def _actorder(weights: Json, where: str) -> str | None:
    value = weights.get("actorder")
    names = {
        None: None,
        False: None,
        True: "group",
        "group": "group",
        "dynamic": "group",
        "weight": "weight",
        "static": "weight",
    }
    return names[one_of(value.lower() if isinstance(value, str) else value, tuple(names), f"{where}.actorder")]


def _strategy(weights: Json, where: str) -> str:
    given = weights.get("strategy")
    if given is None:
        size = weights.get("group_size")
        given = "tensor" if size is None else "channel" if size == -1 else "group"
    return str(one_of(given, ("tensor", "channel", "group", "block"), f"{where}.strategy"))


def _block(weights: Json, strategy: str, where: str) -> tuple[int, int]:
    if strategy == "block":
        sizes = weights.get("block_structure")
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(x) is int and x > 0 for x in sizes):
            raise QuantizationError(f"{where}.block_structure must be two sizes, like [128, 128], not {sizes!r:.60}")
        return sizes[0], sizes[1]
    return {"tensor": (0, 0), "channel": (1, 0), "group": (1, group(weights, where=where))}[strategy]


def _activations(config: Json | None, where: str) -> Activations | None:
    if config is None or field(config, "num_bits", int, 8, where) >= 16:
        return None
    _refuse_unknown(config, where)
    one_of(given(config, "num_bits", 8), (8,), f"{where}.num_bits")
    kind = one_of(given(config, "type", "int"), ("int", "float"), f"{where}.type")
    dynamic = one_of(given(config, "dynamic", False), (True, False), f"{where}.dynamic")
    default = "group" if config.get("group_size") else "token" if dynamic else "tensor"
    strategy = one_of(given(config, "strategy", default), ("token", "tensor", "group"), f"{where}.strategy")
    if not dynamic:
        one_of(strategy, ("tensor",), f"{where}.strategy of static scales")
    return Activations(
        dtype="fp8" if kind == "float" else "int8",
        is_static=not dynamic,
        is_symmetric=field(config, "symmetric", bool, True, where),
        group_size=group(config, where=where) if strategy == "group" else 0,
    )
