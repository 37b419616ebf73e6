"""Names of layers in a quantization_config: lists, and the patterns by which transformers and auto-round match layers."""

import re
from collections.abc import Sequence

from quire.workers.loading.quantized.schemes import Json, QuantizationError, field

HEAD = "lm_head"


def names_of(config: Json, *names: str) -> list[str]:
    """The list of names in the first of these fields that is present."""
    for name in names:
        found = field(config, name, list, None)
        if found is not None:
            if not all(isinstance(x, str) for x in found):
                raise QuantizationError(f"quantization_config: {name} must list names of layers")
            return list(found)
    return []


def patterns_of(config: Json, *names: str) -> list[str]:
    """Like names_of, for `is_skipped`: all of the list's patterns compile."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    return checked(names_of(config, name), name)


def is_skipped(names: Sequence[str], patterns: list[str]) -> bool:
    """Whether one of transformers' names or regexes covers a layer of these names: its name, a parent's, or a name's end."""
    return any(name.endswith(p) or re.match(rf"(?:{p})(?:(?<=\.)|(?=\.|$))", name) for p in patterns for name in names)


def checked(patterns: list[str], where: str) -> list[str]:
    """The patterns, if all of them compile. Raises QuantizationError."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise QuantizationError(f"quantization_config: {where} has {pattern!r:.80}, which is no regex: {error}") from None
    return patterns
