"""The flags for docs/configuration.md, from the parsers themselves and docs/tools/flag_notes.py."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from flag_notes import FLAG_NOTES
from markdown import code, table

from quire.enginecore.cli import command_parser
from quire.frontend.cli import main as cli
from quire.ipc.process.command import CommandParser

TEMPLATES = Path(__file__).parents[1] / "templates"
_DEFAULT = re.compile(r" ?\(default: (.*?)\)$", re.DOTALL)
_HELP = (argparse._HelpAction, argparse._VersionAction)
OWN_HELP = "--help"  # of quire serve: it has topics and is not argparse's HelpAction


def parser_of(*command: str) -> CommandParser:
    return cli.command_of(cli._parser(), command)[0]


def all_commands(parser: CommandParser | None = None) -> Iterator[CommandParser]:
    """Every command that has no commands below it."""
    below = cli.subcommands(parser or cli._parser())
    for command in below.values():
        yield from all_commands(command)
    if parser is not None and not below:
        yield parser


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [a for a in parser._actions if not isinstance(a, _HELP) and OWN_HELP not in a.option_strings]


def name_of(action: argparse.Action) -> str:
    """The name in flag_notes.py: the first long flag, or the positional argument's name."""
    return next((flag for flag in action.option_strings if flag.startswith("--")), action.dest)


def serve() -> str:
    """A table of flags for each group."""
    parser = parser_of("serve")
    parts = []
    for group in parser._action_groups:
        actions = [a for a in actions_of(parser) if a in group._group_actions]
        if actions:
            title = {"options": "More", "positional arguments": "The model to serve"}.get(group.title or "", group.title or "")
            parts += [f"### {title[:1].upper()}{title[1:]}", _noted(parser, actions)]
    return "\n\n".join(parts)


def enginecore() -> str:
    """The flags that the daemon has beside the engine's."""
    parser, known = command_parser(), parser_of("serve").actions()
    return _noted(parser, [a for a in actions_of(parser) if a.option_strings and a.option_strings[0] not in known])


def commands() -> str:
    """The other commands: their own flags, without the engine's."""
    engine = command_parser().actions()
    parts = []
    for parser in all_commands():
        if parser.prog == "quire serve":
            continue
        actions, starts_engine = actions_of(parser), "--max-num-seqs" in parser.actions()
        if parser.prog == "quire route":
            serve = parser_of("serve").actions()
            actions = [a for a in actions if not (a.option_strings and a.option_strings[0] in serve)]
        parts += [f"### `{parser.prog}`", parser.description or ""]
        if starts_engine:
            actions = [a for a in actions if not (a.option_strings and a.option_strings[0] in engine)]
            parts.append("It takes the engine's flags, too: model, defaults, memory, scheduling, logs.")
        if parser.prog == "quire route":
            parts.append("It takes the flags of `quire serve`, but for `--engine` and the engine's own.")
        if actions:
            parts.append(table(["flag", "default", "purpose"], [_plain(parser, action) for action in actions]))
    return "\n\n".join(filter(None, parts))


def _noted(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> str:
    rows = []
    for action in actions:
        note = FLAG_NOTES[name_of(action)]
        rows.append([*_plain(parser, action), note.effect or "–", note.typical or "leave it out"])
    return table(["flag", "default", "purpose", "effect on memory and throughput", "typical"], rows)


def _plain(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    stated = _DEFAULT.search(text)
    return [code_of(action), stated[1] if stated else _default(action), _DEFAULT.sub("", text)]


def code_of(action: argparse.Action) -> str:
    return ", ".join(map(code, action.option_strings)) or code(action.dest.upper())


def _default(action: argparse.Action) -> str:
    if action.required:
        return "needed"
    if action.nargs == 0:
        return "off"
    return {None: "none", False: "off", True: "on"}.get(action.default, str(action.default))


def templates() -> str:
    """The files of docs/templates/, each with the text of its first comment."""
    rows = []
    for path in sorted(TEMPLATES.glob("*.yaml")):
        text = path.read_text()
        first = text.splitlines()[0].lstrip("# ")
        flags = ", ".join(code(f"--{name}") for name in yaml.safe_load(text))
        rows.append([f"[{path.name}](templates/{path.name})", first, flags])
    return table(["file", "for", "sets"], rows)
