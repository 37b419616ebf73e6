"""Grammars for each format of tool calls, for functions with strict: true under tool_choice "auto".

Text is free up to where the format's parser sees a call begin. From there on the output must be a call of one of the request's
functions, in the model's own syntax; if the function is strict, its arguments follow its schema. Each format here matches a
parser (text/tool_parsers): the parser reads as calls exactly what the format admits as calls. Markers that are special tokens
may come as such, or spelled as text (grammar/language/lark.py).

Formats are structural tags (enginecore/grammar/language/structural_tag.py). tool_grammar.py calls this.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.tool_use import Function
from quire.frontend.text.tool_parsers import deepseek_v3, granite, hermes, llama3_json, mistral, pythonic, qwen3_coder
from quire.frontend.text.tool_parsers.base import ToolParser

Format = dict[str, Any]
Functions = Sequence[Function]

# Beginnings that a free text must not have: a parser of formats in which a whole answer is a call may take it for one.
_OBJECT_OF_A_CALL = r'[ \t\r\n]*\{[ \t\r\n]*"([^"\\]*\\|(name|type|id|parameters|arguments)")'
_LIST_OF_CALLS = r"""[ \t\r\n]*\[[ \t\r\n]*[^ \t\r\n()\[\]{}"',=:]+[ \t\r\n]*\("""
_ANY_SPACE = {"type": "regex", "pattern": r"[ \n]?"}


def strict_tag(parser: type[ToolParser], functions: Functions) -> dict[str, Any]:
    """A structural tag for an answer's whole text. Raises ApiError 400 for a function that this syntax cannot call."""
    style = _STYLES.get(parser, "json")
    arguments = {function.name: _arguments(function, style) for function in functions}
    return {"type": "structural_tag", "format": _FORMATS[parser](functions), "definitions": arguments}


def with_a_call(answer: Format) -> Format:
    """The same format with at least one call."""
    if answer["type"] == "or":
        return {**answer, "elements": list(map(with_a_call, answer["elements"]))}
    return {**answer, "at_least_one": True} if answer["type"] == "triggered_tags" else answer


def object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments: an object, an empty one if there are no parameters."""
    return {"type": "object", **(parameters or {"properties": {}, "additionalProperties": False})}


def commented(function: Function, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its place in the body, for the error if it cannot be compiled (enginecore/grammar/language/places.py)."""
    return {"$comment": f"{function.place}.parameters", **schema}


# ----------------------------------------------------------------------------------------------------------- formats
def _hermes(functions: Functions) -> Format:
    calls = [_tag(f"{hermes.START}\n{_named(f)}", _ref(f), "}\n" + hermes.END) for f in functions]
    return _triggered([hermes.START], calls)


def _llama3_json(functions: Functions) -> Format:
    calls = _separated([_tag(_named(f, "parameters"), _ref(f), "}") for f in functions], "; ")
    tagged = _triggered([llama3_json.TAG], [_tag(llama3_json.TAG, calls, "")], excludes_start=_OBJECT_OF_A_CALL)
    return _or([calls, {**tagged, "stop_after_first": True}])


def _mistral(functions: Functions) -> Format:
    named = [_tag(f"{mistral.START}{f.name}{args}", _ref(f), "") for f in functions for args in (mistral.ARGS, "")]
    listed = _sequence([_ANY_SPACE, _call_list(functions)])
    return _triggered([mistral.START], [*named, _tag(mistral.START, listed, "")])


def _granite(functions: Functions) -> Format:
    listed = _sequence([_ANY_SPACE, _call_list(functions)])
    alone = _or([_tag("\n" + _named(f), _ref(f), "}\n" + granite.END) for f in functions])
    return _triggered(
        [granite.TOKEN, granite.START], [_tag(granite.TOKEN, listed, ""), _tag(granite.START, _or([listed, alone]), "")]
    )


def _deepseek_v3(functions: Functions) -> Format:
    calls = []
    for f in functions:
        begin, arguments = deepseek_v3.CALL, _ref(f)
        calls.append(_tag(f"{begin}{f.name}{deepseek_v3.SEPARATOR}", arguments, deepseek_v3.CALL_END))
        fenced = f"{begin}function{deepseek_v3.SEPARATOR}{f.name}\n```json\n"
        calls.append(_tag(fenced, arguments, "\n```" + deepseek_v3.CALL_END))
    several = {"type": "plus", "content": _sequence([_or(calls), _ANY_SPACE])}
    tag = _tag(deepseek_v3.CALLS, several, deepseek_v3.CALLS_END)
    return {**_triggered([deepseek_v3.CALLS], [tag]), "excludes": [deepseek_v3.CALL]}


def _qwen3_coder(functions: Functions) -> Format:
    def call(f: Function) -> Format:
        return _tag(f"{qwen3_coder.FUNCTION}{f.name}>\n", _ref(f), qwen3_coder.FUNCTION_END)

    wrapped = _tag(qwen3_coder.START, _sequence([_ANY_SPACE, _or(list(map(call, functions))), _ANY_SPACE]), qwen3_coder.END)
    return _triggered([qwen3_coder.START, qwen3_coder.FUNCTION], [wrapped, *map(call, functions)])


def _pythonic(functions: Functions) -> Format:
    for f in functions:
        if f.name[0].isdigit():
            raise invalid(f"{f.place}.name: calls of this model are written as Python, where no name begins with a digit",
                          f"{f.place}.name")  # fmt: skip
    calls = _tag("[", _separated([_tag(f"{f.name}(", _ref(f), ")") for f in functions], ", "), "]")
    tag = _tag(pythonic.START, calls, pythonic.END)
    return _or([calls, {**_triggered([pythonic.START], [tag]), "excludes_start": _LIST_OF_CALLS}])


_FORMATS: dict[type[ToolParser], Callable[[Functions], Format]] = {
    hermes.Hermes: _hermes,
    llama3_json.Llama3Json: _llama3_json,
    mistral.Mistral: _mistral,
    granite.Granite: _granite,
    deepseek_v3.DeepSeekV3: _deepseek_v3,
    qwen3_coder.Qwen3Coder: _qwen3_coder,
    pythonic.Pythonic: _pythonic,
}


# ------------------------------------------------------------------------------------------------------------- parts
_STYLES = {qwen3_coder.Qwen3Coder: "qwen_xml", pythonic.Pythonic: "pythonic"}


def _arguments(function: Function, style: str) -> Format:
    schema = object_schema(function.parameters) if function.strict else {"type": "object"}
    return {"type": "json_schema", "json_schema": commented(function, schema), "style": style}


def _named(function: Function, arguments: str = "arguments") -> str:
    """The beginning of a call in JSON, up to its arguments."""
    return f'{{"name": "{function.name}", "{arguments}": '


def _ref(function: Function) -> Format:
    """A reference to the definition of its arguments."""
    return {"type": "ref", "name": function.name}


def _call_list(functions: Functions) -> Format:
    tags = [_tag(_named(f), _ref(f), "}") for f in functions]
    return _tag("[", _separated(tags, ", "), "]")


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _triggered(triggers: list[str], tags: list[Format], **fields: Any) -> Format:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **fields}


def _separated(tags: list[Format], separator: str) -> Format:
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}


def _sequence(elements: Iterable[Format]) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(elements: list[Format]) -> Format:
    return {"type": "or", "elements": elements}
