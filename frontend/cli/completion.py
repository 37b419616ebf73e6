"""`quire completion bash|zsh|fish`: a script for a shell to complete commands, flags and their values, made from the parser.

eval "$(quire completion bash)"      source <(quire completion zsh)      quire completion fish | source
"""

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

SHELLS = ("bash", "zsh", "fish")
FILES = ("//",)  # no values are known: complete paths, but no flags


class Command(NamedTuple):
    """path: "serve", "bench serve"; words: its subcommands; flags: each with its possible values, or FILES for any value."""

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
    """The flag's possible values; () for a flag that takes none, or may stand without."""
    names: Iterable[Any] = action.choices or getattr(action.type, "names", None) or ()
    return tuple(map(str, names)) if names or action.nargs in (0, "?", "*") else FILES


def _cases(commands: list[Command]) -> list[tuple[str, str]]:
    """Completions after a command, and after each of its flags: (pattern of `path` or of `path flag`, words)."""
    cases = []
    for command in commands:
        for flag, values in command.flags.items():
            if values:
                cases.append((f"{command.path} {flag}".strip(), " ".join(values)))
        cases.append((command.path, " ".join((*command.words, *command.flags))))
    return cases


# The words after each command and flag, the same for bash and zsh. %s: _cases, as a shell's cases.
_WORDS = """\
_quire_words() {
    case "$1" in
%s
    esac
}
"""

# Find the command's path, then offer the words that may follow. Bash splits --flag=value into three words.
_BASH = """\
_quire() {
    local word found="" words="" current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "%s" in
            *",${found:+$found }$word,"*) found="${found:+$found }$word" ;;
        esac
    done
    if [[ "$current" == "=" ]]; then
        current=""
    elif [[ "$previous" == "=" ]]; then
        previous="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    if [[ "$previous" == -* ]]; then
        words="$(_quire_words "${found:+$found }$previous")"
    fi
    if [[ -z "$words" ]]; then
        words="$(_quire_words "$found")"
    fi
    COMPREPLY=()
    if [[ "$words" != // ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    fi
    if [[ ${#COMPREPLY[@]} -eq 0 ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}
complete -o filenames -F _quire quire
"""

# zsh needs its own function: its arrays, slices and the meaning of $path differ from bash's.
_ZSH = """\
_quire() {
    local word found="" previous="${words[CURRENT-1]}"
    local -a offered
    for word in "${(@)words[2,CURRENT-1]}"; do
        case "%s" in
            *",${found:+$found }$word,"*) found="${found:+$found }$word" ;;
        esac
    done
    if [[ "$PREFIX" == --*=* ]]; then
        previous="${PREFIX%%%%=*}"
        compset -P '*='
    fi
    if [[ "$previous" == -* ]]; then
        offered=(${(s: :)"$(_quire_words "${found:+$found }$previous")"})
    fi
    if (( ! $#offered )); then
        offered=(${(s: :)"$(_quire_words "$found")"})
    fi
    if [[ "$offered" == // ]]; then
        _files
    else
        compadd -a offered || _files
    fi
}
(( $+functions[compdef] )) || { autoload -U compinit && compinit; }
compdef _quire quire
if [[ "$funcstack[1]" == _quire ]]; then _quire "$@"; fi  # loaded from a file of fpath
"""

# Find the typed command's path, as above; fish calls this once for each path.
_FISH = """\
function __quire_at
    set -l found ""
    for word in (commandline -opc)[2..]
        set -l longer (string trim -- "$found $word")
        contains -- "$longer" %s; and set found "$longer"
    end
    test "$found" = "$argv"
end
"""


def _bash(commands: list[Command]) -> str:
    return "# bash completion of quire\n" + _words_function(commands) + _BASH % _paths(commands)


def _zsh(commands: list[Command]) -> str:
    return "#compdef quire\n# zsh completion of quire\n" + _words_function(commands) + _ZSH % _paths(commands)


def _words_function(commands: list[Command]) -> str:
    return _WORDS % "\n".join(f"        '{pattern}') echo '{words}' ;;" for pattern, words in _cases(commands))


def _paths(commands: list[Command]) -> str:
    return ",".join(["", *(command.path for command in commands if command.path), ""])


def _fish(commands: list[Command]) -> str:
    paths = " ".join(f"'{command.path}'" for command in commands if command.path)
    lines = ["# fish completion of quire", *(_FISH % paths).splitlines()]
    for command in commands:
        where = f"__quire_at {command.path}".strip()
        lines += [f"complete -c quire -n '{where}' -f -a '{word}'" for word in command.words]
        for flag, values in command.flags.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"
            after = " -r" if values == FILES else f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"complete -c quire -n '{where}' {kind}{after}")
    return "\n".join(lines) + "\n"
