"""Names of layers in a quantization_config: lists of them, and the patterns that transformers and auto-round match them by."""

import re
from collections.abc import Sequence

from quire.workers.loading.quantized.schemes import Json, QuantizationError, field

HEAD = "lm_head"


def names_of(config: Json, *names: str) -> list[str]:
    """The first of these lists of names that is there."""
    for name in names:
        found = field(config, name, list, None)
        if found is not None:
            if not all(isinstance(x, str) for x in found):
                raise QuantizationError(f"quantization_config: {name} must list names of layers")
            return list(found)
    return []


def patterns_of(config: Json, *names: str) -> list[str]:
    """The same of a list for `is_skipped`, all of which compile."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    return checked(names_of(config, name), name)


def is_skipped(names: Sequence[str], patterns: list[str]) -> bool:
    """Whether one of transformers' module names or regexes covers a layer of these names: one, a parent's or the end of one."""
    return any(name.endswith(p) or re.match(rf"(?:{p})(?:(?<=\.)|(?=\.|$))", name) for p in patterns for name in names)


def checked(patterns: list[str], where: str) -> list[str]:
    """The same, if all of them compile."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise QuantizationError(f"quantization_config: {where} has {pattern!r:.80}, which is no regex: {error}") from None
    return patterns
