"""A terminal for commands that talk to a person: text that says it is one, and lines that are typed."""

import io


class Terminal(io.StringIO):
    """Text in memory that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def type_lines(monkeypatch, *lines: str | type[BaseException]) -> None:
    """Let `input` return these lines, one a call. An exception among them, as Ctrl-C makes one, is raised in its turn."""
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
