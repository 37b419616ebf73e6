"""A regex's text on one line and without the flag x, for it stands within slashes of a Lark grammar.

A newline, with a backslash before it or without, becomes the escape `\\n`; re.escape writes the backslash. Under the flag x
(https://docs.python.org/3/library/re.html#re.VERBOSE) white space and comments are left out, as Python leaves them out; so are
comments in parentheses, `(?#...)`, without the flag, too.
"""

import re

_LINE_ENDS = {"\n": "\\n", "\r": "\\r"}
_BLANKS = " \t\n\r\v\f"  # that Python's re ignores under x
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
_LINE_COMMENT = re.compile(r"#(\\.|[^\\\n])*\n?", re.S)  # a newline behind a backslash does not end it, as in Python
_COMMENT = re.compile(r"\(\?#[^)]*\)")
_BROKEN_QUANTIFIER = re.compile(r"\{[\d,]*[ \t\n\r\v\f#]")


def on_one_line(pattern: str) -> str:
    """A pattern that matches the same, without line ends and without x among its flags."""
    parts: list[str] = []
    verbose, outer, in_class = False, list[bool](), False
    at = 0
    while at < len(pattern):
        char = pattern[at]
        end = at + 1
        if char == "\\" and end < len(pattern):
            escaped = pattern[end]
            parts.append(_LINE_ENDS.get(escaped, char + escaped))
            end += 1
        elif in_class:
            parts.append(_LINE_ENDS.get(char, char))
            in_class = char != "]"
        elif char == "[":
            # a bracket at the beginning of a class is one of its characters
            end += len(re.match(r"\^?\]?", pattern[end:])[0])  # type: ignore[index]
            parts.append(pattern[at:end])
            in_class = True
        elif verbose and char in _BLANKS:
            pass
        elif verbose and char == "#":
            end = _LINE_COMMENT.match(pattern, at).end()  # type: ignore[union-attr]
        elif comment := _COMMENT.match(pattern, at):
            end = comment.end()
        elif verbose and char == "{" and _BROKEN_QUANTIFIER.match(pattern, at):
            parts.append("\\{")  # text to Python; without its blanks it would be a quantifier
        elif char == "(" and (flags := _FLAGS.match(pattern, at)):
            end = flags.end()
            if flags[3] == ":":
                outer.append(verbose)
            verbose = (verbose or "x" in flags[1]) and "x" not in (flags[2] or "")
            parts.append(_without_x(flags))
        else:
            if char == "(":
                outer.append(verbose)
            elif char == ")" and outer:
                verbose = outer.pop()
            parts.append(_LINE_ENDS.get(char, char))
        at = end
    return "".join(parts)


def _without_x(flags: re.Match[str]) -> str:
    on, off = flags[1].replace("x", ""), (flags[2] or "").replace("x", "")
    text = on + (f"-{off}" if off else "")
    if flags[3] == ")":
        return f"(?{text})" if text else ""
    return f"(?{text}:"
