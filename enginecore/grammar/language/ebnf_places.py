"""Finds the tokens of a grammar that would run on into text that another token needs; ebnf.py then splits them.

A token is an automaton of places, one for each character as the grammar writes it (Glushkov's construction). A short token is
lost to a long one if both may begin at the same point, and if a word of the short one plus a character that may follow it is
the beginning of a word of the long one. The search walks through both automata at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, product

from quire.enginecore.grammar.language.ebnf_text import ANY_CHAR, Alt, Chars, Node, OneOf, Ref, Repeat, Seq, Text, normal

MAX_PLACES = 1000  # of a token; a longer one is split
MAX_VISITS = 20 * MAX_PLACES  # of nodes of a token, including those without a character
MAX_LOOKS = 300_000  # at pairs of places, in a round; 0.2 s. Tokens not looked at stay whole, so that the grammar admits less
_NONE = frozenset[int]()


# A grammar's rules, once its tokens are chosen, consist of these.
@dataclass(frozen=True)
class Token:
    node: Node

    def tokens(self) -> "Iterator[Token]":
        yield self

    def rules(self) -> Iterator[str]:
        yield from ()


@dataclass(frozen=True)
class Rule:
    name: str

    def tokens(self) -> Iterator[Token]:
        yield from ()

    def rules(self) -> Iterator[str]:
        yield self.name


@dataclass(frozen=True)
class Several:
    """kind: "seq", "alt", or "repeat", which has one part and `times`."""

    kind: str
    parts: "tuple[Part, ...]"
    times: str = ""

    def tokens(self) -> Iterator[Token]:
        for part in self.parts:
            yield from part.tokens()

    def rules(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.rules()


Part = Token | Rule | Several


def running_on(parts: dict[str, Part], places: "Places") -> set[Node]:
    """Tokens of these rules that must be split."""
    _meet.cache_clear()  # it holds the characters of an earlier grammar
    following = _Following(parts, places)
    found = {node for node in following.tokens if places.of(node) is None}
    after = {
        node: normal(r for other in others for r in places.first_chars(other)) for node, others in following.tokens.items()
    }
    waiting = following.together()
    seen, looks = set(waiting), 0
    while waiting and looks < MAX_LOOKS:
        short, long = waiting.pop()
        if {short, long} & found:
            continue
        runs_on, are_same, looked = _compared(places.of(short), after[short], places.of(long))
        looks += looked
        if runs_on:
            found.add(long)
        elif are_same and short != long:  # after a common word, tokens that follow either one may begin at the same point
            more = set(product(following.tokens[short], following.tokens[long])) - seen
            seen |= more
            waiting += more
    return found


def _compared(short: "Automaton | None", after: Chars, long: "Automaton | None") -> tuple[bool, bool, int]:
    """Whether the short token is lost to the long one, whether they have a common word, and how many pairs were looked at."""
    assert short is not None and long is not None
    waiting = [(i, j) for i in short.first for j in long.first if _meet(short.chars[i], long.chars[j])]
    seen, are_same = set(waiting), False
    while waiting:
        i, j = waiting.pop()
        if i in short.last and any(_meet(long.chars[k], after) for k in long.following[j]):
            return True, False, len(seen)
        are_same |= i in short.last and j in long.last
        for pair in ((a, b) for a in short.following[i] for b in long.following[j]):
            if pair not in seen and _meet(short.chars[pair[0]], long.chars[pair[1]]):
                seen.add(pair)
                waiting.append(pair)
    return False, are_same, len(seen) + 1


@lru_cache(maxsize=1 << 14)
def _meet(some: Chars, others: Chars) -> bool:
    return any(a <= d and c <= b for a, b in some for c, d in others)


# ------------------------------------------------------------------------------------------------------------- automata
@dataclass
class Automaton:
    """chars: those of each place. following: the places that may come after each. first, last: the places where a word may
    begin and end. visits: how many nodes were visited to make it."""

    chars: list[Chars] = field(default_factory=list)
    following: list[set[int]] = field(default_factory=list)
    first: frozenset[int] = _NONE
    last: frozenset[int] = _NONE
    may_be_empty: bool = True
    visits: int = 0


class Places:
    """Automata of nodes without recursion. Bounded repetitions count as unbounded: that may split too much, not too little."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._made: dict[Node, Automaton | None] = {}

    def of(self, node: Node) -> Automaton | None:
        """A node's automaton; None if it is too long."""
        if node not in self._made:
            made = Automaton()
            try:
                made.first, made.last, made.may_be_empty = self._add(node, made)
            except OverflowError:
                self._made[node] = None
            else:
                self._made[node] = made
        return self._made[node]

    def first_chars(self, node: Node) -> Chars:
        made = self.of(node)
        return ANY_CHAR if made is None else tuple(r for place in made.first for r in made.chars[place])

    def _add(self, node: Node, to: Automaton) -> tuple[frozenset[int], frozenset[int], bool]:
        to.visits += 1
        if to.visits > MAX_VISITS:
            raise OverflowError
        match node:
            case Ref(name):
                return self._add(self._rules[name], to)
            case OneOf(chars):
                if len(to.chars) >= MAX_PLACES:
                    raise OverflowError
                to.chars.append(chars)
                to.following.append(set())
                itself = frozenset([len(to.chars) - 1])
                return itself, itself, False
            case Text(text):
                return self._add(Seq(tuple(OneOf(((ord(char), ord(char)),)) for char in text)), to)
            case Repeat(inner, least, most):
                first, last, empty = self._add(inner, to)
                for place in last if most is None or most > 1 else ():
                    to.following[place] |= first
                return first, last, empty or least == 0
            case Alt(nodes):
                ways = [self._add(inner, to) for inner in nodes]
                return _NONE.union(*(w[0] for w in ways)), _NONE.union(*(w[1] for w in ways)), any(w[2] for w in ways)
            case Seq(nodes):
                return self._add_in_a_row(nodes, to)

    def _add_in_a_row(self, nodes: tuple[Node, ...], to: Automaton) -> tuple[frozenset[int], frozenset[int], bool]:
        first, last, empty = _NONE, _NONE, True
        for node in nodes:
            next_first, next_last, next_empty = self._add(node, to)
            for place in last:
                to.following[place] |= next_first
            first = first | next_first if empty else first
            last = last | next_last if next_empty else next_last
            empty = empty and next_empty
        return first, last, empty


class _Following:
    """tokens: for each token those that may follow it directly."""

    def __init__(self, parts: dict[str, Part], places: Places) -> None:
        self._places = places
        self._firsts: dict[str, tuple[frozenset[Node], bool]] = dict.fromkeys(parts, (frozenset(), False))
        self._after: dict[str, frozenset[Node]] = dict.fromkeys(parts, frozenset())
        self.tokens: dict[Node, frozenset[Node]] = {}
        while (now := {name: self._first(part) for name, part in parts.items()}) != self._firsts:
            self._firsts = now
        before: dict[str, frozenset[Node]] = {}
        while before != self._after:
            before = dict(self._after)
            for name, part in parts.items():
                self._walk(part, self._after[name])

    def together(self) -> list[tuple[Node, Node]]:
        """Pairs of tokens that may begin at the same point of a text: after the same token, or at its beginning."""
        groups = {self._firsts["root"][0], *self.tokens.values()}
        return list(set(islice((pair for group in groups for pair in product(group, group)), MAX_LOOKS)))

    def _first(self, part: Part) -> tuple[frozenset[Node], bool]:
        """Tokens that a part may begin with, and whether it may be empty."""
        match part:
            case Token(node):
                made = self._places.of(node)
                return frozenset([node]), made is None or made.may_be_empty
            case Rule(name):
                return self._firsts[name]
            case Several("alt", inner):
                ways = [self._first(p) for p in inner]
                return frozenset[Node]().union(*(tokens for tokens, _ in ways)), any(empty for _, empty in ways)
            case Several("repeat", (inner_part,), times):
                tokens, empty = self._first(inner_part)
                return tokens, empty or times in "*?" or times.startswith("{0")
            case Several(_, inner):
                tokens, empty = frozenset(), True
                for p in inner:
                    if empty:
                        more, empty = self._first(p)
                        tokens |= more
                return tokens, empty

    def _walk(self, part: Part, after: frozenset[Node]) -> None:
        match part:
            case Token(node):
                self.tokens[node] = self.tokens.get(node, frozenset()) | after
            case Rule(name):
                self._after[name] |= after
            case Several("alt", inner):
                for p in inner:
                    self._walk(p, after)
            case Several("repeat", (inner_part,), times):
                self._walk(inner_part, after if times == "?" else after | self._first(inner_part)[0])
            case Several(_, inner):
                for p in reversed(inner):
                    self._walk(p, after)
                    tokens, empty = self._first(p)
                    after = tokens | after if empty else tokens
