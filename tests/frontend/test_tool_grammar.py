"""The grammar of tool_choice "required": schemas of functions stand in it as they would by themselves."""

import json

import llguidance
import pytest
from tokenizers import AddedToken
from toy_tokenizers import byte_level

from quire.enginecore.grammar.trial import judge
from quire.enginecore.grammar.vocabulary import make_vocabulary
from quire.frontend.http.api.tools.call_tags import object_schema
from quire.frontend.http.api.tools.tool_grammar import answer_or_calls, required_schema, tool_grammar
from quire.frontend.http.api.tools.tool_use import Function, ToolUse
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.output_events import CallBegun
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS
from quire.ipc.structured_outputs import StructuredOutputs

VOCABULARY = make_vocabulary(byte_level().to_str().encode(), 512)
B = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}
HERE = {"$ref": "#/$defs/tool0/$defs/b"}


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        (B, HERE),
        ({"$id": "https://x.y/z", **B}, HERE),
        ({"$id": "https://x.y/z", **B, "properties": {"a": {"$ref": "https://x.y/z#/$defs/b"}}}, HERE),
        ({**B, "properties": {"a": {"$id": "/c", **B}}}, {"$id": "/c", **B}),
        ({**B, "properties": {"a": {"const": HERE}}}, {"const": HERE}),
    ],
)
def test_references_lead_where_they_led(parameters, found):
    functions = [Function("f", parameters, strict=True), Function("g")]
    assert required_schema(functions, True)["$defs"]["tool0"]["properties"]["a"] == found
    grammar = tool_grammar(ToolUse("required", functions), None)
    assert json.loads(grammar.text)["$defs"]["tool0"].get("$id") is None
    assert judge(grammar, VOCABULARY).error == ""


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]f[ARGS]{"x": 1}',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</tool_call>",
    "pythonic": "[f(x=1)]",
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "answer", [("json", '{"type": "object", "properties": {"n": {"type": "integer"}}}'), ("json_object", "")]
)
def test_an_answer_in_json_or_calls(name, answer):
    """Agents send both: tools, and the format of the answer that comes when the tools have been called."""
    wanted, use = StructuredOutputs(*answer, "response_format.json_schema.schema"), ToolUse("auto", [Function("f")])
    found = judge(answer_or_calls(wanted, use, TOOL_PARSERS[name]), VOCABULARY)
    assert not found.error
    for text in ('{"n": 1}', CALLS[name]):
        assert accepts(found.lark, text), text
    for text in ("5 or " + CALLS[name], "", "so", '{"n": 1} so', *['{"n": "a"}'] * (answer[0] == "json")):
        assert not accepts(found.lark, text), text


def accepts(lark, text):
    matcher = llguidance.LLMatcher(VOCABULARY.tokenizer, lark, log_level=0)
    return all(map(matcher.consume_token, VOCABULARY.tokenizer.greedy_tokenize(text))) and matcher.is_accepting()


def test_where_calls_cannot_be_written_down_the_answer_stands_alone():
    answer, pythonic = StructuredOutputs("json_object"), TOOL_PARSERS["pythonic"]
    assert answer_or_calls(answer, ToolUse("auto", [Function("3d")]), pythonic) is answer
    assert answer_or_calls(answer, ToolUse("auto", [Function("f")]), TOOL_PARSERS["llama3_json"]) is answer
    with pytest.raises(ApiError, match="begins with a digit"):
        answer_or_calls(answer, ToolUse("auto", [Function("3d", strict=True)]), pythonic)


TWO = {
    "hermes": CALLS["hermes"] + "\n" + CALLS["hermes"],
    "llama3_json": '{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 1}}',
    "mistral": CALLS["mistral"] * 2,
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]',
    "deepseek_v31": "<｜tool▁calls▁begin｜>" + 2 * "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
                    + "<｜tool▁calls▁end｜>",
    "qwen3_coder": CALLS["qwen3_coder"] + "\n" + CALLS["qwen3_coder"],
    "pythonic": "[f(x=1), f(x=2)]",
    "apertus": '<|tools_prefix|>[{"f": {"x": 1}}, {"f": {"x": 2}}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}},\n    '
                       '{"tool_call_id": "1", "tool_name": "f", "parameters": {"x": 2}}\n]<|END_ACTION|>',
    "functiongemma": 2 * "<start_function_call>call:f{x:1}<end_function_call>",
    "gemma4": 2 * "<|tool_call>call:f{x:1}<tool_call|>",
    "gigachat3": 'function call<|role_sep|>\n{"name": "f", "arguments": {"x": 1}}\n'
                 '<|function_call|>{"name": "f", "arguments": {}}',
    "glm45": 2 * "\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "glm47": 2 * "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
    "granite-20b-fc": 2 * '<function_call> {"name": "f", "arguments": {"x": 1}}',
    "hunyuan_a13b": '<tool_calls>[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]</tool_calls>',
    "hy_v3": "<tool_calls>\n" + 2 * ("<tool_call>f<tool_sep>\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n")
             + "</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
               "<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": "<|tool_call_start|>[f(x=1), f(x=2)]<|tool_call_end|>",
    "longcat": 2 * '<longcat_tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</longcat_tool_call>',
    "minimax_m2": "<minimax:tool_call>\n" + 2 * '<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>\n'
                  + "</minimax:tool_call>",
    "nemotron_json": '<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]</TOOLCALL>',
    "olmo3": "<function_calls>\nf(x=1)\nf(x=2)\n</function_calls>",
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]',
    "xlam": '[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]',
}  # fmt: skip


def test_every_format_has_two_calls_here():
    assert {TOOL_PARSERS[name] for name in TWO} == set(TOOL_PARSERS.values())


@pytest.mark.parametrize("name", TWO)
def test_two_calls_are_made_where_they_may_be(name):
    """The grammar of "required" takes them, and the parser reads them; one call alone is taken where no more may be made."""
    functions = [Function("f", {"type": "object", "properties": {"x": {"type": "integer"}}})]
    read = TOOL_PARSERS[name]({"f": functions[0].parameters}, is_forced=True)
    events = read.feed(TWO[name]) + read.finish()
    assert [event.name for event in events if isinstance(event, CallBegun)] == ["f", "f"]
    uses = [("required", None, True), ("required", True, True), ("required", False, False), ("named", True, False)]
    for mode, parallel, takes_two in uses:
        found = judge(tool_grammar(ToolUse(mode, functions, parallel), TOOL_PARSERS[name]), VOCABULARY)
        assert not found.error
        assert accepts(found.lark, TWO[name]) == takes_two
        assert accepts(found.lark, "\n\n" + TWO[name].lstrip()) == takes_two
        assert not accepts(found.lark, "") and not accepts(found.lark, "So " + TWO[name])
        assert name not in CALLS or accepts(found.lark, CALLS[name])


@pytest.mark.parametrize("name", TWO)
def test_markers_may_be_special_tokens(name):
    parser, tokenizer = TOOL_PARSERS[name], byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in parser.special])
    vocabulary = make_vocabulary(tokenizer.to_str().encode(), 512)
    functions = [Function("f", {"type": "object", "properties": {"x": {"type": ["integer", "string"]}}})]
    found = judge(tool_grammar(ToolUse("required", functions), parser), vocabulary)
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, found.lark, log_level=0)
    ids = tokenizer.encode(TWO[name].lstrip(), add_special_tokens=False).ids
    assert not parser.special or vocabulary.special_names.keys() & set(parser.special)
    assert all(map(matcher.consume_token, ids)) and matcher.is_accepting(), matcher.get_error()


def test_a_schema_that_a_syntax_cannot_follow_is_followed_only_if_it_is_strict():
    parameters = {"type": "object", "properties": {"x": {}}, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}
    for name in ("qwen3_coder", "pythonic", "gemma4"):
        for strict in (False, True):
            use = ToolUse("named", [Function("f", parameters, strict, "tools[0].function")])
            found = judge(tool_grammar(use, TOOL_PARSERS[name]), VOCABULARY)
            assert ("anyOf" in found.error) == strict
            assert strict or name not in CALLS or accepts(found.lark, CALLS[name])


def properties(**schema):
    return {"type": "object", "properties": {"a": schema}}


def verdict(name, parameters, mode="named", strict=False):
    """The error of the grammar for calls of one function; empty if it can be used."""
    grammar = tool_grammar(ToolUse(mode, [Function("f", parameters, strict)]), TOOL_PARSERS[name])
    return judge(grammar, VOCABULARY).error


NO_JSON = ("glm45", "gemma4", "minimax_m2", "olmo3", "qwen3_coder")


@pytest.mark.parametrize("name", ["hermes", *NO_JSON])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": None, "required": None, "additionalProperties": None, "$defs": None},
        properties(type="string", anyOf=None, enum=None, minLength=None, maxLength=None, pattern=None, examples=None),
        properties(type="array", items=None, minItems=None),
        {"type": "object", "properties": {"a": None}},
    ],
)
def test_null_keywords_of_a_schema_are_absent(name, parameters):
    assert verdict(name, parameters) == "" == verdict(name, parameters, "auto", True)


def test_null_is_kept_where_it_is_a_value():
    schema = {"properties": {"enum": {"const": None}, "a": {"default": None, "enum": [None, 1]}}}
    assert object_schema(schema) == {"type": "object", **schema}


@pytest.mark.parametrize("name", NO_JSON)
@pytest.mark.parametrize("keyword", [{"anyOf": 5}, {"type": [{}]}, {"pattern": 5}, {"minLength": "x"}, {"enum": 5}])
def test_keywords_of_a_wrong_form_are_refused_by_name(name, keyword):
    schema = properties(**{"type": "string", **keyword})
    assert next(iter(keyword)) in (error := verdict(name, schema, "auto", True)) and "memory" not in error


@pytest.mark.parametrize("name", NO_JSON)
def test_a_forced_call_passes_over_what_cannot_be_followed(name):
    for schema in ({"type": "STRING"}, {"type": "string", "pattern": r"^(?!x)y$"}, {"type": "string", "not": {"enum": ["x"]}}):
        assert verdict(name, properties(**schema)) == "", schema


@pytest.mark.parametrize("name", ["hermes", "glm45", "minimax_m2", "olmo3", "qwen3_coder"])
@pytest.mark.parametrize("keyword", ["enum", "anyOf", "oneOf"])
def test_a_property_of_which_no_value_is_valid_is_not_written_or_refused_by_name(name, keyword):
    schema = {"type": "object", "properties": {"a": {keyword: []}, "b": {"type": "integer"}}}
    for mode, strict in (("named", False), ("required", True), ("auto", True)):
        assert verdict(name, schema, mode, strict) == ""
        use = ToolUse(mode, [Function("f", {**schema, "required": ["a"]}, strict, "tools[3].function")])
        error = judge(tool_grammar(use, TOOL_PARSERS[name]), VOCABULARY).error
        assert error.startswith("tools[3].function.parameters: ") and "'a'" in error


@pytest.mark.parametrize("name", NO_JSON)
def test_alternatives_that_refer_to_themselves_take_little_time(name):
    two = {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}, {"type": "string"}]}
    assert "memory" not in verdict(name, {**properties(**{"$ref": "#/$defs/x"}), "$defs": {"x": two}})
