"""`quire`: the command line. Only argparse is imported until a command needs more, so that --help and version are quick.

A command's flags are added by a function in its own file (serve_command.py, client_commands.py, ...); it is imported to run.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from quire.ipc.process.command import CommandParser, quiet_interrupts
from quire.ipc.process.flags import json_flags, normal_words, split_flag
from quire.ipc.version import VERSION

# of other programs, with ours
_OTHER_COMMANDS = {
    "run": "quire chat MODEL, which talks to a model, or quire serve MODEL",
    "pull": "quire serve MODEL, which downloads a model that is not here",
    "download": "quire serve MODEL, which downloads a model that is not here",
    "list": "quire models",
    "ls": "quire models",
    "ps": "quire models",
    "show": "quire estimate MODEL",
    "server": "quire serve",
    "launch": "quire serve",
    "start": "quire serve",
    "generate": "quire complete",
    "benchmark": "quire bench",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong arguments, 130 interrupted while starting."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # before the command handles it itself
        return 130
    except BrokenPipeError:  # the reader has enough, as in `quire models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1


def _run(words: list[str]) -> int:
    parser = _parser()
    command, path = command_of(parser, words)
    words = normal_words(words[len(path) :], json_flags(command))
    if not path and words and words[0] in _OTHER_COMMANDS:
        parser.error(f"there is no command {words[0]!r}; did you mean {_OTHER_COMMANDS[words[0]]}?")
    if words and (choices := subcommands(command)) and words[0] not in choices and not words[0].startswith("-"):
        _no_command(command, words[0], list(choices))
    prepare = command.get_default("prepare")
    if prepare is not None:
        words = prepare(command, words)
    args, unknown = parser.parse_known_args([*path, *words])
    if unknown:  # reported by the command that does not know them, so that its help is shown
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(args.parser, unknown)}")
    if args.run is None:
        args.parser.print_help()
        return 2
    return args.run(args)


def command_of(parser: CommandParser, words: Sequence[str]) -> tuple[CommandParser, list[str]]:
    """The parser of the command that the words begin with, and the command's words, such as ["bench", "serve"]."""
    path = list[str]()
    while len(path) < len(words):
        choices = subcommands(parser)
        if words[len(path)] not in choices:
            break
        parser = choices[words[len(path)]]
        path.append(words[len(path)])
    return parser, path


def subcommands(parser: argparse.ArgumentParser) -> dict[str, CommandParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _no_command(parser: CommandParser, word: str, commands: list[str]) -> NoReturn:
    from difflib import get_close_matches

    close = get_close_matches(word, commands, n=1)
    meant = f"did you mean {parser.prog} {close[0]}?" if close else f"there are {', '.join(commands)}"
    parser.error(f"there is no command {word!r}; {meant}")


def _meant(parser: CommandParser, unknown: list[str]) -> str:
    from quire.frontend.cli.vllm_compat import nearest

    names = [split_flag(word)[0] for word in unknown if word.startswith("--")]
    known = parser.actions()
    close = [flag for name in names if (flag := nearest(name, known, vllms=parser.prog == "quire serve"))]
    return f"; did you mean {', '.join(dict.fromkeys(close))}?" if close else ""


def _parser() -> CommandParser:
    with quiet_interrupts():
        from quire.frontend.cli.bench.arguments import add_bench
        from quire.frontend.cli.client_commands import add_client_commands
        from quire.frontend.cli.estimate import add_estimate
        from quire.frontend.cli.host import add_host
        from quire.frontend.cli.reload import add_reload
        from quire.frontend.cli.run_batch import add_run_batch
        from quire.frontend.cli.serve_command import add_route, add_serve

    parser = CommandParser(prog="quire", description="Quire serves large language models.")
    parser.add_argument("--version", action="version", version=f"quire {VERSION}")
    parser.set_defaults(parser=parser, run=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_serve(commands)
    add_route(commands)
    add_reload(commands)
    add_host(commands)
    add_run_batch(commands)
    add_bench(commands)
    add_estimate(commands)
    add_client_commands(commands, parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
