"""Structural tags: what each format takes and refuses, alone and within others, and how their errors name a place."""

import json

import llguidance
import pytest
from toy_tokenizers import byte_level

from quire.enginecore.grammar.trial import judge
from quire.enginecore.grammar.vocabulary import Vocabulary, make_vocabulary
from quire.ipc.structured_outputs import StructuredOutputs

TOKENIZER = byte_level()
START = TOKENIZER.token_to_id("<|im_start|>")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return make_vocabulary(TOKENIZER.to_str().encode(), 512, [TOKENIZER.token_to_id("</s>")])


def lark_of(vocabulary, format_) -> str:
    verdict = judge(StructuredOutputs("structural_tag", json.dumps({"type": "structural_tag", "format": format_})), vocabulary)
    assert not verdict.error, verdict.error
    return verdict.lark


def accepts(vocabulary, lark, text, special=True) -> bool:
    """special: whether texts of special tokens are written as those, or spelled."""
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, lark, log_level=0)
    ids = [
        i
        for at, part in enumerate(text.split("<|im_start|>"))
        for i in (([START] if special else vocabulary.tokenizer.greedy_tokenize("<|im_start|>")) if at else [])
        + vocabulary.tokenizer.greedy_tokenize(part)
    ]
    return all(matcher.consume_token(i) for i in ids) and matcher.is_accepting()


def const(value):
    return {"type": "const_string", "value": value}


def tag(content, begin="<a>", end="</a>"):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TEXT = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
OBJECT = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "$defs": {"x": {"type": "boolean"}},
    },
}
TWO = [tag(NUMBER, "<f=a>", "</f>"), tag(OBJECT, "<f=b>", "</f>")]


def triggered(**fields):
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": TWO, **fields}


def separated(**fields):
    return {"type": "tags_with_separator", "tags": TWO, "separator": ", ", **fields}


PROPERTIES = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "color": {"enum": ["red", "green"], "type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
CASES = {
    "const": (const('x"\n<b>'), ['x"\n<b>'], ["x", ""]),
    "json": (OBJECT, ['{"a": true}'], ['{"a": 1}', "{}"]),
    "regex": ({"type": "regex", "pattern": r"^\d+/x$"}, ["12/x"], ["x"]),
    "ebnf": ({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= [0-9]'}, ["a5"], ["a"]),
    "lark": ({"type": "grammar", "grammar": 'start: "{" b "}"\nb: /[0-9]/'}, ["{5}"], ["{}"]),
    "any": (TEXT, ["", "x\n<a>"], []),
    "any but": ({**TEXT, "excludes": ["no", "</a>"]}, ["", "on n", "x </a"], ["xno", "</a>"]),
    "any that begins otherwise": ({**TEXT, "excludes_start": r"\s*\{"}, ["x {", ""], [" {", "{}"]),
    "sequence": (
        {"type": "sequence", "elements": [const("a"), {"type": "regex", "pattern": "[a-z]+"}, const("b"), NUMBER, const("!")]},
        ["aab5!", "abbb-1!"],
        ["ab5!", "aab!"],
    ),
    "sequence that goes on": ({"type": "sequence", "elements": [NUMBER, const(":"), TEXT]}, ["5:", "5: x"], ["5"]),
    "or": ({"type": "or", "elements": [const("yes"), NUMBER, tag(TEXT)]}, ["yes", "7", "<a>b</a>"], ["no", "<a>b"]),
    "or that goes on": ({"type": "or", "elements": [NUMBER, {**TEXT, "excludes_start": "[0-9-]"}]}, ["5", "five"], ["5 or"]),
    "optional": ({"type": "sequence", "elements": [{"type": "optional", "content": const("a")}, NUMBER]}, ["a1", "1"], ["aa1"]),
    "star": ({"type": "star", "content": tag(NUMBER)}, ["", "<a>1</a><a>2</a>"], ["<a>1"]),
    "plus": ({"type": "plus", "content": tag(NUMBER)}, ["<a>1</a>"], [""]),
    "repeat": ({"type": "repeat", "min": 2, "max": 3, "content": const("ab")}, ["abab", "ababab"], ["ab", "abababab"]),
    "repeat on": ({"type": "repeat", "min": 1, "max": -1, "content": tag(NUMBER)}, ["<a>1</a><a>1</a>"], [""]),
    "tag of json": (tag(OBJECT), ['<a>{"a": false}</a>'], ['<a>{"a": false}', "<a></a>"]),
    "tag of text": (tag(TEXT), ["<a></a>", "<a>b<a></a>"], ["<a>", "<a></a></a>"]),
    "tag of text with its own end excluded": (tag({**TEXT, "excludes": ["</a>", "no"]}), ["<a>x</a>"], ["<a>no</a>"]),
    "tag of regex": (
        {"type": "sequence", "elements": [tag({"type": "regex", "pattern": ".*"}), const("b")]},
        ["<a>x</a>b"],
        ["<a>b"],
    ),
    "several ends": (tag(TEXT, end=["</a>", "\n"]), ["<a>x</a>", "<a>x\n"], ["<a>x", "<a>x\n</a>"]),
    "no end": (tag(const("b"), end=""), ["<a>b"], ["<a>"]),
    "tag of tags": (
        tag(triggered(), "<c>", "</c>"),
        ["<c></c>", "<c>x<f=a>1</f> y</c>"],
        ["<c><f=a>x</f></c>", "<c>", "<c></c>x"],
    ),
    "triggered": (triggered(), ["", "hi", "<f", 'x<f=a>12</f>y<f=b>{"a": true}</f>'], ["<f=c>", "<f=a>x</f>", "<f=a>1"]),
    "at least one": (triggered(at_least_one=True), ["<f=a>1</f>", "<f=a>1</f> x <f=a>2</f>"], ["", "x<f=a>1</f>"]),
    "the first": (triggered(stop_after_first=True), ["x", "x<f=a>1</f>"], ["<f=a>1</f>x"]),
    "one": (triggered(at_least_one=True, stop_after_first=True), ["<f=a>1</f>"], ["", "x", "<f=a>1</f>x"]),
    "triggered but": (triggered(excludes=["no"]), ["x<f=a>1</f>"], ["no", "x<f=a>1</f>no"]),
    "triggered that begins otherwise": (triggered(excludes_start="x"), ["y<f=a>1</f>x"], ["x", "x<f=a>1</f>"]),
    "separated": (
        separated(),
        ["", "<f=a>1</f>", '<f=a>1</f>, <f=b>{"a": true}</f>'],
        ["x", "<f=a>1</f>,", "<f=a>1</f><f=a>1</f>"],
    ),
    "separated, one": (separated(at_least_one=True, stop_after_first=True), ["<f=a>1</f>"], ["", "<f=a>1</f>, <f=a>1</f>"]),
    "separated by nothing": (separated(separator=""), ["<f=a>1</f><f=a>1</f>"], ["<f=a>1</f>, "]),
    "a special token": (tag(NUMBER, "<|im_start|>", "<|im_start|>"), ["<|im_start|>5<|im_start|>"], ["5", "<|im_start|>5"]),
    "a special trigger": (
        {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [tag(NUMBER, "<|im_start|>n", ".")]},
        ["x", "x<|im_start|>n5.y"],
        ["<|im_start|>", "<|im_start|>nx"],
    ),
    "qwen": (
        {"type": "qwen_xml_parameter", "json_schema": PROPERTIES},
        [
            "<parameter=name>Bob</parameter><parameter=n>100</parameter>",
            "<parameter=name>\nB<o>\n</parameter>\n<parameter=color>\nred\n</parameter>\n<parameter=n>\n1\n</parameter>\n",
        ],
        [
            "<parameter=n>1</parameter>",
            "<parameter=name>Bob</parameter><parameter=n>x</parameter>",
            "<parameter=name>Bob</parameter><parameter=color>\nblue\n</parameter><parameter=n>1</parameter>",
        ],
    ),
    "qwen of anything": (
        {"type": "json_schema", "style": "qwen_xml", "json_schema": True},
        ["", "<parameter=a>b</parameter>"],
        ["x"],
    ),
    "qwen of nothing": (
        {"type": "qwen_xml_parameter", "json_schema": {"additionalProperties": False}},
        [""],
        ["<parameter=a>b</parameter>"],
    ),
    "minimax": (
        {"type": "json_schema", "style": "minimax_xml", "json_schema": PROPERTIES},
        [
            '<parameter name="name">Bob</parameter><parameter name="n">100</parameter>',
            '<parameter name="name">B<o></parameter>\n<parameter name="color">red</parameter>\n'
            '<parameter name="n">1</parameter>\n',
        ],
        ['<parameter name="n">1</parameter>', '<parameter name="name">Bob</parameter><parameter name="n">x</parameter>'],
    ),
    "glm": (
        {"type": "json_schema", "style": "glm_xml", "json_schema": PROPERTIES},
        [
            "<arg_key>name</arg_key><arg_value>Bob</arg_value><arg_key>n</arg_key><arg_value>100</arg_value>",
            "<arg_key>name</arg_key>\n<arg_value>B<o>\n</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n",
        ],
        ["<arg_key>n</arg_key><arg_value>1</arg_value>", "<arg_key>name</arg_key>"],
    ),
    "glm of anything": (
        {"type": "json_schema", "style": "glm_xml", "json_schema": True},
        ["", "<arg_key>a</arg_key><arg_value>b</arg_value>"],
        ["x"],
    ),
    "gemma": (
        {"type": "json_schema", "style": "gemma4", "json_schema": PROPERTIES},
        ['{n:100,name:<|"|>Bob<|"|>}', '{color:<|"|>red<|"|>,n:1,name:<|"|><|"|>}'],
        ['{name:<|"|>Bob<|"|>,n:1}', "{n:1}", '{n:1,name:<|"|>Bob<|"|>,x:1}', '{n:1,name:"Bob"}', "", "{}"],
    ),
    "gemma of lists and objects": (
        {
            "type": "json_schema",
            "style": "gemma4",
            "json_schema": {
                "properties": {
                    "a": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
                    "o": {"anyOf": [{"type": "object", "properties": {"k": {"enum": ["x", 5, None]}}}, {"type": "null"}]},
                    "s": {"type": ["string", "boolean"], "maxLength": 2},
                }
            },
        },
        ["{}", '{a:[1],o:{k:<|"|>x<|"|>},s:true}', '{a:[1,2],o:{k:5},s:<|"|>ab<|"|>}', "{o:null}", "{o:{k:null}}", "{o:{}}"],
        ["{a:[]}", "{a:[1,2,3]}", '{o:{k:<|"|>y<|"|>}}', '{s:<|"|>abc<|"|>}', "{s:1}", "{o:{x:1}}"],
    ),
    "gemma of anything": (
        {"type": "json_schema", "style": "functiongemma", "json_schema": True},
        ["{}", "{a:<escape>b<escape>,c:[1,{d:null}]}"],
        ["x", "{a:b}", "{a}", '{a:<|"|>b<|"|>}'],
    ),
    "python": (
        {"type": "json_schema", "style": "pythonic", "json_schema": PROPERTIES},
        ['name="Bob", n=100', 'name="Bob", color="red", n=100'],
        ["name='Bob', n=1", "n=1", 'name="Bob"', 'n=1, name=""'],
    ),
    "python of optional ones": (
        {
            "type": "json_schema",
            "style": "pythonic",
            "json_schema": {"properties": {"a": {}, "b": {"type": "null"}, "c": {"type": "integer"}}},
        },
        ["", "b=null", "a=1, c=3", "c=3"],
        ["c=3, a=1", ", a=1", "a=1,"],
    ),
    "python of anything": (
        {"type": "json_schema", "style": "pythonic", "json_schema": {}},
        ["", "a=1, b='x', c={'a': [None, True]}", 'a="x"'],
        ["a", "1=1", "a=b"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_formats_take_what_they_say_and_nothing_else(vocabulary, name):
    format_, texts, not_these = CASES[name]
    lark = lark_of(vocabulary, format_)
    for special in (True, False):
        for text in [*texts, *not_these]:
            assert accepts(vocabulary, lark, text, special) == (text in texts), (text, lark)


def test_definitions_are_formats_by_name(vocabulary):
    def judged(format_, definitions):
        tag = {"format": format_, "definitions": definitions}
        return judge(StructuredOutputs("structural_tag", json.dumps(tag)), vocabulary)

    ref = {"type": "ref", "name": "n"}
    lark = judged({"type": "sequence", "elements": [tag(ref), ref]}, {"n": NUMBER}).lark
    assert accepts(vocabulary, lark, "<a>5</a>7") and not accepts(vocabulary, lark, "<a>x</a>7") and lark.count("%json") == 1
    for definitions, message in (
        ({}, "format.name: 'n' is no definition"),
        ({"n": TEXT}, "format.name: 'n' is no definition"),
        ({"n": tag(ref)}, "definitions.n.content.name: 'n' refers to itself"),
        ({"n": {"type": "regex", "pattern": "("}}, "definitions.n.pattern: "),
    ):
        assert message in judged(ref, definitions).error


def test_the_end_of_an_output_is_no_token_of_a_grammar(vocabulary):
    lark = lark_of(vocabulary, tag(TEXT, "<s>", "</s>"))
    assert accepts(vocabulary, lark, "<s>struck</s>") and f"<[{TOKENIZER.token_to_id('</s>')}]>" not in lark


@pytest.mark.parametrize(
    ("format_", "message"),
    [
        ({}, "format: Object missing required field `type`"),
        ({"type": "token", "token": 5}, "format.type: Invalid value 'token' is not a type that is supported; any_text, const"),
        (
            {"type": "sequence", "elements": [TEXT, {**TEXT, "max_tokens": 5}]},
            "format.elements[1]: Object contains unknown field `max_tokens`",
        ),
        ({"type": "sequence", "elements": [TEXT, const("a")]}, "format: nothing may follow"),
        (
            {"type": "or", "elements": [NUMBER, {"type": "sequence", "elements": []}]},
            "format.elements[1].elements must not be empty",
        ),
        ({"type": "star", "content": TEXT}, "format.content: an any_text"),
        (tag({"type": "regex", "pattern": "("}), "format.content.pattern: "),
        (tag({"type": "regex", "pattern": ""}), "format.content.pattern: a regex must not be empty"),
        (tag({"type": "json_schema", "json_schema": 5}), "format.content.json_schema: a JSON Schema must be an object"),
        (
            tag({"type": "json_schema", "json_schema": {}, "style": "deepseek_xml"}),
            "format.content.style: Invalid enum value 'deepseek_xml'",
        ),
        (tag(TEXT, end=[]), "format.end must not be empty"),
        (triggered(triggers=["<g"]), "format.tags[0]: '<f=a>' must begin with exactly one of the triggers"),
        (triggered(triggers=["<f=", "<f"]), "format.tags[0]: '<f=a>' must begin with exactly one"),
        (triggered(triggers=[""]), "format.triggers must not be empty"),
        (triggered(tags=[{"begin": 5}]), "format.tags[0].begin: Expected `str`, got `int`"),
        (separated(tags=[]), "format.tags must not be empty"),
        ({"type": "repeat", "min": 3, "max": 2, "content": NUMBER}, "format: min must be"),
        ({"type": "qwen_xml_parameter", "json_schema": {"anyOf": [{}]}}, "format.json_schema: anyOf at the top"),
        (
            {"type": "json_schema", "style": "gemma4", "json_schema": {"properties": {"a": {"not": {}}}}},
            "format.json_schema: not of 'a' cannot be followed",
        ),
        (
            {"type": "json_schema", "style": "gemma4", "json_schema": {"properties": {"a": {"oneOf": [{}, {"type": "null"}]}}}},
            "format.json_schema: oneOf of 'a' cannot be followed",
        ),
        (
            {"type": "json_schema", "style": "pythonic", "json_schema": {"properties": {"a b": {}}}},
            "format.json_schema: a parameter of the name 'a b'",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_with_its_place(vocabulary, format_, message):
    error = judge(StructuredOutputs("structural_tag", json.dumps({"format": format_})), vocabulary).error
    assert message in error, error
