"""The small commands of `quire`: chat, complete, models, collect-env, completion, version. Each is run by its own module."""

import argparse

from quire.frontend.cli.api_client import add_client_arguments
from quire.frontend.cli.completion import SHELLS, script
from quire.ipc.process.command import CommandParser
from quire.ipc.version import VERSION


def add_client_commands(commands: "argparse._SubParsersAction[CommandParser]", whole: CommandParser) -> None:
    """whole: the parser of all commands, from which shell completion is made."""
    _add_chat(commands)
    _add_complete(commands)
    _add_models(commands)
    environment = commands.add_parser(
        "collect-env",
        help="print versions, GPUs and limits, for a bug report",
        description="Print versions, GPUs and limits of this machine.",
    )
    environment.set_defaults(run=_collect_env, parser=environment)
    completion = commands.add_parser(
        "completion",
        help="print a script for your shell's completion",
        description='For bash: eval "$(quire completion bash)"; for zsh: source <(quire completion zsh); for fish: '
        "quire completion fish | source",
    )
    completion.add_argument("shell", choices=SHELLS, help=" or ".join(SHELLS))
    completion.set_defaults(run=lambda args: _completion(args, whole), parser=completion)
    version = commands.add_parser("version", help="print the version", description="Print the version.")
    version.set_defaults(run=_version, parser=version)


def _add_chat(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        usage="quire chat [MODEL] [FLAGS] [-- FLAGS OF quire serve]",
        description="Talk to any OpenAI-compatible server. With MODEL, a server starts and ends with the chat if none answers; "
        "flags behind -- are for it. Ctrl-C stops an answer, /help lists the commands, /exit (or Ctrl-D) leaves. With text "
        "piped in, answers that and ends.",
    )
    chat.add_argument(
        "own_model",
        nargs="?",
        metavar="MODEL",
        help="model folder or hub id for a server of this chat's own (default: none is started)",
    )
    add_client_arguments(chat)
    chat.add_argument("--system", "--system-prompt", help="a system message (default: none)")
    _add_sampling(chat)
    chat.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer and end (default: a conversation)")
    chat.set_defaults(run=_chat, parser=chat, prepare=_without_serve_flags, serve_flags=())


def _add_complete(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    complete = commands.add_parser(
        "complete",
        help="complete a text with a served model",
        description="Complete texts with any OpenAI-compatible server. With text piped in, completes that and ends.",
    )
    add_client_arguments(complete)
    _add_sampling(complete)
    complete.add_argument("-q", "--quick", metavar="TEXT", help="complete this text and end (default: ask for prompts)")
    complete.set_defaults(run=_complete, parser=complete)


def _add_sampling(parser: CommandParser) -> None:
    parser.add_argument("--max-tokens", type=int, help="the longest answer, in tokens (default: what the server allows)")
    parser.add_argument("--temperature", type=float, help="0 gives the same answer each time (default: the server's)")


def _add_models(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    models = commands.add_parser(
        "models",
        help="list a server's models, or those on this disk",
        description="List a server's models, or this disk's.",
    )
    add_client_arguments(models)
    models.add_argument("--cached", action="store_true", help="list the hub's models that are on this disk, without a server")
    models.add_argument("--download-dir", help="where hub downloads are (default: the hub's own cache)")
    models.set_defaults(run=_models, parser=models)


# ---------------------------------------------------------------------------------------------------------------- run
def _chat(args: argparse.Namespace) -> int:
    from quire.frontend.cli.chat import chat, options_of

    if args.serve_flags and args.own_model is None:
        args.parser.error(
            f"{args.serve_flags[0]} is for a server, which needs a MODEL: quire chat MODEL -- {args.serve_flags[0]}"
        )
    return chat(options_of(args))


def _without_serve_flags(parser: CommandParser, words: list[str]) -> list[str]:
    """The words before --; those behind it become the parser's default of `serve_flags`."""
    if "--" not in words:
        return words
    at = words.index("--")
    parser.set_defaults(serve_flags=tuple(words[at + 1 :]))
    return words[:at]


def _complete(args: argparse.Namespace) -> int:
    from quire.frontend.cli.complete import complete

    return complete(args)


def _models(args: argparse.Namespace) -> int:
    from quire.frontend.cli.models import models

    return models(args)


def _collect_env(args: argparse.Namespace) -> int:
    from quire.frontend.cli.collect_env import collect_env

    return collect_env()


def _completion(args: argparse.Namespace, whole: CommandParser) -> int:
    print(script(whole, args.shell), end="")
    return 0


def _version(args: argparse.Namespace) -> int:
    print(f"quire {VERSION}")
    return 0
