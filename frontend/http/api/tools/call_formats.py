"""How each format of tool calls is written, as a structural tag, for the formats whose arguments are JSON or Python.

A builder takes the functions that may be called, and whether one answer may hold several calls. Each format here matches a parser
(text/tool_parsers): the parser reads as calls exactly what the format admits as calls. call_tags.py chooses among them.
"""

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.tools.tag_parts import (
    ANY_SPACE,
    Builder,
    Format,
    Functions,
    either,
    named,
    ref,
    separated,
    sequence,
    tag,
    triggered,
)
from quire.frontend.http.api.tools.tool_use import Function
from quire.frontend.text.tool_parsers import deepseek_v3, granite, hermes, llama3_json, mistral, pythonic, qwen3_coder
from quire.frontend.text.tool_parsers.base import ToolParser

# Beginnings that a free text must not have: a parser of formats in which a whole answer is a call may take it for one.
_OBJECT_OF_A_CALL = r'[ \t\r\n]*\{[ \t\r\n]*"([^"\\]*\\|(name|type|id|parameters|arguments)")'
_LIST_OF_CALLS = r"""[ \t\r\n]*\[[ \t\r\n]*[^ \t\r\n()\[\]{}"',=:]+[ \t\r\n]*\("""


def _hermes(functions: Functions, several: bool) -> Format:
    calls = [tag(f"{hermes.START}\n{named(f)}", ref(f), "}\n" + hermes.END) for f in functions]
    return triggered([hermes.START], calls)


def _llama3_json(functions: Functions, several: bool) -> Format:
    calls = separated([tag(named(f, "parameters"), ref(f), "}") for f in functions], "; ", several)
    tagged = triggered([llama3_json.TAG], [tag(llama3_json.TAG, calls, "")], excludes_start=_OBJECT_OF_A_CALL)
    return either([calls, {**tagged, "stop_after_first": True}])


def _mistral(functions: Functions, several: bool) -> Format:
    by_name = [tag(f"{mistral.START}{f.name}{args}", ref(f), "") for f in functions for args in (mistral.ARGS, "")]
    listed = sequence([ANY_SPACE, _call_list(functions, several)])
    return triggered([mistral.START], [*by_name, tag(mistral.START, listed, "")])


def _granite(functions: Functions, several: bool) -> Format:
    listed = sequence([ANY_SPACE, _call_list(functions, several)])
    alone = either([tag("\n" + named(f), ref(f), "}\n" + granite.END) for f in functions])
    return triggered(
        [granite.TOKEN, granite.START], [tag(granite.TOKEN, listed, ""), tag(granite.START, either([listed, alone]), "")]
    )


def _deepseek_v3(functions: Functions, several: bool) -> Format:
    calls = []
    for f in functions:
        begin, arguments = deepseek_v3.CALL, ref(f)
        calls.append(tag(f"{begin}{f.name}{deepseek_v3.SEPARATOR}", arguments, deepseek_v3.CALL_END))
        fenced = f"{begin}function{deepseek_v3.SEPARATOR}{f.name}\n```json\n"
        calls.append(tag(fenced, arguments, "\n```" + deepseek_v3.CALL_END))
    one = sequence([either(calls), ANY_SPACE])
    framed = tag(deepseek_v3.CALLS, {"type": "plus", "content": one} if several else one, deepseek_v3.CALLS_END)
    return triggered([deepseek_v3.CALLS], [framed], excludes=[deepseek_v3.CALL])


def _qwen3_coder(functions: Functions, several: bool) -> Format:
    def call(f: Function) -> Format:
        return tag(f"{qwen3_coder.FUNCTION}{f.name}>\n", ref(f), qwen3_coder.FUNCTION_END)

    wrapped = tag(qwen3_coder.START, sequence([ANY_SPACE, either(list(map(call, functions))), ANY_SPACE]), qwen3_coder.END)
    return triggered([qwen3_coder.START, qwen3_coder.FUNCTION], [wrapped, *map(call, functions)])


def _pythonic(functions: Functions, several: bool) -> Format:
    for f in functions:
        if f.name[0].isdigit():
            raise invalid(f"{f.place}.name: calls of this model are written as Python, where no name begins with a digit",
                          f"{f.place}.name")  # fmt: skip
    calls = tag("[", separated([tag(f"{f.name}(", ref(f), ")") for f in functions], ", ", several), "]")
    framed = tag(pythonic.START, calls, pythonic.END)
    return either([calls, triggered([pythonic.START], [framed], excludes_start=_LIST_OF_CALLS)])


CALL_FORMATS: dict[type[ToolParser], Builder] = {
    hermes.Hermes: _hermes,
    llama3_json.Llama3Json: _llama3_json,
    mistral.Mistral: _mistral,
    granite.Granite: _granite,
    deepseek_v3.DeepSeekV3: _deepseek_v3,
    qwen3_coder.Qwen3Coder: _qwen3_coder,
    pythonic.Pythonic: _pythonic,
}


def _call_list(functions: Functions, several: bool) -> Format:
    tags = [tag(named(f), ref(f), "}") for f in functions]
    return tag("[", separated(tags, ", ", several), "]")
