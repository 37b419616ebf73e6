"""Values in a JSON Schema that llguidance accepts but does not keep: they are adjusted so that it does, or refused by keyword.

To llguidance numbers are doubles, and bounds of integers have 64 bits. A bound that is not a double becomes the next double
inward. One beyond 64 bits, as in schemas made from types (the least int64, the largest double), becomes the last that it can
count with: all output is within the bounds that were asked for. A const that is not a double would come out as its neighbor.

Used by lark.py, in the process that tries grammars.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

LOWER_BOUNDS, UPPER_BOUNDS = frozenset(("minimum", "exclusiveMinimum")), frozenset(("maximum", "exclusiveMaximum"))
COUNTS = frozenset(f"{side}{of}" for side in ("min", "max") for of in ("Length", "Items", "Properties"))
MAX_BOUND = 2**63 - 1024  # the largest double below 2^63
_EXACT = 2**53  # up to here each integer is a double
_MAX_SHOWN = 40  # characters


def kept_bound(key: str, value: Any) -> Any:
    """A bound as llguidance keeps it, no wider than it was. Raises ValueError if all that it allows is beyond 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value  # not valid JSON Schema: llguidance reports it
    is_lower = key in LOWER_BOUNDS
    if (value > MAX_BOUND) if is_lower else (value < -MAX_BOUND):
        raise ValueError(f"{key} {_shown(value)}: a bound beyond 64 bits is not supported")
    if abs(value) > MAX_BOUND:
        return -MAX_BOUND if is_lower else MAX_BOUND
    if isinstance(value, float) or abs(value) <= _EXACT:
        return value
    bound, inward = float(value), math.inf if is_lower else -math.inf
    while not (min(_readings(bound)) >= value if is_lower else max(_readings(bound)) <= value):
        bound = math.nextafter(bound, inward)
    return int(bound)


def _readings(number: float) -> tuple[int, int]:
    """A double beyond _EXACT as an integer, and as it is written: with the fewest digits that identify it, then zeros."""
    return int(number), int(Decimal(repr(number)))


def kept_count(value: Any) -> Any:
    """A count: 2.0 is 2 to JSON Schema, and a wrong type to llguidance."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_literal(value: Any) -> None:
    """Raises ValueError for a const, or a value of an enum, with an integer that would come out as another."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            check_literal(part)
    elif isinstance(value, int) and abs(value) > _EXACT and not _is_kept(value):
        raise ValueError(f"{_shown(value)} in const or enum is beyond 2^53, where not every integer is kept; a text is")


def _is_kept(value: int) -> bool:
    try:
        return _readings(float(value)) == (value, value)
    except OverflowError:  # beyond the largest double
        return False


def _shown(value: float) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def check_min_properties(schema: Mapping[str, Any]) -> None:
    """Raises ValueError where repeated names could make up the number: only names that are listed cannot be repeated."""
    least, required = kept_count(schema.get("minProperties")), schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if isinstance(least, int) and least > num_required + 1 and is_open:
        shown = _shown(least)
        raise ValueError(f"minProperties {shown} is not supported where names are free: list them in properties or required")
