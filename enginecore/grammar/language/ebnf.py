"""Translates EBNF to Lark, so that llguidance admits exactly what the grammar says, character by character.

llguidance first cuts a text into tokens, each as long as it can be, but EBNF has no tokens: in `root ::= word "end"`, `word ::=
[a-z]*`, a token for `word` would eat the end. A grammar without recursion becomes one token, a regular expression: exact, and
fast. In others the largest parts without recursion become tokens at first. If a token could end, but would run on into text
that another token needs, the longer one is split (ebnf_places.py says which), down to characters, until none does.

Used by texts.py and structural_tag.py, in the process that tries grammars.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator

from quire.enginecore.grammar.language.ebnf_places import Part, Places, Rule, Several, Token, running_on
from quire.enginecore.grammar.language.ebnf_text import Alt, Chars, Node, OneOf, Ref, Repeat, Seq, Text, rules_of
from quire.enginecore.grammar.language.lark import quoted

_EBNF_RULE = re.compile(r"^[ \t]*[\w.-]+[ \t]*::=", re.M)


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar is EBNF; else it is Lark."""
    return _EBNF_RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """A grammar in Lark or EBNF as Lark. Raises ValueError that says what is wrong, and where."""
    if not is_ebnf(grammar):
        return grammar
    try:
        return _Grammar(rules_of(grammar)).lark()
    except RecursionError:
        raise ValueError("the EBNF is nested too deeply") from None


class _Grammar:
    def __init__(self, rules: dict[str, Node]) -> None:
        for node in rules.values():
            for name in _names(node):
                if name not in rules:
                    raise ValueError(f"the EBNF cannot be read: there is no rule {name!r}")
        self._rules = rules = {name: _unrolled(name, node) for name, node in rules.items()}
        self._endless = _recursive(rules)
        self._in_parts: set[Node] = set()  # nodes that must not be one token
        self._places = Places(rules)
        self._names: dict[Node, str] = {}

    def lark(self) -> str:
        if "root" not in self._endless:
            return "\n".join([*self._token_lines([Ref("root")]), f"start: {self._names[Ref('root')]}"])
        parts = self._split()
        while too_long := running_on(parts, self._places):
            self._in_parts |= too_long
            parts = self._split()
        lines = self._token_lines(token.node for part in parts.values() for token in part.tokens())
        numbers = {name: f"r{i}" for i, name in enumerate(parts)}
        lines += [f"{numbers[name]}: {self._written(part, numbers)}" for name, part in parts.items()]
        return "\n".join([*lines, f"start: {numbers['root']}"])

    # -------------------------------------------------------------------------------------------------------- parts
    def _split(self) -> dict[str, Part]:
        """The rules that are needed beside tokens, from root on, by name."""
        parts: dict[str, Part] = {}
        waiting = ["root"]
        while waiting:
            name = waiting.pop()
            if name not in parts:
                parts[name] = self._part(self._rules[name])
                waiting += parts[name].rules()
        return parts

    def _is_regular(self, node: Node) -> bool:
        return not any(name in self._endless for name in _names(node))

    def _part(self, node: Node) -> Part:
        if node == Text(""):
            return Several("seq", ())
        if node not in self._in_parts and self._is_regular(node):
            return Token(node)
        match node:
            case Ref(name):
                return Rule(name)
            case OneOf():
                return Token(node)
            case Text(text):
                return Several("seq", tuple(Token(Text(char)) for char in text))
            case Alt(nodes):
                regular = tuple(filter(self._is_regular, nodes)) if node not in self._in_parts else ()
                if len(regular) > 1:
                    nodes = (Alt(regular), *(n for n in nodes if not self._is_regular(n)))
                return Several("alt", tuple(map(self._part, nodes)))
            case Repeat(inner, least, most):
                return Several("repeat", (self._part(inner),), _times(least, most))
            case Seq(nodes):
                return Several("seq", tuple(map(self._part, self._runs(nodes) if node not in self._in_parts else nodes)))
        raise AssertionError(node)

    def _runs(self, nodes: tuple[Node, ...]) -> Iterator[Node]:
        """A sequence's nodes, with neighbors that can be one token joined into one node."""
        run: list[Node] = []
        for node in (*nodes, None):
            if node is not None and self._is_regular(node):
                run.append(node)
                continue
            if run:
                yield run[0] if len(run) == 1 else Seq(tuple(run))
            run = []
            if node is not None:
                yield node

    # -------------------------------------------------------------------------------------------------------- Lark
    def _token_lines(self, tokens: Iterable[Node]) -> list[str]:
        lines: list[str] = []
        waiting = list(tokens)
        for node in waiting:  # it grows: rules that tokens refer to become tokens, too
            if node not in self._names:
                self._names[node] = f"T{len(self._names)}"
                body = self._rules[node.name] if isinstance(node, Ref) else node
                waiting += [Ref(name) for name in _names(body)]
        for node, name in self._names.items():
            lines.append(f"{name}: {self._token_body(self._rules[node.name] if isinstance(node, Ref) else node)}")
        return lines

    def _token_body(self, node: Node) -> str:
        match node:
            case Ref():
                return self._names[node]
            case OneOf(chars):
                return _one_char(chars)
            case Text(text):
                return quoted(text)
            case Alt(nodes):
                return f"({' | '.join(map(self._token_body, nodes))})"
            case Repeat(inner, least, most):
                return f"({self._token_body(inner)}){_times(least, most)}"
            case Seq(nodes):
                return f"({' '.join(map(self._token_body, nodes))})" if nodes else '""'
        raise AssertionError(node)

    def _written(self, part: Part, numbers: dict[str, str]) -> str:
        match part:
            case Token(node):
                return self._names[node]
            case Rule(name):
                return numbers[name]
            case Several("repeat", (inner,), times):
                return f"({self._written(inner, numbers)}){times}"
            case Several(kind, parts):
                between = " | " if kind == "alt" else " "
                return f"({between.join(self._written(p, numbers) for p in parts)})" if parts else '""'
        raise AssertionError(part)


def _one_char(chars: Chars) -> str:
    """One of these characters, in Lark."""
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return quoted(chr(chars[0][0]))
    return "/[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in chars) + "]/"


def _names(node: Node) -> Iterator[str]:
    """Names of the rules that a node refers to."""
    match node:
        case Ref(name):
            yield name
        case Seq(nodes) | Alt(nodes):
            for inner in nodes:
                yield from _names(inner)
        case Repeat(inner):
            yield from _names(inner)


def _unrolled(name: str, node: Node) -> Node:
    """A rule that refers to itself only at the end of alternatives, or at their start, as a repetition: x = a x | b is a* b."""
    for own_place in (-1, 0):
        again: list[Node] = []
        once: list[Node] = []
        for way in node.nodes if isinstance(node, Alt) else (node,):
            nodes = way.nodes if isinstance(way, Seq) else (way,)
            own = nodes[own_place] if nodes else None
            rest = Seq(nodes[:-1] if own_place else nodes[1:])
            if own in (Ref(name), Repeat(Ref(name), 0, 1)):
                again.append(rest)
                once += [rest] if own != Ref(name) else []
            else:
                once.append(way)
        if again and once and name not in _names(Seq((*again, *once))):
            loop, end = Repeat(Alt(tuple(again)), 0, None), Alt(tuple(once))
            return Seq((loop, end) if own_place else (end, loop))
    return node


def _recursive(rules: dict[str, Node]) -> set[str]:
    """Rules that lead back to themselves, or to a rule that does."""
    named_by: dict[str, set[str]] = {name: set() for name in rules}
    left = {name: set(_names(node)) for name, node in rules.items()}
    for name, names in left.items():
        for other in names:
            named_by[other].add(name)
    done = deque(name for name, names in left.items() if not names)
    endless = set(rules)
    while done:
        name = done.popleft()
        endless.discard(name)
        for other in named_by[name]:
            left[other].discard(name)
            if not left[other] and other in endless:
                done.append(other)
    return endless


def _times(least: int, most: int | None) -> str:
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
