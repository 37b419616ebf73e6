"""`--limits FILE`: what each API key may have, in YAML. docs/limits.md explains the file.

An entry's key is a key's digest (the hex SHA-256 of the API key), a name, or `*` for every other key. An entry by digest has
limits of its own, or the name of an entry, whose limits all keys of that name share. Errors name the entry and the field.
"""

import math
import re
from typing import Any

import yaml

from quire.frontend.http.limits.key_limits import FIELDS, REST, KeyLimit, KeyLimits
from quire.ipc.adapters import MAX_NAME

_MAX_BYTES = 1 << 20
_MAX_NAME = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_INTEGERS = {  # field: (lowest, highest)
    "max_running": (1, 1 << 20),
    "max_waiting": (0, 1 << 20),
    "tokens_per_minute": (1, 1 << 50),
    "best_priority": (-(1 << 31) + 1, (1 << 31) - 1),
    "max_files": (0, 1 << 30),
    "max_files_mib": (0, 1 << 30),
}
_LONGEST_SALT = 256
# Errors that reading YAML may raise: PyYAML's constructors raise others than its own for a value that does not fit its tag.
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, AttributeError, TypeError, LookupError, OverflowError)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last, and keeps digests of digits alone as texts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        pairs = [(self._key(key), value) for key, value in node.value]
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"line {node.start_mark.line + 1}: {twice!r} is there twice")
        return {name: self.construct_object(value, deep=True) for name, value in pairs}

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise ValueError(f"line {node.start_mark.line + 1}: a key must be a text")
        return str(node.value)


_Loader.add_constructor("tag:yaml.org,2002:map", lambda loader, node: loader.construct_mapping(node))


def read_limits(path: str) -> KeyLimits:
    """The limits of a file. Raises ValueError, which names the file, the entry and the field."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--limits {path}: {error.strerror or error}") from None
    try:
        return parse_limits(text)
    except YAML_ERRORS as error:
        raise ValueError(f"--limits {path}: {yaml_error(error)}") from None


def parse_limits(text: bytes) -> KeyLimits:
    """Raises ValueError or YAMLError."""
    if len(text) > _MAX_BYTES:
        raise ValueError("this file is too large")
    loader = _Loader(text.decode())
    try:
        entries = loader.get_single_data()
    finally:
        loader.dispose()
    if entries is None:
        entries = {}
    if not isinstance(entries, dict):
        raise ValueError("the file must map digests and names of keys to limits")
    by_digest, by_name, rest = {}, {}, KeyLimit()
    for key, value in entries.items():
        if key == REST:
            rest = _limit(key, value, has_name=False)
        elif _DIGEST.fullmatch(key.lower()):
            by_digest[key.lower()] = KeyLimit(name=_name(key, value)) if isinstance(value, str) else _limit(key, value)
        elif _NAME.fullmatch(key):
            by_name[key] = _limit(key, value, has_name=False)
        else:
            raise ValueError(
                f"{key!r}: an entry is a key's SHA-256, in 64 hex digits, a name of letters, digits and ._-, or '*'"
            )
    _check_names(by_digest, by_name)
    return KeyLimits(by_digest=by_digest, by_name=by_name, rest=rest, has_file=True)


def _check_names(by_digest: dict[str, KeyLimit], by_name: dict[str, KeyLimit]) -> None:
    used = {limit.name for limit in by_digest.values()}
    if unused := next((name for name in by_name if name not in used), None):
        raise ValueError(f"{unused!r}: no key has this name")
    for digest, limit in by_digest.items():
        if limit.name in by_name and limit != KeyLimit(name=limit.name):
            raise ValueError(f"{digest}: its limits are those of {limit.name!r}: give them there")
    names = [limit.name for limit in by_digest.values() if limit.name is not None and limit.name not in by_name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r}: several keys have this name, so it needs an entry with the limits that they share")


def _limit(key: str, value: Any, has_name: bool = True) -> KeyLimit:
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}: an entry holds limits, like max_running: 8")
    names = [name for name in FIELDS if has_name or name != "name"]
    for field in value:
        if field not in names:
            raise ValueError(f"{key}: {field!r} is none of {', '.join(names)}")
    return KeyLimit(**{field: _value(key, field, given) for field, given in value.items() if given is not None})


def _value(key: str, field: str, given: Any) -> Any:
    match field:
        case "name":
            return _name(key, given)
        case "weight":
            if isinstance(given, bool) or not isinstance(given, int | float) or not 1e-3 <= given <= 1e3 or math.isnan(given):
                raise ValueError(f"{key}: weight must be a number, at least 0.001 and at most 1000, got {given!r:.40}")
            return float(given)
        case "admin":
            if not isinstance(given, bool):
                raise ValueError(f"{key}: admin must be true or false, got {given!r:.40}")
            return given
        case "models":
            if not isinstance(given, list) or not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME for name in given):
                raise ValueError(f"{key}: models must be a list of names, or of prefixes that end in *, got {given!r:.40}")
            return tuple(given)
        case "cache_salt":
            if not isinstance(given, str) or len(given) > _LONGEST_SALT or "\0" in given or not given.isprintable():
                raise ValueError(f"{key}: cache_salt must be a text of at most {_LONGEST_SALT} characters, got {given!r:.40}")
            return given
    low, high = _INTEGERS[field]
    if type(given) is not int or not low <= given <= high:
        raise ValueError(f"{key}: {field} must be an integer, at least {low} and at most {high}, got {given!r:.40}")
    return given


def _name(key: str, given: Any) -> str:
    if not isinstance(given, str) or not _NAME.fullmatch(given) or _DIGEST.fullmatch(given.lower()):
        raise ValueError(f"{key}: a name is a letter or digit and at most {_MAX_NAME - 1} more, or ._-, got {given!r:.80}")
    return given


def yaml_error(error: Exception) -> str:
    """The text of one of YAML_ERRORS, in a line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, yaml.YAMLError | ValueError):
        return "a value does not fit its tag"
    return " ".join(str(error).split())
