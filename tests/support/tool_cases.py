"""Tool calls in every format: texts with the parsers' expected results, and a check that splits do not matter."""

from quire.frontend.text.output_events import Arguments, CallBegun, Content, Markup, merged, source_of
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS
from quire.frontend.text.tool_parsers.forced import NamedCall, RequiredCalls

SCHEMAS = {
    "f": {
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": "array"},
            "o": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "s": {"type": ["string", "null"]},
            "r": {"$ref": "#/$defs/r"},
        },
        "$defs": {"r": {"anyOf": [{"$ref": "#/$defs/t"}]}, "t": {"type": "string"}},
    }
}
FORMATS = sorted({parser.__name__: name for name, parser in TOOL_PARSERS.items()}.values())


def parser_of(name):
    if name == "required":
        parser = RequiredCalls(new_id=lambda: "id")
    elif name == "named":
        parser = NamedCall("f")
        parser._reader._new_id = lambda: "id"
    else:
        parser = TOOL_PARSERS[name](SCHEMAS, new_id=lambda: "id")
    return parser


def parse(name, pieces):
    parser = parser_of(name)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def summary(events):
    """What a client gets in the end: content, and calls as (name, arguments)."""
    content, calls = "".join(e.text for e in events if isinstance(e, Content)), []
    for event in events:
        if isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    return content, [tuple(call) for call in calls]


def check(name, text, pieces):
    """One piece and these pieces: the same result, in the same order, and every character accounted for."""
    whole, cut = parse(name, [text]), parse(name, pieces)
    assert "".join(map(source_of, whole)) == "".join(map(source_of, cut)) == text
    assert summary(whole) == summary(cut)
    shown = [merged([e for e in events if not isinstance(e, Markup)]) for events in (whole, cut)]
    assert [type(e) for e in shown[0]] == [type(e) for e in shown[1]]
    if not summary(whole)[1] and name not in ("named", "required"):
        assert summary(whole)[0] == text
    return summary(whole)


def every_cut(text):
    yield list(text)
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
    for size in (2, 3, 5):
        yield [text[i : i + size] for i in range(0, len(text), size)]


F = '{"a": [1, {"b": "x}\\"\\u00e9"}], "c": -1.5e+3, "d": null}'
CASES = [
    # content alone
    *(
        (name, text, text, [])
        for name in FORMATS
        for text in ("", "hello", " \n ", "a < b", "[1, 2]", '{"x": 1}', "<tool", "é\u2028✓")
    ),
    # hermes
    ("hermes", f'Sure.\n<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>', "Sure.\n", [("f", F)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>', "", [("f", "{}")]),
    ("llama3_json", '{"parameters": null, "name": "f"}', "", [("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": nul', '{"name": "f", "parameters": nul', []),
    (
        "hermes",
        '\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call> then', " then", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),  # a missing bracket
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": tru', "", [("f", '{"a": tru')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', "oops}}</tool_call>", [("f", '{"a": ')]),
    *(
        ("hermes", text, text, [])
        for text in (
            "<tool_call>",
            '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {oops}}</tool_call>',
            "<tool_call></tool_call>",
            "<tool_call>[]</tool_call>",
            '<tool_call>{"name": "f"',
            "<tool_call>{}</tool_call>",
            '<tool_call>{"name": 1}</tool_call>',
            '<tool_call>{"name": ""}</tool_call>',
            '<tool_call>{"arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
            '<tool_call>{"name": "\\ud800"}</tool_call>',
            '<tool_call>{"name": "' + "f" * 300 + '"}</tool_call>',
            '<tool_call>{"name": "f",}</tool_call>',
            "</tool_call>",
        )
    ),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    (  # bare line breaks and tabs in a text; anywhere but in arguments they are wrong
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty\\n\r", "b\n": 1}}</tool_call>',
        "",
        [("f", '{"a": "x\\n\\ty\\n\\r", "b\\n": 1}')],
    ),
    *(
        ("hermes", text, text, [])
        for text in (
            '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": {"a": "\n"}, "name": "f"}</tool_call>',
        )
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\x0b"}}</tool_call>', '\x0b"}}</tool_call>', [("f", '{"a": "')]),
    (  # an end that is missing; the next call is none the less one
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    # llama
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        '{"type": "function", "name": "f", "arguments": {}} ; {"name": "g", "parameters": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {}} {"nam": 1} x', ' {"nam": 1} x', [("f", "{}")]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", 'Look: <|python_tag|>{"parameters": {"a": 1}, "name": "f"} ok', "Look:  ok", [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g', '; {"name": "g', [("f", "{}")]),
    *(
        ("llama3_json", text, text, [])
        for text in (
            '{"name": "Ann", "age": 3}',
            '{"name": "Ann"}',
            '<|python_tag|>brave.call(query="x")',
            'x {"name": "f", "parameters": {}}',
        )
    ),
    # mistral
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc"}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", 'Hm. [TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Hm. ", [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    *(
        ("mistral", text, text, [])
        for text in ("[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]f", "[TOOL_CALLS]f g{}", "[TOOL_CALL]")
    ),
    # granite
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("granite", '<tool_call>[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("granite", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [("f", "{}")]),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {}}]\n<|tool_call|>[{"name": "g", "arguments": {}}] ok',
        " ok",
        [("f", "{}"), ("g", "{}")],
    ),
    # deepseek
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "deepseek_v31",
        'So<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "deepseek_v31",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [("f", "{}")]),
    # pythonic
    (
        "pythonic",
        "[f(a=1, b='x\"y', c=[1, (2.5, None)], d={'k': True}), g.h()]",
        "",
        [("f", '{"a": 1, "b": "x\\"y", "c": [1, [2.5, null]], "d": {"k": true}}'), ("g.h", "{}")],
    ),
    (
        "pythonic",
        r"""[f(a='\n\x41\u00e9\101\'\q', b=-.5, c=1_000, d=+3, e=5., )]""",
        "",
        [("f", r"""{"a": "\nAéA'\\q", "b": -0.5, "c": 1000, "d": 3, "e": 5.0}""")],
    ),
    (  # a string in three quotes, one of nothing
        "pythonic",
        """[f(a=\"\"\"it's "so"\n\\\"\"\"\", b='', c=\"\", d='''''', e={'''k''': ''})]""",
        "",
        [("f", r"""{"a": "it's \"so\"\n\"", "b": "", "c": "", "d": "", "e": {"k": ""}}""")],
    ),
    ("pythonic", """[f(a="x " \n 'y''''z''', b={'k' "l": ''""})]""", "", [("f", '{"a": "x yz", "b": {"kl": ""}}')]),
    ("pythonic", """[f(a="x ", b='''y''""", "", [("f", '{"a": "x ", "b": "y\'\'')]),
    ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "", [("f", '{"a": 1}')]),
    ("pythonic", "[f(a=1), f(a=2), ] ok", " ok", [("f", '{"a": 1}'), ("f", '{"a": 2}')]),  # a last comma, as in Python
    ("pythonic", "[f(a=1),, ]", ",, ]", [("f", '{"a": 1}')]),
    ("pythonic", "[f(a=[1, ], b={})] and more", " and more", [("f", '{"a": [1], "b": {}}')]),
    *(
        ("pythonic", text, text, [])
        for text in (
            "[see](http://x)",
            "[f(x)]",
            "[f(a=b)]",
            "[]",
            "[1, 2]",
            "x [f()]",
            "[f(a==1)]",
            "[f",
            "[(a=1)]",
            "[f(1=2)]",
            "[3f()]",
        )
    ),
    # qwen3_coder
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n<b>\n\n12</b>\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
        "<parameter=x>\n[1,\n 2]\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"a": "<b>\\n\\n12</b>", "n": 7, "x": [1,\n 2]}')],
    ),
    (
        "qwen3_coder",
        "ok <function=f><parameter=o>None</parameter><parameter=s>null</parameter></function>",
        "ok ",
        [("f", '{"o": null, "s": null}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=n>many</parameter><parameter=s>5</parameter></function></tool_call>",
        "",
        [("f", '{"n": "many", "s": "5"}')],
    ),
    (  # a list or dict in Python's words
        "qwen3_coder",
        "<function=f><parameter=x>\n[{'k': True, \"l\": (None, 'it\\'s')}, ]\n</parameter>\n"
        "<parameter=o>{'a': b}</parameter></function>",
        "",
        [("f", '{"x": [{"k": true, "l": [null, "it\'s"]}], "o": "{\'a\': b}"}')],
    ),
    (  # an end within a text of JSON is none; within a text that is not JSON, it is
        "qwen3_coder",
        '<function=f><parameter=x>["</parameter>", "\\"", "</parameter>"]</parameter><parameter=o>"a</parameter></function>',
        "",
        [("f", '{"x": ["</parameter>", "\\"", "</parameter>"], "o": "\\"a"}')],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=r>5</parameter><parameter=s>\"a</parameter><parameter=a>{'b': \"</parameter></function>",
        "",
        [("f", '{"r": "5", "s": "\\"a", "a": "{\'b\': \\""}')],
    ),
    ("pythonic", f"[f(a={'7' * 300})]", "", [("f", f'{{"a": {"7" * 300}}}')]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\n<parameter=n>\n5\n<parameter=s>\ny\n</function>\n</tool_call>",
        "",
        [("f", '{"a": "x\\n<parameter=b>", "n": 5, "s": "y"}')],
    ),
    *(
        (
            "qwen3_coder",
            f"<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n{begin}<function=g>\n</function>\n</tool_call>",
            "",
            [("f", '{"n": 5}'), ("g", "{}")],
        )
        for begin in ("", "<tool_call>")
    ),
    (  # an end behind which the call does not go on is a quotation
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nWrite\n</parameter>\n behind it, </parameter>.\n</parameter>\n<parameter=n>"
        "\n1\n</parameter>\n\n</function>\n</tool_call>",
        "",
        [("f", '{"a": "Write\\n</parameter>\\n behind it, </parameter>.", "n": 1}')],
    ),
    ("qwen3_coder", "<function=f><parameter=a>x</parameter>\n", "", [("f", '{"a": "x"')]),
    ("qwen3_coder", "<function=f><parameter=a>x</parameter>\n</func", "", [("f", '{"a": "x"')]),
    ("qwen3_coder", "<function=f><parameter=a>x</parameter>" + " " * 200 + "</function>", "", [("f", '{"a": "x"}')]),
    ("qwen3_coder", "<function=f>\n<parameter=a>\nx <\n</param", "", [("f", '{"a": "x <')]),  # cut off within an end
    (  # behind an escape
        "qwen3_coder",
        '<function=f><parameter=x>["\\u00e9</parameter>", "\\ud83d\\ude00</parameter>"]</parameter></function>',
        "",
        [("f", '{"x": ["\\u00e9</parameter>", "\\ud83d\\ude00</parameter>"]}')],
    ),
    (  # of what begins a parameter, only what the call does not have yet ends a value
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nA call:\n<parameter=a>\nfoo\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"a": "A call:\\n<parameter=a>\\nfoo"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=a>\n<x>\n<parameter=n>\n<parameter=s>\nnull\n<parameter=x>"
        "\n[1,\n<parameter=s>\n</function>\n</tool_call><function=f><parameter=s>y\n<parameter=n>1</parameter></function>",
        "",
        [("f", '{"n": 5, "a": "<x>\\n<parameter=n>", "s": null, "x": "[1,\\n<parameter=s>"}'), ("f", '{"s": "y", "n": 1}')],
    ),
    ("qwen3_coder", "<tool_call><function=f>\n<parameter=n>\n5\n</parameter>\n</tool_call>", "", [("f", '{"n": 5}')]),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>\n", "", [("g", "{}")]),
    (
        "qwen3_coder",
        "So\n<seed:tool_call>\n<function=f>\n<parameter=a>x</parameter>\n<parameter=n>5</parameter>\n</function>\n</seed:tool_call>"
        "\n<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
        "So\n",
        [("f", '{"a": "x", "n": 5}'), ("g", "{}")],
    ),
    ("qwen3_coder", "<tool_call><function=g><parameter=zz>5</parameter></function></tool_call>", "", [("g", '{"zz": "5"}')]),
    *(
        ("qwen3_coder", text, text, [])
        for text in ("<function=", "<function=f>x", "<tool_call>x</tool_call>", "<function=></function>")
    ),
    # apertus
    (
        "apertus",
        'Hm. <|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|> ok',
        "Hm.  ok",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("apertus", '<|tools_prefix|>[{"f": {"a": "cut', "", [("f", '{"a": "cut')]),
    *(
        ("apertus", text, text, [])
        for text in (
            '<|tools_prefix|>[{"f": 5}]',
            '<|tools_prefix|>[{"": {}}]',
            "<|tools_prefix|>[]<|tools_suffix|>",
            '[{"f": {}}]',
        )
    ),
    # command r7b
    (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("cohere_command4", '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]', "", [("f", "{}")]),
    *(
        ("cohere_command3", text, text, [])
        for text in ('<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>', "<|START_ACTION|>[]<|END_ACTION|>")
    ),
    # gemma
    (
        "gemma4",
        'So.\n<|tool_call>call:f{a:<|"|>x, {"y}\n<|"|>,n:5,o:-1.5e3,s:null,x:[1,<|"|>a<|"|>,{k:true}]}<tool_call|>'
        "<|tool_call>call:g.h{}<tool_call|>",
        "So.\n",
        [("f", '{"a": "x, {\\"y}\\n", "n": 5, "o": -1.5e3, "s": null, "x": [1, "a", {"k": true}]}'), ("g.h", "{}")],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{<|"|>a b<|"|>:None, n: many,x:[]}<tool_call|>',
        "",
        [("f", '{"a b": null, "n": "many", "x": []}')],
    ),
    ("gemma4", '<|tool_call>call:f{a:<|"|>cut <|', "", [("f", '{"a": "cut ')]),
    (
        "functiongemma",
        "<start_function_call>call:f{a:<escape>x<escape>,n:5}<end_function_call>",
        "",
        [("f", '{"a": "x", "n": 5}')],
    ),
    *(
        ("gemma4", text, text, [])
        for text in ("<|tool_call>call:{}<tool_call|>", "<|tool_call>f{}<tool_call|>", "<|tool_call>call:f", "call:f{}")
    ),
    # gigachat
    (
        "gigachat3",
        'Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}',
        "Hm.",
        [("f", '{"a": 1}')],
    ),
    ("gigachat3", '<|function_call|>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    # glm
    (
        "glm45",
        "\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>\n<b> 5</arg_value>\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n"
        '<arg_key>x</arg_key>\n<arg_value>[1, "</arg_value>"]</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>',
        "",
        [("f", '{"a": "\\n<b> 5", "n": 7, "x": [1, "</arg_value>"]}'), ("g", "{}")],
    ),
    (
        "glm47",
        "So <tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value> y</arg_value><arg_key>o</arg_key><arg_value>null"
        "</arg_value></tool_call><tool_call>g</tool_call>",
        "So ",
        [("f", '{"a": "x</arg_value> y", "o": null}'), ("g", "{}")],
    ),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>cut </arg", "", [("f", '{"a": "cut ')]),
    *(
        ("glm45", text, text, [])
        for text in (
            "<tool_call>f",
            "<tool_call>f x</tool_call>",
            '<tool_call>{"name": "f"}</tool_call>',
            "<tool_call></tool_call>",
        )
    ),
    (
        "hy_v3",
        "Hm<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n"
        "<tool_call>g<tool_sep>\n</tool_call>\n</tool_calls> ok",
        "Hm ok",
        [("f", '{"a": "x"}'), ("g", "{}")],
    ),
    # granite 20b
    (
        "granite-20b-fc",
        '<function_call> {"name": "f", "arguments": {"a": 1}} <function_call> {"name": "g", "arguments": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    # hunyuan
    (
        "hunyuan_a13b",
        'Hm.<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_calls>',
        "Hm.",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "hunyuan_a13b",
        '<tool_calls><tool_call>f\n```json\n{"a": 1}\n```</tool_call><tool_call>g\n```json\n{}\n```</tool_call></tool_calls>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    *(
        ("hunyuan_a13b", text, text, [])
        for text in ("<tool_calls></tool_calls>", "<tool_calls>[]", "<tool_calls><tool_call>f g")
    ),
    # kimi
    (
        "kimi_k2",
        'Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_call_begin|> functions.g.h:1 <|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>",
        "Hm.",
        [("f", '{"a": 1}'), ("g.h", "{}")],
    ),
    (
        "kimi_k2",
        "<|tool_call_section_begin|><|tool_call_begin|>f:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "",
        [("f", "{}")],
    ),
    *(
        ("kimi_k2", text, text, [])
        for text in (
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
        )
    ),
    # lfm2
    (
        "lfm2",
        "So\n<|tool_call_start|>[f(a='x', n=None, l=[1, {'k': True}]), g()]<|tool_call_end|>Now I wait.",
        "So\nNow I wait.",
        [("f", '{"a": "x", "n": null, "l": [1, {"k": true}]}'), ("g", "{}")],
    ),
    ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|><|tool_call_start|>[g()]", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("lfm2", "<|tool_call_start|>[f(a='cut", "", [("f", '{"a": "cut')]),
    *(("lfm2", text, text, []) for text in ("[f(a=1)]", "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>f(a=1)")),
    ("longcat", '<longcat_tool_call>\n{"name": "f", "arguments": {}}\n</longcat_tool_call> ok', " ok", [("f", "{}")]),
    # minimax
    (
        "minimax_m2",
        'So\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n y</parameter>\n<parameter name="n">7'
        "</parameter>\n</invoke>\n<invoke name='g'>\n</invoke>\n</minimax:tool_call> ok",
        "So\n ok",
        [("f", '{"a": "x</parameter>\\n y", "n": 7}'), ("g", "{}")],
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">cut', "", [("f", '{"a": "cut')]),
    *(
        ("minimax_m2", text, text, [])
        for text in (
            "<minimax:tool_call></minimax:tool_call>",
            '<minimax:tool_call><invoke name="">',
            '<invoke name="f"></invoke>',
        )
    ),
    # olmo
    (
        "olmo3",
        "So\n<function_calls>\nf(a='x', n=null)\ng()\n</function_calls> ok",
        "So\n ok",
        [("f", '{"a": "x", "n": null}'), ("g", "{}")],
    ),
    *(("olmo3", text, text, []) for text in ("<function_calls></function_calls>", "<function_calls>f", "[f(a=1)]")),
    # phi
    (
        "phi4_mini_json",
        'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', "", [("f", "{}")]),
    *(("phi4_mini_json", text, text, []) for text in ("functools is a module", "functools[1]", "import functools\n[f(1)]")),
    # xlam
    ("xlam", ' [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("xlam", 'Hm.\n```json\n[{"name": "f", "arguments": {}}]\n```', "Hm.\n", [("f", "{}")]),
    ("xlam", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("xlam", 'a <tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "a ", [("f", "{}")]),
    *(
        ("xlam", text, text, [])
        for text in ('[{"name": "Ann"}]', '[{"name": "Ann", "age": 3}]', "```json\n[1]\n```", "```\n[1]\n```", "[1, 2]", "[T")
    ),
    # through a grammar
    (
        "required",
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("required", '[{"name": "f", "parameters": {"a": "unfini', "", [("f", '{"a": "unfini')]),
    ("required", '[{"name": "f"', "", []),
    ("required", '[{"name": "f", "parameters": {}}, {"name": "f", "para', "", [("f", "{}")]),
    ("required", "no", "no", []),
    ("named", '\n{"a": 1}', "", [("f", '{"a": 1}')]),
    ("named", "", "", []),
]
