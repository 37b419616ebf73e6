"""Values of flags, for `quire` and `enginecore` alike: vLLM's spellings are accepted with the same meaning.

`--max_model_len` is `--max-model-len`, `8k` is 8000 and `8K` 8192, `half` is float16, and a flag that takes a JSON object also
takes its keys one by one, after dots. Called by the command lines and by add_engine_arguments. Standard library only.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"([+-]?\d{1,18}(?:\.\d{1,18})?)([kmgtKMGT]?)", re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
DTYPES = {"half": "float16", "float": "float32"}  # vLLM's alternative names
# vLLM's ways of reading a checkpoint: its safetensors files are read in one way, the fastest here, whatever is asked for
_READERS = ("safetensors", "hf", "fastsafetensors", "instanttensor", "runai_streamer", "bitsandbytes", "mistral")
LOAD_FORMATS = dict.fromkeys(_READERS, "auto")
MODEL_IMPLS = {"vllm": "quire"}


def human_int(text: str) -> int:
    """A whole number, maybe with a suffix: k, m, g, t are powers of 1000 and may follow a fraction; K, M, G, T are of 1024."""
    parts = _NUMBER.fullmatch(text)
    if parts:
        number, suffix = Decimal(parts[1]), parts[2]
        value = number * (1000 if suffix.islower() else 1024) ** _POWERS.get(suffix.lower(), 0)
        if value == int(value) and (suffix.islower() or "." not in parts[1]):
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number; 8192, 8k (8000) and 8K (8192) are")


def model_len(text: str) -> int | None:
    """`human_int`, or None for `auto` and -1: the model's length, or as much of it as fits in memory."""
    return None if text in ("auto", "-1") else human_int(text)


def profile_dir_of(config: Any) -> str | None:
    """The folder in vLLM's profiler_config; None if it is empty. Raises ValueError for settings that do not exist here."""
    match config:
        case None | {} if not config:
            return None
        case {"torch_profiler_dir": str() as folder, **rest} if folder and rest in ({}, {"profiler": "torch"}):
            return folder
    raise ValueError('may say {"profiler": "torch", "torch_profiler_dir": FOLDER} and nothing else; nearest: --profile-dir')


def one_of(names: Sequence[str], other_names: Mapping[str, str | None]) -> Any:
    """The type of a flag with these values. other_names: alternative name -> value."""

    def value(text: str) -> str | None:
        name = other_names.get(text, text)
        if name is not None and name not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join((*names, *other_names))}")
        return name

    value.names = (*names, *other_names)  # type: ignore[attr-defined]  # for completion by shells
    return value


class Switch(argparse.BooleanOptionalAction):
    """--x and --no-x, without the default that some Python versions add to the help."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.help = help


class JsonObject(argparse.Action):
    """A JSON object. If it is given again, or key by key (`normal_words`), the objects are merged; later values win."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        try:
            given = json.loads(values)
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentError(self, f"this is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise argparse.ArgumentError(self, 'a JSON object is needed, like {"key": 1}')
        setattr(namespace, self.dest, merged(getattr(namespace, self.dest) or {}, given))


class JsonMember(argparse.Action):
    """One key of a flag that takes a JSON object, as a flag of its own. key: its name there; dest: the object's flag's."""

    def __init__(self, option_strings: Sequence[str], dest: str, key: str = "", **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.key = key

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, merged(getattr(namespace, self.dest) or {}, {self.key: values}))


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`base` updated with `more`, recursively for objects within objects; "key+" appends to a list."""
    result = dict(base)
    for key, value in more.items():
        before = result.get(key.removesuffix("+"))
        if key.endswith("+"):
            result[key[:-1]] = [*(before if isinstance(before, list) else []), *value]
        else:
            result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def split_flag(word: str) -> tuple[str, str, str | None]:
    """`--a_b.c_d=v` is ("--a-b", "c_d", "v"): a flag's name, the key after its dot, the value after its equals sign.

    A word that is no flag is returned as it is. Keys and values are not changed.
    """
    if not word.startswith("-") or word in ("-", "--"):
        return word, "", None
    name, equals, value = word.partition("=")
    name, _, key = name.partition(".")
    return (name.replace("_", "-") if name.startswith("--") else name), key, value if equals else None


def json_flags(parser: argparse.ArgumentParser) -> frozenset[str]:
    """The flags of a parser that take a JSON object."""
    return frozenset(flag for action in parser._actions if isinstance(action, JsonObject) for flag in action.option_strings)


def normal_words(words: Sequence[str], json_flags: frozenset[str]) -> list[str]:
    """Command-line words with flags' names as they are declared, and dotted keys of `json_flags` as JSON objects."""
    result, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*result, word, *rest]
        name, key, value = split_flag(word)
        if key and name in json_flags:
            if value is None and rest:
                value = rest.pop(0)
            result.append(f"{name}={json.dumps(_object(key.split('.'), value or ''))}")
        elif name is word:
            result.append(word)
        else:
            result.append(name + (f".{key}" if key else "") + (f"={value}" if value is not None else ""))
    return result


def _object(path: list[str], text: str) -> dict[str, Any]:
    value: Any = [_json(part) for part in text.split(",")] if path[-1].endswith("+") else _json(text)
    for key in reversed(path):
        value = {key: value}
    return value


def _json(text: str) -> Any:
    """The JSON value, or the text itself if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
