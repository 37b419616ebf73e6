"""vLLM's flags in our launch lines: those without effect here are removed, with a reason; others are refused by name.

Called by `quire serve` and `quire run-batch` before their own flags are parsed, with words in their normal spelling
(ipc/process/flags.py). Flags that the parser knows are left alone; `nearest` suggests one for a flag that is unknown to both.
"""

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.frontend.cli.vllm_flags import ANY, BY_FLAG, Row
from quire.ipc.process.command import CommandParser
from quire.ipc.process.flags import split_flag

_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?")
_LEVEL = re.compile(r"-O\d")
# Flags of older versions, still on model cards, that set a field of config.json.
_FIELDS = {"--rope-scaling": "rope_scaling", "--rope-theta": "rope_theta"}


READ_VARIABLES = frozenset({"VLLM_API_KEY"})


def unread_variables(environment: Mapping[str, str]) -> str:
    """The names of vLLM's environment variables that are set and have no effect here, in one text; "" if there are none."""
    return ", ".join(sorted(name for name in environment if name.startswith("VLLM_") and name not in READ_VARIABLES))


class UnsupportedFlag(ValueError):
    """A flag of vLLM's asks for something that Quire does not have; the text is for the user."""


def take_out(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """The words without vLLM's flags that have no effect here, and a text for each of those. known: the parser's own flags.

    Raises UnsupportedFlag.
    """
    left, taken, rest = list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*left, word, *rest], taken
        name, key, value = split_flag(word)
        if _LEVEL.fullmatch(name):
            name, value = "-O", name[2:]
        if name in _FIELDS and name not in known:
            left.append(_as_override(name, value, rest))
            taken.append(f"{name} (this is what --hf-overrides is for, to which it was added)")
            continue
        row = None if name in known else BY_FLAG.get(name) or _negated(name)
        if row is None:
            left.append(word)
            continue
        if row.kind == "switch":
            name, value = _switched(name, value, rest)
        elif value is None:
            value = _values_of(name, row, rest)
        if not is_fine(row, value, key):
            raise UnsupportedFlag(_refusal(name, key, value, row))
        taken.append(f"{name} ({row.why})")
    return left, taken


def is_fine(row: Row, value: str | None, key: str = "") -> bool:
    """Whether this value of the flag may be ignored. For a flag with a JSON object: the object, or its member `key`."""
    if row.fine == ANY or value in row.fine:
        return row.fine == ANY or not key
    if row.kind != "json" or value is None:
        return False
    try:
        members = {key: _json_or_text(value)} if key else json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(members, dict) and all(
        f"{name}={_as_text(member)}" in row.fine or f"{name}=*" in row.fine for name, member in members.items()
    )


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _as_text(member: Any) -> str:
    return member if isinstance(member, str) else json.dumps(member)


def _as_override(name: str, value: str | None, rest: list[str]) -> str:
    if value is None and not rest:
        raise UnsupportedFlag(f"{name} needs a value")
    return f"--hf-overrides={json.dumps({_FIELDS[name]: _json_or_text(rest.pop(0) if value is None else value)})}"


def without_vllms(parser: CommandParser, words: list[str]) -> list[str]:
    """The words without vLLM's flags that have no effect here; those become the parser's default of `notes`.

    Ends the command for unsupported flags.
    """
    try:
        words, notes = take_out(words, parser.actions())
    except UnsupportedFlag as error:
        parser.error(str(error))
    parser.set_defaults(notes=notes)
    return words


def _negated(name: str) -> Row | None:
    """The row of --x for --no-x, which only switches have."""
    row = BY_FLAG.get("--" + name.removeprefix("--no-")) if name.startswith("--no-") else None
    return row if row is not None and row.kind == "switch" else None


def _switched(name: str, value: str | None, rest: list[str]) -> tuple[str, str]:
    """The switch's name, and "on" or "off". Older versions' --enable-chunked-prefill took a word, which may be in `rest`."""
    if value is None and rest and rest[0].lower() in ("true", "false"):
        value = rest.pop(0)
    word = "true" if value is None else value.lower()
    if word not in ("true", "false"):
        raise UnsupportedFlag(f"{name} is a switch: it takes no {value}")
    if word == "false":
        name = name.replace("--no-", "--", 1) if name.startswith("--no-") else name.replace("--", "--no-", 1)
    return name, "off" if name.startswith("--no-") else "on"


def _values_of(name: str, row: Row, rest: list[str]) -> str:
    """The flag's values, removed from `rest`."""
    values = []
    while rest and (not rest[0].startswith("-") or _NEGATIVE_NUMBER.fullmatch(rest[0])):
        values.append(rest.pop(0))
        if row.kind != "list":
            break
    if not values:
        raise UnsupportedFlag(f"{name} needs a value")
    return " ".join(values)


def _refusal(name: str, key: str, value: str, row: Row) -> str:
    shown = name + (f".{key}" if key else "") if row.kind in ("switch", "json", "list") else f"{name} {value}"
    allowed = [v for v in row.fine if v not in ("on", "off", "") and row.kind != "json"]
    nearest = f"; nearest: {row.nearest}" if row.nearest else ""
    return f"{shown} is not supported: {row.why}{nearest}" + (f" (taken: {', '.join(allowed)})" if allowed else "")


def nearest(name: str, known: Collection[str], vllms: bool = True) -> str:
    """The flag that was probably meant, or "". name, known: with dashes. vllms: search vLLM's flags, too."""
    candidates = [flag for flag in (*known, *(BY_FLAG if vllms else ())) if flag.startswith("--")]
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    return close[0] if close else ""
