"""`quire completion bash|zsh|fish`: a script by which a shell completes commands, flags and their values. Made of the parser.

eval "$(quire completion bash)"      source <(quire completion zsh)      quire completion fish | source
"""

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

SHELLS = ("bash", "zsh", "fish")
FILES = ("//",)  # no value is known: a path, maybe, but no flag


class Command(NamedTuple):
    """path: "serve", "bench serve"; words: its subcommands; flags: each with the values it may have, FILES for any."""

    path: str
    help: str
    words: tuple[str, ...]
    flags: dict[str, tuple[str, ...]]


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for one of SHELLS."""
    commands = list(_commands(parser, "", ""))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _commands(parser: argparse.ArgumentParser, path: str, text: str) -> list[Command]:
    words: dict[str, argparse.ArgumentParser] = {}
    helps: dict[str, str] = {}
    flags: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words = dict(action.choices)
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for flag in action.option_strings:
            flags[flag] = _values(action)
    closed = [a.choices for a in parser._actions if not a.option_strings and isinstance(a.choices, tuple)]
    positional = [str(choice) for choices in closed for choice in choices]
    found = [Command(path, text, (*words, *positional), flags)]
    for name, child in words.items():
        found += _commands(child, f"{path} {name}".strip(), helps.get(name, ""))
    return found


def _values(action: argparse.Action) -> tuple[str, ...]:
    """What may follow the flag: () after one that takes nothing, or may be left alone."""
    names: Iterable[Any] = action.choices or getattr(action.type, "names", None) or ()
    return tuple(map(str, names)) if names or action.nargs in (0, "?", "*") else FILES


def _cases(commands: list[Command]) -> list[tuple[str, str]]:
    """What may follow a command, and a flag of it: (pattern of `path` or of `path flag`, words)."""
    cases = []
    for command in commands:
        for flag, values in command.flags.items():
            if values:
                cases.append((f"{command.path} {flag}".strip(), " ".join(values)))
        cases.append((command.path, " ".join((*command.words, *command.flags))))
    return cases


# One function for bash and zsh (through bashcompinit): find the command's path, then offer what may follow.
_FUNCTION = """\
_quire_words() {
    case "$1" in
%s
    esac
}
_quire() {
    local word path="" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "%s" in
            *",${path:+$path }$word,"*) path="${path:+$path }$word" ;;
        esac
    done
    if [[ "$previous" == -* ]]; then
        words="$(_quire_words "${path:+$path }$previous")"
    fi
    if [[ -z "$words" ]]; then
        words="$(_quire_words "$path")"
    fi
    COMPREPLY=()
    if [[ "$words" != // ]]; then
        COMPREPLY=( $(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}") )
    fi
    if [[ ${#COMPREPLY[@]} -eq 0 ]]; then
        COMPREPLY=( $(compgen -f -- "${COMP_WORDS[COMP_CWORD]}") )
    fi
}
complete -o filenames -F _quire quire
"""


def _bash(commands: list[Command]) -> str:
    cases = "\n".join(f"        '{pattern}') echo '{words}' ;;" for pattern, words in _cases(commands))
    paths = ",".join(["", *(command.path for command in commands if command.path), ""])
    return "# bash completion of quire\n" + _FUNCTION % (cases, paths)


def _zsh(commands: list[Command]) -> str:
    first, _, rest = _bash(commands).partition("\n")
    return f"#compdef quire\n{first.replace('bash', 'zsh')}\nautoload -U +X bashcompinit && bashcompinit\n{rest}"


def _fish(commands: list[Command]) -> str:
    lines = ["# fish completion of quire"]
    for command in commands:
        *_, last = ["", *command.path.split()]
        where = f"__fish_seen_subcommand_from {last}" if last else "__fish_use_subcommand"
        lines += [f"complete -c quire -n '{where}' -f -a '{word}'" for word in command.words]
        for flag, values in command.flags.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"
            after = " -r" if values == FILES else f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"complete -c quire -n '{where}' {kind}{after}")
    return "\n".join(lines) + "\n"
