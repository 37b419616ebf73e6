"""`--config FILE`: flags from a YAML file. The command line takes precedence over the file, the file over the defaults.

A key is a flag's name without its dashes, with `-` or `_`; a list is several values, an object a JSON value, true and false
turn switches on and off, null is ignored. Errors name file and line. Called by `quire serve`.
"""

import argparse
import json
from collections.abc import Collection
from typing import Any, NamedTuple

import yaml

from quire.frontend.cli.vllm_compat import UnsupportedFlag, nearest, take_out
from quire.frontend.cli.vllm_flags import BY_FLAG
from quire.frontend.http.limits.limits_file import YAML_ERRORS, yaml_error
from quire.ipc.process.command import CommandParser
from quire.ipc.process.flags import JsonObject, Switch

_MAX_BYTES = 1 << 20


class Entry(NamedTuple):
    line: int
    key: str
    value: Any


def words_of(path: str, parser: CommandParser, given: Collection[str]) -> list[str]:
    """The file as words of a command line, without flags that have their `dest` in `given`.

    Ends the command with an error that names file and line.
    """
    words, actions = list[str](), parser.actions()
    try:
        for entry in _entries(path, parser):
            parser.place = f"{path}, line {entry.line}: "
            name = "--" + entry.key.replace("_", "-")
            action = actions.get(name)
            if action is None and name not in BY_FLAG:
                close = nearest(name, actions)
                parser.error(f"unknown key {entry.key!r}" + (f"; did you mean {close[2:]}?" if close else ""))
            if entry.value is None or (action is not None and action.dest in given):
                continue
            try:
                found = _words(name, action, entry.value, negated=f"--no-{name[2:]}" in actions)
            except (TypeError, ValueError, RecursionError):  # a date, a set, or a list that contains itself
                parser.error(f"{entry.key}: this value cannot be written as JSON")
            _check(parser, found)
            words += found
    finally:
        parser.place = ""
    return words


def _entries(path: str, parser: CommandParser) -> list[Entry]:
    parser.place = f"--config {path}: "
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        parser.error(error.strerror or str(error))
    if len(text) > _MAX_BYTES:
        parser.error("this file is too large to be one of flags")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            parser.error("a mapping of flags to values is needed, a line each, like `port: 8000`")
        pairs = [(key.start_mark.line + 1, loader.construct_object(key), value) for key, value in node.value]
        entries = [Entry(line, key, loader.construct_object(value, deep=True)) for line, key, value in pairs]
    except yaml.MarkedYAMLError as error:
        if error.problem_mark is not None:
            parser.place = f"{path}, line {error.problem_mark.line + 1}: "
        parser.error(f"this is not YAML: {error.problem}")
    except YAML_ERRORS as error:
        parser.error(f"this is not YAML: {yaml_error(error)}")
    _check_keys(path, parser, entries)
    return entries


def _check_keys(path: str, parser: CommandParser, entries: list[Entry]) -> None:
    seen: dict[str, int] = {}
    for line, key, _ in entries:
        parser.place = f"{path}, line {line}: "
        if not isinstance(key, str):
            parser.error(f"a key is a flag's name, not {key!r}")
        if key.replace("_", "-") in ("config", "help", "h"):
            parser.error(f"{key} has no place in this file")
        if (before := seen.setdefault(key.replace("_", "-"), line)) != line:
            parser.error(f"{key} is in line {before} already")


def _words(name: str, action: argparse.Action | None, value: Any, negated: bool) -> list[str]:
    """A key and its value as words of a command line."""
    kind = BY_FLAG[name].kind if action is None else None
    is_switch = kind == "switch" or isinstance(action, Switch) or (action is not None and action.nargs == 0)
    if is_switch and isinstance(value, bool):
        if value:
            return [name]
        return [f"--no-{name[2:]}"] if negated or kind == "switch" else []
    if isinstance(value, dict) or kind == "json" or isinstance(action, JsonObject):
        return [f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    if isinstance(value, list):
        if kind == "list" or (action is not None and action.nargs == "+"):
            return [name, *map(str, value)] if value else []
        return [f"{name}={json.dumps(value)}"]
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}"]


def _check(parser: CommandParser, words: list[str]) -> None:
    """End the command if these words are not valid."""
    try:
        left, _ = take_out(words, parser.actions())
    except UnsupportedFlag as error:
        parser.error(str(error))
    _, unknown = parser.parse_known_args(left)
    if unknown:
        parser.error(f"unrecognized: {' '.join(unknown)}")
