"""Reads EBNF as llama.cpp's GBNF and xgrammar write it: turns a text into rules of nodes, or says where it is wrong.

    root ::= "[" item ("," item)* "]"   # a comment
    item ::= [a-z_]+
           | "\\u00e9"{2,3}

A rule goes on until the next one begins, over any number of lines. ebnf.py makes Lark of the nodes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

Chars = tuple[tuple[int, int], ...]  # ranges of code points, both ends included, in order, with gaps between them

LAST = 0x10FFFF
MAX_TIMES = 100_000
ANY_CHAR: Chars = ((0, 0xD7FF), (0xE000, LAST))
BEGINS_RULE = re.compile(r"[^\W\d][\w.-]*[ \t]*::=")
_NAME = re.compile(r"[^\W\d][\w.-]*|\d[\w.-]*")
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_TIMES = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}


@dataclass(frozen=True)
class OneOf:
    """One character out of a set."""

    chars: Chars


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Ref:
    name: str


@dataclass(frozen=True)
class Seq:
    nodes: "tuple[Node, ...]"


@dataclass(frozen=True)
class Alt:
    nodes: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repeat:
    """most: None for no bound."""

    node: "Node"
    least: int
    most: int | None


Node = OneOf | Text | Ref | Seq | Alt | Repeat


def normal(ranges: Iterable[tuple[int, int]]) -> Chars:
    """Ranges in order, merged where they touch, and without surrogates, which are not characters."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    parts = [(max(low, first), min(high, last)) for low, high in merged for first, last in ANY_CHAR]
    return tuple((low, high) for low, high in parts if low <= high)


def all_but(chars: Chars) -> Chars:
    ends = [-1, *(end for low, high in chars for end in (low, high)), LAST + 1]
    return normal((ends[i] + 1, ends[i + 1] - 1) for i in range(0, len(ends), 2) if ends[i] + 1 <= ends[i + 1] - 1)


def rules_of(text: str) -> dict[str, Node]:
    """The rules of a grammar by name. Raises ValueError that says where it is wrong."""
    return _Reader(text).rules()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip()
        while self._at < len(self._text):
            begin = self._at
            if not BEGINS_RULE.match(self._text, begin):
                self._fail("a rule should begin here, as NAME ::= ...")
            name = self._name()
            self._skip()
            self._at += len("::=")
            self._skip()
            if name in rules:
                self._fail(f"there are two rules {name!r}", begin)
            rules[name] = self._alternatives()
        if "root" not in rules:
            raise ValueError("there is no rule 'root', with which to begin")
        return rules

    def _alternatives(self) -> Node:
        found = [self._sequence()]
        while self._is("|"):
            self._take("|")
            found.append(self._sequence())
        return found[0] if len(found) == 1 else Alt(tuple(found))

    def _sequence(self) -> Node:
        nodes: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)" and not BEGINS_RULE.match(self._text, self._at):
            nodes.append(self._repeated(self._item()))
        return nodes[0] if len(nodes) == 1 else Seq(tuple(nodes))

    def _item(self) -> Node:
        match self._text[self._at]:
            case '"':
                return self._string()
            case "[":
                return self._class()
            case ".":
                self._take(".")
                return OneOf(ANY_CHAR)
            case "(":
                self._take("(")
                inner = self._alternatives()
                self._take(")")
                return inner
        return Ref(self._name())

    def _repeated(self, node: Node) -> Node:
        while self._at < len(self._text) and self._text[self._at] in "*+?{":
            begin = self._at
            match self._text[begin]:
                case "{":
                    least, most = self._times()
                case sign:
                    self._take(sign)
                    least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            if (most is not None and least > most) or max(least, most or 0) > MAX_TIMES:
                self._fail(f"repetitions are {{least,most}}, up to {MAX_TIMES}", begin)
            node = Seq(()) if most == 0 else Repeat(node, least, most)
        return node

    def _times(self) -> tuple[int, int | None]:
        found = _TIMES.match(self._text, self._at)
        if found is None or not (found[1] or found[3]) or (found[3] and not found[2]) or len(found[1] + found[3]) > 12:
            self._fail("a repetition is {3}, {3,}, {,5} or {3,5}")
        self._at = found.end()
        self._skip()
        least = int(found[1] or 0)
        return least, int(found[3]) if found[3] else None if found[2] else least

    def _string(self) -> Node:
        begin, chars = self._at, []
        self._at += 1
        while self._char(begin, "a text") != '"':
            chars.append(self._escaped(begin))
        self._take('"')
        return Text("".join(chars))

    def _class(self) -> Node:
        begin, ranges = self._at, list[tuple[int, int]]()
        self._at += 1
        negated = self._char(begin, "a class") == "^"
        self._at += negated
        while self._char(begin, "a class") != "]":
            low = high = ord(self._escaped(begin))
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = ord(self._escaped(begin))
            if low > high:
                self._fail("a range of a class goes from low to high", begin)
            ranges.append((low, high))
        self._take("]")
        chars = all_but(normal(ranges)) if negated else normal(ranges)
        if not chars:
            self._fail("no character is in this class", begin)
        return OneOf(chars)

    def _escaped(self, begin: int) -> str:
        """The next character of a text or a class, which may be escaped."""
        char = self._char(begin, "what begins here")
        self._at += 1
        if char != "\\":
            return char
        char = self._char(begin, "what begins here")
        self._at += 1
        if char in _HEX:
            digits = self._text[self._at : self._at + _HEX[char]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[char]}}}", digits) or int(digits, 16) > LAST:
                self._fail(f"\\{char} needs {_HEX[char]} hexadecimal digits of a character")
            if 0xD800 <= int(digits, 16) <= 0xDFFF:
                self._fail(f"\\{char}{digits} is half a character: write \\U and the eight digits of the whole one")
            self._at += len(digits)
            return chr(int(digits, 16))
        if char in _ESCAPED:
            return _ESCAPED[char]
        if char.isalnum():
            self._fail(f"the escape \\{char} is not known", self._at - 2)
        return char

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            self._fail("a text, a class, a group or the name of a rule should stand here")
        self._at = found.end()
        self._skip()
        return found[0]

    def _char(self, begin: int, what: str) -> str:
        if self._at >= len(self._text):
            self._fail(f"{what} has no end", begin)
        return self._text[self._at]

    def _is(self, sign: str) -> bool:
        return self._text.startswith(sign, self._at)

    def _take(self, sign: str) -> None:
        if not self._is(sign):
            self._fail(f"a {sign} should stand here")
        self._at += len(sign)
        self._skip()

    def _skip(self) -> None:
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]

    def _fail(self, why: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        here = self._text[at : at + 20].partition("\n")[0] or "its end"
        raise ValueError(f"the EBNF cannot be read: at {line}({column}), before {here!r}: {why}")
