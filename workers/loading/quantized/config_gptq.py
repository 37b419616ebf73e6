"""quantization_config of GPTQ, AWQ and auto-round: 4-bit or 8-bit integers with a scale and a zero point for each group.

auto-round uses the packings of the others; its config differs in how it says which layer has which bits.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from quire.workers.loading.quantized.names import HEAD, checked, is_skipped, names_of, patterns_of
from quire.workers.loading.quantized.schemes import (
    Activations,
    Awq,
    Gptq,
    Json,
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
ROTATIONS = ("rotation", "rotation_config", "spinquant_config", "hadamard_config", "transform_config")


# ------------------------------------------------------------------------------------------------------------- GPTQ
def read_gptq(config: Json) -> SchemeOf:
    """Layers of the decoder blocks, all or those that are listed; `dynamic` takes precedence over everything else."""
    has_head, inside = field(config, "lm_head", bool, False), _inside_blocks(config)
    skipped = patterns_of(config, "modules_to_not_convert")

    def takes(names: Sequence[str]) -> bool:
        return has_head if HEAD in names else inside(names) and not is_skipped(names, skipped)

    return _by_rules(config, _gptq, takes)


def _gptq(merged: Json, where: str) -> Gptq:
    one_of(given(merged, "is_marlin_format", False), (False,), f"{where}: is_marlin_format")
    version = one_of(
        given(merged, "checkpoint_format", given(merged, "format", "gptq")),
        ("gptq", "gptq_v2"),
        f"{where}: checkpoint_format",
        "GPTQModel can convert others",
    )
    return Gptq(
        bits=one_of(merged.get("bits"), (4, 8), f"{where}: bits"),
        group_size=group(merged, where=where),
        desc_act=field(merged, "desc_act", bool, False, where),
        zeros_less_one=version == "gptq",
    )


def _by_rules(
    config: Json, read: Callable[[Json, str], QuantizationScheme], takes: Callable[[Sequence[str]], bool]
) -> SchemeOf:
    """GPTQModel's `dynamic`: the first rule that matches a layer counts; otherwise all layers that `takes` share a scheme."""
    _check_packing(config)
    base = read(config, WHERE)
    rules = [
        (pattern, None if changes is None else read({**config, **changes}, f"{WHERE}: dynamic {pattern.pattern!r:.60}"))
        for pattern, changes in _rules(field(config, "dynamic", dict, {}))
    ]

    def scheme_of(*names: str) -> QuantizationScheme | None:
        for pattern, scheme in rules:
            if any(map(pattern.match, names)):
                return scheme
        return base if takes(names) else None

    return scheme_of


def _check_packing(config: Json) -> None:
    """Refuse GPTQModel's other words, and inputs that are rotated or rounded before a product."""
    one_of(given(config, "pack_dtype", "int32"), ("int32",), f"{WHERE}: pack_dtype")
    _refuse_rotated(config, WHERE)
    if config.get("activation"):
        raise QuantizationError(f"{WHERE}: activation is {config['activation']!r:.60}: inputs are taken in 16 bits alone")


def _refuse_rotated(config: Json, where: str) -> None:
    for name in ROTATIONS:
        if config.get(name):
            raise QuantizationError(f"{where}: {name} is set: rotated weights are not supported, plain ones are")


def _rules(dynamic: Json) -> list[tuple[re.Pattern[str], Json | None]]:
    """(pattern, changes), with None for layers that stay plain. Rules with None come first, as in GPTQModel."""
    rules: list[tuple[re.Pattern[str], Json | None]] = []
    for key, changes in sorted(dynamic.items(), key=lambda rule: not rule[0].startswith("-")):
        [text] = checked([key.removeprefix("-:").removeprefix("+:")], "dynamic")
        if not key.startswith("-:") and not isinstance(changes, dict):
            raise QuantizationError(f"{WHERE}: dynamic {key!r:.60} must have an object, not {changes!r:.60}")
        rules.append((re.compile(text), None if key.startswith("-:") else changes))
    return rules


def _inside_blocks(config: Json) -> Callable[[Sequence[str]], bool]:
    """transformers' modules_in_block_to_quantize: lists of names within a decoder block; all if it is absent."""
    listed = field(config, "modules_in_block_to_quantize", list, None)
    if listed is None:
        return lambda names: True
    inner = [name for entry in listed for name in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(name, str) for name in inner):
        raise QuantizationError(f"{WHERE}: modules_in_block_to_quantize must list names of layers")
    return lambda names: any(name.endswith(f".{end}") for end in inner for name in names)


# -------------------------------------------------------------------------------------------------------------- AWQ
def read_awq(config: Json) -> SchemeOf:
    """`modules_to_not_convert` matches anywhere in a layer's name; the head is quantized only if GPTQModel's lm_head is set."""
    skipped, has_head = names_of(config, "modules_to_not_convert"), field(config, "lm_head", bool, False)

    def takes(names: Sequence[str]) -> bool:
        return has_head if HEAD in names else not any(part in name for part in skipped for name in names)

    return _by_rules(config, _awq, takes)


def _awq(merged: Json, where: str) -> Awq:
    """The tensors have zeros even without zero_point, as GPTQModel and auto-round write symmetric weights."""
    version = str(given(merged, "version", given(merged, "checkpoint_format", given(merged, "format", "gemm")))).lower()
    one_of(version, ("gemm",), f"{where}: version", "AutoAWQ's version gemm packs the same weights")
    one_of(merged.get("bits", merged.get("w_bit")), (4,), f"{where}: bits")
    one_of(given(merged, "zero_point", True), (True, False), f"{where}: zero_point")
    return Awq(group_size=group(merged, "group_size" if "group_size" in merged else "q_group_size", where))


# ------------------------------------------------------------------------------------------------------- auto-round
PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq", "auto_round", "auto_round:fp8")


def read_auto_round(config: Json) -> SchemeOf:
    """Layers of the blocks to quantize, and those that extra_config names, which takes precedence for a layer."""
    extra = field(config, "extra_config", dict, {})
    for name, changes in extra.items():
        if not isinstance(changes, dict):
            raise QuantizationError(f"{WHERE}: extra_config {name!r:.60} must have an object, not {changes!r:.60}")
    patterns = [(re.compile(name), extra[name]) for name in extra if _is_regex(name)]
    blocks, skipped = _blocks(config), patterns_of(config, "modules_to_not_convert")
    _auto_round(config, {}, WHERE)  # refuse what is unsupported for the whole config first

    def scheme_of(*names: str) -> QuantizationScheme | None:
        changes = next((extra[name] for name in names if name in extra), None)
        if changes is None:
            if any(re.search(pattern, name) for pattern in skipped for name in names):
                return None
            changes = next((found for pattern, found in patterns if found and any(map(pattern.search, names))), None)
        if changes is None and not any(name.startswith(block) for block in blocks for name in names):
            return None
        return _auto_round(config, changes or {}, f"{WHERE}: extra_config of {names[0]}" if changes else WHERE)

    return scheme_of


def _is_regex(name: str) -> bool:
    """auto-round ignores patterns that do not compile."""
    try:
        re.compile(name)
    except re.error:
        return False
    return True


def _blocks(config: Json) -> list[str]:
    named: Any = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or "model.layers"
    names = named.split(",") if isinstance(named, str) else named
    if not isinstance(names, list):
        raise QuantizationError(f"{WHERE}: block_name_to_quantize must name blocks, not {named!r:.60}")
    flat = [name for entry in names for name in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(name, str) for name in flat):
        raise QuantizationError(f"{WHERE}: block_name_to_quantize must name blocks, not {named!r:.60}")
    return [name.strip() for name in flat]


def _auto_round(config: Json, changes: Json, where: str) -> QuantizationScheme | None:
    merged = {**config, **changes}
    _refuse_rotated(merged, where)
    bits = merged.get("bits")
    if type(bits) is int and bits >= 16:
        return None
    packing = one_of(given(merged, "packing_format", _of_backend(merged)), PACKINGS, f"{where}: packing_format")
    if packing == "auto_round:fp8":
        return _auto_round_fp8(merged, where)
    one_of(given(merged, "data_type", "int"), ("int",), f"{where}: data_type")
    if (act_bits := field(merged, "act_bits", int, 16, where)) < 16:
        raise QuantizationError(f"{where}: act_bits is {act_bits}: supported is 16, and 8 with packing_format auto_round:fp8")
    if packing in ("auto_round:auto_awq", "auto_round:awq"):
        one_of(bits, (4,), f"{where}: bits")
        return Awq(group_size=group(merged, where=where))
    return Gptq(
        bits=one_of(bits, (4, 8), f"{where}: bits"),
        group_size=group(merged, where=where),
        zeros_less_one=packing != "auto_round",
    )


def _of_backend(config: Json) -> str:
    """The packing format of older configs, by `backend`: auto_round:awq:gemm, auto_round:gptq:exllamav2."""
    return "auto_round:awq" if ":awq" in str(config.get("backend")) else "auto_round:auto_gptq"


def _auto_round_fp8(merged: Json, where: str) -> Scaled:
    """One scale per tensor, per channel (group_size -1) or per 2-D group (a pair); activations as act_dynamic says."""
    one_of(merged.get("bits"), (8,), f"{where}: bits")
    size = merged.get("group_size", -1)
    if isinstance(size, list) and len(size) == 2 and all(type(x) is int and x > 0 for x in size):
        activations = Activations(dtype="fp8", group_size=size[1])
        return Scaled(
            dtype="fp8", block=(size[0], size[1]), scale_names=("weight_scale_inv", "weight_scale"), activations=activations
        )
    one_of(size, (-1, 0), f"{where}: group_size")
    act_bits = field(merged, "act_bits", int, 8, where)
    if activates := act_bits < 16:
        one_of(act_bits, (8,), f"{where}: act_bits")
    is_static = not field(merged, "act_dynamic", bool, False, where)
    block = (0, 0) if size == 0 else (1, 0)
    return Scaled(dtype="fp8", block=block, activations=Activations(dtype="fp8", is_static=is_static) if activates else None)
