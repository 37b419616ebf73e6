"""EBNF: what a grammar admits is what it says, character by character, whatever its tokens are cut into."""

from functools import lru_cache
from itertools import product

import llguidance
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.enginecore.grammar.language.ebnf import lark_of
from quire.enginecore.grammar.language.ebnf_text import Alt, Node, OneOf, Ref, Repeat, Seq, Text, rules_of
from quire.enginecore.grammar.language.texts import in_words, to_lark
from quire.enginecore.grammar.limits import PARSER_LIMITS
from quire.ipc.structured_outputs import StructuredOutputs

# llama.cpp's, of its folder of examples: tokens of white space and names would run on into what follows them
ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""root ::= value   # what xgrammar's own and llama.cpp's have in common
value ::=
    object
  | "[" ws (value ("," ws value)*)? "]" ws
  | string
  | ("-"? ([0-9] | [1-9] [0-9]{1,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
  | ("true" | "false" | "null") ws

object ::= "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

string ::= ["] ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}))* "\"" ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def matcher_of(grammar: str) -> llguidance.LLMatcher:
    lark = to_lark(StructuredOutputs("grammar", grammar))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark, log_level=0, limits=PARSER_LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def admits(grammar: str | llguidance.LLMatcher, text: str) -> bool:
    matcher = (matcher_of(grammar) if isinstance(grammar, str) else grammar).deep_copy()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (ARITHMETIC, ["a=1\n", "x1 +(2*3)=7\na=b\n\n "[:-1]], ["a=\n", "=1\n"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\n\\u00e9", true]}', "[]", '{"k":\n  {}}'], ["[1,]", '{"a"}', '"\x1f"']),
        ('root ::= word "end"\nword ::= [a-z]*', ["end", "fooend", "endend"], ["foo"]),
        ('root ::= "(" root ")" | word "!"\nword ::= [a-z!]*', ["(a!)", "((!!))"], ["(a)"]),
        ('root ::= "if" | [a-z]+', ["if", "iff", "i"], [""]),
        ('root ::= "if!" | "<" root ">" | [a-z]+', ["<if!>", "<iff>", "if"], ["<!>"]),
        ('root ::= "a"\n  | "b"\n\n  | ("c"\n  "d") # or both\n', ["a", "b", "cd"], ["c"]),
        (r'root ::= "\u00e9\x41\U0001F600\"\\\t"', ['éA😀"\\\t'], []),
        (r"root ::= [\u00e9-\u00ff\-\]^/]", ["é", "-", "]", "^", "/"], ["A"]),
        ("root ::= [^a-z] .", ["A\n", "日b"], ["ab"]),
        ('root ::= fooBar foo_bar foo-bar\nfooBar ::= "x"\nfoo_bar ::= "y"\nfoo-bar ::= "z"', ["xyz"], []),
        ('root ::= "a"{2} "b"{1,} "c"{,2} "d"{0,1}', ["aab", "aabbccd"], ["ab", "aabccc"]),
        ('root ::= "<" s ">" | "x" root\ns ::= "" | [ab] s | "c" s? | s "d"', ["<>", "x<abc>", "<add>", "<cd>"], ["<", "<dc>"]),
        ('root ::= list\nlist ::= list "," item | item\nitem ::= [a-z] item?', ["a", "ab,c,de"], ["", "a,", ",a"]),
        ('root ::= start\nstart ::= "" | "a" start', ["", "aaa"], ["b"]),
    ],
)
def test_what_a_grammar_says(grammar: str, yes: list[str], no: list[str]) -> None:
    for text in yes:
        assert admits(grammar, text), text
    for text in no:
        assert not admits(grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ('start ::= "a"', "there is no rule 'root', with which to begin"),
        ('root ::= "a" b', "there is no rule 'b'"),
        ('root ::= x\nx ::= "a"\nx ::= "b"', "at 3(1), before 'x ::= \"b\"': there are two rules 'x'"),
        ("root ::= 'a'", "at 1(10), before \"'a'\": a text, a class, a group or the name of a rule should stand here"),
        ('root ::= ("a"', "at 1(14), before 'its end': a ) should stand here"),
        ('root ::= "a', "at 1(10), before '\"a': a text has no end"),
        ("root ::=\n  [z-a]", "at 2(3), before '[z-a]': a range of a class goes from low to high"),
        ("root ::= []", "no character is in this class"),
        (r'root ::= "\q"', "the escape \\q is not known"),
        (r'root ::= "\u12"', "\\u needs 4 hexadecimal digits"),
        ('root ::= "a"{3,2}', "repetitions are {least,most}"),
        ('root ::= "a"{x}', "a repetition is {3}, {3,}, {,5} or {3,5}"),
        ('root ::= "a" )', "before ')': a rule should begin here"),
        ('"a"\nroot ::= "b"', "at 1(1), before '\"a\"': a rule should begin here, as NAME ::= ..."),
    ],
)
def test_a_wrong_one_says_where(grammar: str, error: str) -> None:
    with pytest.raises(ValueError) as raised:
        lark_of(grammar)
    assert error in str(raised.value)


def test_an_error_of_llguidance_does_not_speak_of_the_lark_that_was_made() -> None:
    lark = "start: T0\nT0: T1"
    error = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark, log_level=0).get_error()
    said = in_words(StructuredOutputs("grammar", "root ::= x\nx ::= y"), error)
    assert "2(" in error and "T0" in error, error
    assert said and "2(" not in said and "T0" not in said and "^" not in said
    assert in_words(StructuredOutputs("grammar", lark), error) == error.strip()


def test_a_rule_that_ends_with_itself_is_a_repetition() -> None:
    """One token then: character by character, a text among 128,000 tokens cost 12 ms a mask, or more than is allowed."""
    assert lark_of(r'root ::= ["] rest' + "\n" + r'rest ::= "" | [^"\\] rest | "\\" ["\\/bfnrt] rest').count(": ") == 3


def test_deep_and_long_ones_end() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        lark_of("root ::= " + "(" * 100_000)
    chain = "\n".join(f'a{i} ::= "x" a{i + 1}' for i in range(3000))
    assert admits(f'root ::= [a] ("-" root)?\n{chain}\na3000 ::= "y"', "a-a")
    assert not admits(f'root ::= "({"x" * 3000}" root? [x)]+', "x")


# ------------------------------------------------------------------------------------------------- by an oracle
NAMES = ("root", "s", "t")
CHARS = st.sampled_from([((97, 97),), ((98, 98),), ((97, 98),)])
LEAVES = st.one_of(
    st.builds(OneOf, CHARS),
    st.builds(Text, st.sampled_from(["", "a", "b", "ab", "ba", "aab"])),
    st.builds(Ref, st.sampled_from(NAMES)),
)
NODES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(Seq, st.lists(inner, min_size=2, max_size=3).map(tuple)),
        st.builds(Alt, st.lists(inner, min_size=2, max_size=3).map(tuple)),
        st.builds(Repeat, inner, st.sampled_from([0, 1, 2]), st.sampled_from([None, 2])),
    ),
    max_leaves=5,
)


def written(node: Node) -> str:
    match node:
        case OneOf(chars):
            return {97: "[a-b]" if chars[0][1] == 98 else "[a]", 98: "[b]"}[chars[0][0]]
        case Text(text):
            return f'"{text}"'
        case Ref(name):
            return name
        case Seq(nodes):
            return f"({' '.join(map(written, nodes))})"
        case Alt(nodes):
            return f"({' | '.join(map(written, nodes))})"
        case Repeat(inner, least, most):
            return f"({written(inner)}){{{least},{'' if most is None else most}}}"


def language(rules: dict[str, Node], longest: int) -> set[str]:
    """Every text of up to so many characters, by going on until nothing is added."""
    known: dict[str, frozenset[str]] = {name: frozenset() for name in rules}

    def joined(some: frozenset[str], others: frozenset[str]) -> frozenset[str]:
        return frozenset(a + b for a, b in product(some, others) if len(a + b) <= longest)

    def of(node: Node) -> frozenset[str]:
        match node:
            case OneOf(chars):
                return frozenset(chr(c) for low, high in chars for c in range(low, high + 1))
            case Text(text):
                return frozenset([text] if len(text) <= longest else [])
            case Ref(name):
                return known[name]
            case Alt(nodes):
                return frozenset().union(*map(of, nodes))
            case Seq(nodes):
                texts = frozenset([""])
                for inner in nodes:
                    texts = joined(texts, of(inner))
                return texts
            case Repeat(inner, least, most):
                once, texts, all_texts = of(inner), frozenset([""]), frozenset[str]()
                for times in range(longest + least + 1 if most is None else most + 1):
                    all_texts |= texts if times >= least else frozenset()
                    texts = joined(texts, once)
                return all_texts

    while True:
        now = {name: known[name] | of(node) for name, node in rules.items()}
        if now == known:
            return set(known["root"])
        known = now


@lru_cache
def texts_up_to(longest: int) -> tuple[str, ...]:
    return tuple("".join(letters) for n in range(longest + 1) for letters in product("ab", repeat=n))


@settings(max_examples=60, deadline=None)
@given(st.tuples(NODES, NODES, NODES))
@example((Seq((Ref("s"), Text("ab"))), Alt((Text("a"), Seq((Text("a"), Ref("s"))))), Text("a")))
@example((Alt((OneOf(((97, 97),)), Ref("s"), Seq((OneOf(((97, 98),)), Text("a"))))), Seq((Ref("root"), Text("aa"))), Text("a")))
@example((Alt((Text("aab"), Seq((Text("a"), Ref("root"))), Text("b"))), Text("a"), Text("a")))
def test_random_grammars_admit_what_they_say(nodes: tuple[Node, Node, Node]) -> None:
    grammar = "\n".join(f"{name} ::= {written(node)}" for name, node in zip(NAMES, nodes, strict=True))
    said = language(rules_of(grammar), 4)
    if not said:
        return  # llguidance refuses a grammar without texts, or with long ones only it is not worth a look
    matcher = matcher_of(grammar)
    for text in texts_up_to(4):
        assert admits(matcher, text) == (text in said), (text, grammar, lark_of(grammar))


def test_rules_of_nothing_that_double_are_taken_apart_at_once():
    doubling = "\n".join(f"e{i} ::= e{i + 1} e{i + 1}" for i in range(40))  # to follow each way would take days
    assert "start" in lark_of(f'root ::= "(" root ")" | e0 "x"\n{doubling}\ne40 ::= ""\n')


@pytest.mark.parametrize("times", ["{0}", "{0,0}"])
def test_no_times_is_nothing(times):
    assert "{0,0}" not in lark_of(f'root ::= "a"{times} "b"')


def test_half_a_character_is_named():
    with pytest.raises(ValueError, match="half a character"):
        lark_of(r'root ::= "\ud800"')
