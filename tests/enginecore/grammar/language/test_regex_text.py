"""A regex on one line matches what Python's re matches: line ends, escapes of them, and the flag x."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.enginecore.grammar.language.lark import regex_body
from quire.enginecore.grammar.language.regex_text import on_one_line

PIECES = [
    "a", "b", " ", "\n", "\r", "\\\n", "\\ ", "\\\\", "\\n", "[ab]", "[\n#]", "[]a ]", "[^]\n]", "(", ")", "(?:", "|", "*", "?",
    "# x\n", "#", "{2}", "(?x:", "(?-x:", "(?i:", "\t",
]  # fmt: skip
TEXTS = [
    "",
    "a",
    "b",
    "aa",
    "ab",
    "a b",
    "a\nb",
    "\n",
    "\r",
    "\\\n",
    "\\",
    " ",
    "#",
    "]",
    "A",
    "a#",
    "a\n",
    "\\n",
    "a]",
    "nn",
    "\t",
]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (re.escape("a\nb"), "a\nb"),
        (re.escape("a\r\n\nb"), "a\r\n\nb"),
        ("a[\\\n]b", "a\nb"),
        ("a\\\\\nb", "a\\\nb"),
        ("(?x) a  b  # and no more\n c", "abc"),
        ("(?xi)a [ #] b", "A#b"),
        ("(?x: a b ) c", "ab c"),
        ("(?x)a {2}", "aa"),
        ("(?x)a{ 2}", "a{2}"),
        ("(?x)a(?# [ and )b # \\\n c\n d", "abd"),
        ("a(?#two){2}", "aa"),
    ],
)
def test_a_pattern_matches_as_pythons_does(pattern, text):
    line = on_one_line(pattern)
    assert "\n" not in line and "\r" not in line and "x" not in line
    assert re.fullmatch(pattern, text) and re.fullmatch(line, text)
    assert regex_body(pattern).startswith("/")


@given(st.sampled_from(["", "(?x)", "(?xs)", "(?i)"]), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_pattern_matches_as_before(flags, pattern):
    try:
        compiled = re.compile(flags + pattern)
    except (re.error, FutureWarning):
        return
    on_line = re.compile(on_one_line(flags + pattern))
    for text in TEXTS:
        assert bool(compiled.fullmatch(text)) == bool(on_line.fullmatch(text)), text


def test_classes_of_unicode_keep_their_braces():
    assert on_one_line(r"(?x) \p{L} [\p{Nd}] \x{41}") == r"\p{L}[\p{Nd}]\x{41}"


def test_nothing_but_blanks_under_x_is_the_empty_text():
    assert regex_body("(?x)  # nothing\n") == "/(?:)/"
