"""Parsers of tool calls: what they make of each format, and that no cut of the text and no text at all loses a character."""

import ast
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_cases import CASES, FORMATS, SCHEMAS, check, every_cut, parse, parser_of, summary
from tool_texts import written

from quire.frontend.text.output_events import Arguments, CallBegun, Content, source_of
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS, tool_parser_of
from quire.frontend.text.tool_parsers.xml_values import XmlValues, types_of


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_formats_at_every_cut(name, text, content, calls):
    for pieces in every_cut(text):
        assert check(name, text, pieces) == (content, calls), pieces


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name":', '"arguments":'],
    "qwen": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name":', '"arguments":'],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": ', ";"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f", '[{"name": "f", "arguments": '],
    "granite": ["<|tool_call|>", "<tool_call>", "</tool_call>", '[{"name": "f", "arguments": '],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                    "<｜tool▁sep｜>", "f", "\n```json\n", "\n```"],
    "pythonic": ["[f(a=", "g()", "<|python_start|>", "<|python_end|>", "(", ")", "a=", "'", '"', "\\x4", "1", "+", "None"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "<function=f>", "</function>",
                    "<parameter=a>", "<parameter=n>", "</parameter>", ">"],
    "apertus": ["<|tools_prefix|>", "<|tools_suffix|>", '[{"f": '],
    "cohere_command3": ["<|START_ACTION|>", "<|END_ACTION|>", '[{"tool_call_id": "0", "tool_name": "f", "parameters": '],
    "functiongemma": ["<start_function_call>", "<end_function_call>", "call:f{", "a:", "<escape>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", "call:f{", "a:", '<|"|>'],
    "gigachat3": ["<|message_sep|>\n\n", "function call<|role_sep|>\n", "<|function_call|>", '{"name": "f", "arguments": '],
    "glm45": ["<tool_call>", "</tool_call>", "f", "\n", "<arg_key>", "a", "n", "</arg_key>", "<arg_value>", "</arg_value>"],
    "granite-20b-fc": ["<function_call>", '{"name": "f", "arguments": '],
    "hunyuan_a13b": ["<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "f", "\n```json\n", "```",
                     '[{"name": "f", "arguments": '],
    "hy_v3": ["<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "f", "<tool_sep>", "<arg_key>a</arg_key>",
              "<arg_value>", "</arg_value>"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_section_begin|>",
                "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "[f(a=", "g()", ")", ", ", "]", "'", "1"],
    "longcat": ["<longcat_tool_call>", "</longcat_tool_call>", '{"name": "f", "arguments": '],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>", '<parameter name="a">',
                   "<parameter name='n'>", "</parameter>"],
    "nemotron_json": ["<TOOLCALL>", "</TOOLCALL>", '[{"name": "f", "arguments": '],
    "olmo3": ["<function_calls>", "</function_calls>", "f(a=", "g()", ")", "'", "1", "\n"],
    "phi4_mini_json": ["functools", "[", "<|tool_call|>", "<|/tool_call|>", '[{"name": "f", "arguments": '],
    "xlam": ["[TOOL_CALLS]", "```json", "```", "<tool_call>", "</tool_call>", '[{"name": "f", "arguments": '],
    "required": ['[{"name": "f", "parameters": '],
}  # fmt: skip
for alias in FORMATS:
    FRAGMENTS.setdefault(alias, next(FRAGMENTS[n] for n in FRAGMENTS if TOOL_PARSERS.get(n) is TOOL_PARSERS[alias]))
JUNK = [*'{}[]",:\\ \n<>|', "true", "-1.5e3", '"a"', '{"a": 1}', '"\\u00e', "é", "\U0001f600", "\u2028", "x", "nul"]


@st.composite
def texts_and_pieces(draw, name):
    text = "".join(draw(st.lists(st.sampled_from([*FRAGMENTS[name] * 2, *JUNK]), max_size=24)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", [*FORMATS, "required"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_text_loses_a_character(name, data):
    text, pieces = data.draw(texts_and_pieces(name))
    check(name, text, pieces)
    check(name, text, list(text))


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex("[a-z_]{1,5}", fullmatch=True), JSON_VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.from_regex("[a-z_]{1,8}", fullmatch=True), ARGUMENTS), min_size=1, max_size=3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_that_is_cut_off_leaves_no_content(name):
    text = written(name, [("f", {"a": "x"})])
    for end in range(1, min(len(text), 16)):
        parser = TOOL_PARSERS[name](SCHEMAS, is_forced=True)
        events = parser.feed("\n" + text[:end]) + parser.finish()
        assert not any(isinstance(event, Content) for event in events), text[:end]
        assert "".join(map(source_of, events)) == "\n" + text[:end]


def as_xml_value(function, key, value):
    """The value that a parser of XML reads where JSON was written: SCHEMAS has types for f alone, all else is text."""
    types = types_of(SCHEMAS.get(function, {}), key)
    return value if "string" not in types or (value is None and "null" in types) else json.dumps(value)


@pytest.mark.parametrize("name", [*FORMATS, "required"])
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, size=st.integers(1, 9))
@example(calls=[("f", {"a": "'\"\\\n\x00\x7f\ud7ff\U0001f600"})], size=1)
@example(calls=[("f", {"n": None}), ("f", {"s": None, "x": [None], "o": None, "a": None, "r": None})], size=3)
def test_what_a_model_calls_comes_out(name, calls, size):
    text = written(name, calls)
    content, found = check(name, text, [text[i : i + size] for i in range(0, len(text), size)])
    assert content == ""
    if name in TOOL_PARSERS and issubclass(TOOL_PARSERS[name], XmlValues):
        calls = [(n, {k: as_xml_value(n, k, v) for k, v in a.items()}) for n, a in calls]
    assert [(n, json.loads(a)) for n, a in found] == [(n, json.loads(json.dumps(a))) for n, a in calls]


@settings(max_examples=200, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner), max_leaves=6,
))  # fmt: skip
def test_python_literals_become_json(value):
    _, ((_, arguments),) = summary(parse("pythonic", [f"[f(a={value!r})]"]))
    assert json.loads(arguments) == {"a": json.loads(json.dumps(ast.literal_eval(repr(value))))}


@pytest.mark.parametrize("name", [*FORMATS, "required"])
@pytest.mark.parametrize(
    "filling", ["[", '{"a":', "<tool_call>", " ", "x", '{"name": "f", "arguments": {"a": "', "1", "\\\\", "'\"", "<"]
)
def test_large_outputs_take_linear_time(name, filling):
    """Quadratic time would be minutes."""
    start = {"pythonic": "[f(a=", "mistral": '[TOOL_CALLS]f{"a": ', "qwen3_coder": "<function=f><parameter=a>"}.get(
        name, '<tool_call>{"name": "f", "arguments": {"a": '
    )
    text = start + filling * (60_000 // len(filling))
    began = time.process_time()
    events = parse(name, [text[i : i + 4] for i in range(0, len(text), 4)])
    assert time.process_time() - began < 5
    assert "".join(map(source_of, events)) == text


def test_arguments_come_as_they_are_written():
    for name, head in (
        ("hermes", '<tool_call>{"name": "f", "arguments": '),
        ("mistral", "[TOOL_CALLS]f"),
        ("llama3_json", '{"name": "f", "parameters": '),
    ):
        parser = parser_of(name)
        parser.feed(head)
        parser.feed('{"a": "')
        assert parser.feed("wor") == [Arguments(0, "wor", "wor")]
        assert parser.feed('ds"') == [Arguments(0, 'ds"', 'ds"')]
    parser = parser_of("pythonic")
    parser.feed("[f(a='")
    assert parser.feed("wo\n") == [Arguments(0, "wo\\n", "wo\n")]
    parser = parser_of("qwen3_coder")
    parser.feed("<function=f>\n<parameter=a>\n")
    assert parser.feed("wo\n") == [Arguments(0, "wo", "wo")]  # a line break may be the value's last
    assert parser.feed('r"') == [Arguments(0, '\\nr\\"', '\nr"')]


def test_ids():
    begun = [
        e
        for e in TOOL_PARSERS["mistral"]().feed("[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}[TOOL_CALLS]g{}")
        if isinstance(e, CallBegun)
    ]
    assert begun[0].id == "abc" and len(begun[1].id) == 9 and begun[1].id.isalnum()
    text = written("hermes", [("f", {})] * 2)
    ids = [e.id for e in TOOL_PARSERS["hermes"]().feed(text) if isinstance(e, CallBegun)]
    assert len(set(ids)) == 2 and all(i.startswith("chatcmpl-tool-") for i in ids)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ messages }}", None),
        ("<tool_call>\n{...}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=a>\n</tool_call>", "qwen3_coder"),
        ("<seed:tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
        ('within <tool_call></tool_call> tags: <tool_calls>[{"name": ...}]</tool_calls>', "hunyuan_a13b"),
        ("'[TOOL_CALLS]' + calls", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("respond with <|tool_call|> followed by a list", "granite"),
        ("<|start_of_role|>system ... respond with <tool_call> and a list", "granite"),
        ("<|start_of_role|> <tool_call></tool_call>", "hermes"),
        ("<|start_header_id|> '{\"name\": ' '\"parameters\": ' <|python_tag|>", "llama3_json"),
        ("<|start_header_id|> [func_name1(param=value), func_name2()]", "pythonic"),
        ("<|header_start|> <|python_start|> <|python_end|> '{\"name\": ' '\"parameters\": '", "llama4_json"),
        ('<|header_start|> [func_name1(param=value)] {"name": "parameters":', "pythonic"),
        ("<|python_start|>", "pythonic"),
    ],
)
def test_the_template_chooses_the_parser(template, parser):
    assert tool_parser_of(template) is (TOOL_PARSERS[parser] if parser else None)
