"""How each format of tool calls is written, as a structural tag, for the formats with arguments in JSON or Python.

A builder takes the functions that may be called, and whether one answer may hold several calls. Each format here matches a
parser (text/tool_parsers): the parser reads as calls exactly what the format admits as calls. call_tags.py chooses among them.
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
from quire.frontend.text.tool_parsers import (
    apertus,
    deepseek_v3,
    gemma,
    glm,
    hermes,
    hunyuan,
    kimi_k2,
    lfm2,
    llama3_json,
    minimax_m2,
    mistral,
    olmo3,
    pythonic,
    qwen3_coder,
    xlam,
)  # fmt: skip
from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.tagged_json import (
    CohereCommand,
    GigaChat3,
    Granite,
    Granite20bFC,
    Longcat,
    Nemotron,
    Phi4Mini,
)

# Beginnings that a free text must not have: a parser of formats in which a whole answer is a call may take it for one.
_OBJECT_OF_A_CALL = r'[ \t\r\n]*\{[ \t\r\n]*"([^"\\]*\\|(name|type|id|parameters|arguments)")'
_LIST_OF_OBJECTS = r"[ \t\r\n]*\[[ \t\r\n]*\{"
_LIST_OF_CALLS = r"""[ \t\r\n]*\[[ \t\r\n]*[^ \t\r\n()\[\]{}"',=:]+[ \t\r\n]*\("""

_ANY_BREAK = {"type": "regex", "pattern": r"[ \n]{0,8}"}  # within a frame: a line break, and an indentation


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _hermes(start: str = hermes.START, end: str = hermes.END) -> Builder:
    def build(functions: Functions, several: bool) -> Format:
        return triggered([start], [tag(f"{start}\n{named(f)}", ref(f), "}\n" + end) for f in functions])

    return build


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
    alone = either([tag("\n" + named(f), ref(f), "}\n" + Granite.END) for f in functions])
    return triggered(
        [Granite.TOKEN, Granite.START], [tag(Granite.TOKEN, listed, ""), tag(Granite.START, either([listed, alone]), "")]
    )


def _granite_20b_fc(functions: Functions, several: bool) -> Format:
    calls = [tag(f"{Granite20bFC.START} {named(f)}", ref(f), "}") for f in functions]
    return triggered([Granite20bFC.START], calls)


def _nemotron(functions: Functions, several: bool) -> Format:
    return triggered([Nemotron.START], [tag(Nemotron.START, _call_list(functions, several), Nemotron.END)])


def _phi4_mini(functions: Functions, several: bool) -> Format:
    listed = _call_list(functions, several)
    framed = [tag(Phi4Mini.WORD + "[", _calls(functions, several), "]"), tag(Phi4Mini.START, listed, Phi4Mini.END)]
    return triggered([Phi4Mini.WORD + "[", Phi4Mini.START], framed)


def _gigachat3(functions: Functions, several: bool) -> Format:
    begins = (GigaChat3.SEPARATOR + GigaChat3.ROLE, GigaChat3.ROLE, GigaChat3.TOKEN)
    return triggered(list(begins), [tag(begin + named(f), ref(f), "}") for f in functions for begin in begins])


def _cohere_command(functions: Functions, several: bool) -> Format:
    numbered = {
        "type": "sequence",
        "elements": [{"type": "regex", "pattern": '\\{"tool_call_id": "[0-9]{1,3}", "tool_name": "'}],
    }
    calls = [sequence([numbered, _const(f'{f.name}", "parameters": '), ref(f), _const("}")]) for f in functions]
    more = {"type": "star", "content": sequence([_const(","), _ANY_BREAK, either(calls)])}
    listed = sequence([_ANY_BREAK, either(calls), *([more] if several else ()), _ANY_BREAK])
    return triggered([CohereCommand.START], [tag(CohereCommand.START + "[", listed, "]" + CohereCommand.END)])


def _hunyuan(functions: Functions, several: bool) -> Format:
    fenced = [tag(f"{hunyuan.CALL}{f.name}{hunyuan.FENCE}", ref(f), hunyuan.FENCE_END + hunyuan.CALL_END) for f in functions]
    calls = either([_call_list(functions, several), separated(fenced, "", several)])
    framed = tag(hunyuan.START, sequence([ANY_SPACE, calls, ANY_SPACE]), hunyuan.END)
    return triggered([hunyuan.START], [framed])


def _xlam(functions: Functions, several: bool) -> Format:
    listed = _call_list(functions, several)
    fence, bare_fence = (begin + "\n[" for begin in xlam.FENCES)
    framed = [
        tag(fence, _calls(functions, several), "]\n" + xlam.FENCE_END),
        tag(xlam.TOKEN, sequence([ANY_SPACE, listed]), ""),
        tag(xlam.TAG, sequence([ANY_SPACE, listed, ANY_SPACE]), xlam.TAG_END),
    ]
    behind = triggered([fence, xlam.TOKEN, xlam.TAG], framed, excludes=[bare_fence], excludes_start=_LIST_OF_OBJECTS)
    return either([listed, behind])


def _apertus(functions: Functions, several: bool) -> Format:
    calls = separated([tag(f'{{"{f.name}": ', ref(f), "}") for f in functions], ", ", several)
    return triggered([apertus.START], [tag(apertus.START + "[", calls, "]" + apertus.END)])


def _kimi_k2(functions: Functions, several: bool) -> Format:
    calls = []
    for f in functions:
        content = sequence([{"type": "regex", "pattern": "[0-9]{1,4}"}, _const(kimi_k2.ARGUMENTS), ref(f)])
        calls.append(tag(f"{kimi_k2.CALL}{kimi_k2.NAMESPACE}{f.name}:", content, kimi_k2.CALL_END))
    section = tag(kimi_k2.SECTION, separated(calls, "", several), kimi_k2.SECTION_END)
    return triggered([kimi_k2.SECTION], [section], excludes=[kimi_k2.OTHER_SECTION])


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
    calls = tag("[", separated(_python_calls(functions), ", ", several), "]")
    framed = tag(pythonic.START, calls, pythonic.END)
    return either([calls, triggered([pythonic.START], [framed], excludes_start=_LIST_OF_CALLS)])


def _lfm2(functions: Functions, several: bool) -> Format:
    listed = separated(_python_calls(functions), ", ", several)
    return triggered([lfm2.START], [tag(lfm2.START + "[", listed, "]" + lfm2.END)])


def _olmo3(functions: Functions, several: bool) -> Format:
    calls = separated(_python_calls(functions), "\n", several)
    return triggered([olmo3.START], [tag(olmo3.START + "\n", calls, "\n" + olmo3.END)])


def _glm(functions: Functions, several: bool) -> Format:
    return triggered([glm.START], [tag(glm.START + f.name, sequence([_ANY_BREAK, ref(f)]), glm.END) for f in functions])


def _hy_v3(functions: Functions, several: bool) -> Format:
    calls = [tag(glm.START + f.name + glm.SEPARATOR, sequence([_ANY_BREAK, ref(f)]), glm.END) for f in functions]
    one = sequence([_ANY_BREAK, either(calls), _ANY_BREAK])
    framed = tag(glm.CALLS, {"type": "plus", "content": one} if several else one, glm.CALLS_END)
    return triggered([glm.CALLS], [framed], excludes=[glm.START])


def _minimax_m2(functions: Functions, several: bool) -> Format:
    calls = [tag(f'{minimax_m2.INVOKE}"{f.name}">', sequence([_ANY_BREAK, ref(f)]), minimax_m2.INVOKE_END) for f in functions]
    one = sequence([either(calls), _ANY_BREAK])
    framed = sequence([_ANY_BREAK, {"type": "plus", "content": one} if several else one])
    return triggered([minimax_m2.START], [tag(minimax_m2.START, framed, minimax_m2.END)])


def _gemma(parser: type[gemma.Gemma4]) -> Builder:
    def build(functions: Functions, several: bool) -> Format:
        return triggered([parser.begin], [tag(f"{parser.begin}call:{f.name}", ref(f), parser.end) for f in functions])

    return build


def _python_calls(functions: Functions) -> list[Format]:
    for f in functions:
        if f.name[0].isdigit():
            place = f"{f.place}.name"
            raise invalid(f"{place}: calls of this model are written as Python, where no name begins with a digit", place)
    return [tag(f"{f.name}(", ref(f), ")") for f in functions]


CALL_FORMATS: dict[type[ToolParser], Builder] = {
    hermes.Hermes: _hermes(),
    Longcat: _hermes(Longcat.START, Longcat.END),
    llama3_json.Llama3Json: _llama3_json,
    mistral.Mistral: _mistral,
    Granite: _granite,
    Granite20bFC: _granite_20b_fc,
    Nemotron: _nemotron,
    Phi4Mini: _phi4_mini,
    GigaChat3: _gigachat3,
    CohereCommand: _cohere_command,
    hunyuan.Hunyuan: _hunyuan,
    xlam.Xlam: _xlam,
    apertus.Apertus: _apertus,
    kimi_k2.KimiK2: _kimi_k2,
    deepseek_v3.DeepSeekV3: _deepseek_v3,
    qwen3_coder.Qwen3Coder: _qwen3_coder,
    pythonic.Pythonic: _pythonic,
    lfm2.Lfm2: _lfm2,
    olmo3.Olmo3: _olmo3,
    glm.Glm45: _glm,
    glm.HyV3: _hy_v3,
    minimax_m2.MiniMaxM2: _minimax_m2,
    gemma.Gemma4: _gemma(gemma.Gemma4),
    gemma.FunctionGemma: _gemma(gemma.FunctionGemma),
}


def _call_list(functions: Functions, several: bool) -> Format:
    return tag("[", _calls(functions, several), "]")


def _calls(functions: Functions, several: bool) -> Format:
    """The calls of a list in JSON, without its brackets."""
    return separated([tag(named(f), ref(f), "}") for f in functions], ", ", several)
