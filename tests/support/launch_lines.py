"""Launch lines of `quire serve`, parsed as the command does, without running anything."""

import argparse

from quire.frontend.cli import main as cli
from quire.ipc.process.command import CommandParser
from quire.ipc.process.flags import json_flags, normal_words


def serve_parser() -> CommandParser:
    return cli.command_of(cli._parser(), ["serve"])[0]


def parsed(*words: str, name: str = "serve") -> argparse.Namespace:
    """The arguments of `quire serve WORDS`, or of `quire NAME WORDS`. Raises SystemExit where it would end with an error."""
    parser = cli._parser()
    command, _ = cli.command_of(parser, [name])
    words, prepare = normal_words(words, json_flags(command)), command.get_default("prepare")
    words = prepare(command, words) if prepare is not None else words
    args, unknown = parser.parse_known_args([name, *words])
    assert unknown == []
    return args
