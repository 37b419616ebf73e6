"""Strict functions and forced calls in every format: the parser reads whatever the grammar admits, and all arguments are valid.

Outputs are random walks through the grammar, by tokens of mostly single bytes, that like to begin calls and to end things.
"""

import json
import random

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance.numpy import fill_next_token_bitmask
from tool_cases import FORMATS, summary
from toy_tokenizers import byte_level

from quire.enginecore.grammar.language.texts import to_lark
from quire.enginecore.grammar.trial import judge
from quire.enginecore.grammar.vocabulary import Vocabulary, make_vocabulary
from quire.frontend.http.api.tools.tool_grammar import tool_grammar
from quire.frontend.http.api.tools.tool_use import Function, ToolUse
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS

# How calls begin, in all ways that a format knows; and, in the second row, what is like it and none.
BEGINNINGS = {
    "Hermes": ["<tool_call>\n", "Hm.<tool_call>\n"],
    "Llama3Json": ['{"name": "', '<|python_tag|>{"name": "', "{", "{ ", ' {"'],
    "Mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_CALLS]f.1"],
    "Nemotron": ["<TOOLCALL>[", '<TOOLCALL>[{"', "Hm.<TOOLCALL>["],
    "Granite": ["<|tool_call|>[", "<tool_call>[", '<tool_call>\n{"'],
    "DeepSeekV3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"],
    "Qwen3Coder": ["<tool_call>\n<function=", "<function=", "<tool_call>\n<function=f.1>\n<parameter="],
    "Apertus": ['<|tools_prefix|>[{"'],
    "CohereCommand": ["<|START_ACTION|>[", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "'],
    "FunctionGemma": ["<start_function_call>call:", "<start_function_call>call:f.1{"],
    "Gemma4": ["<|tool_call>call:", "Hm.<|tool_call>call:f.1{"],
    "GigaChat3": ["function call<|role_sep|>\n", "Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>"],
    "Glm45": ["<tool_call>", "<tool_call>f.1\n<arg_key>"],
    "Granite20bFC": ["<function_call> "],
    "Hunyuan": ["<tool_calls>", '<tool_calls>[{"name": "', "<tool_calls><tool_call>"],
    "HyV3": ["<tool_calls>", "<tool_calls>\n<tool_call>f.1<tool_sep>\n<arg_key>"],
    "KimiK2": ["<|tool_calls_section_begin|>", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f.1:0"],
    "Lfm2": ["<|tool_call_start|>[", "<|tool_call_start|>[f.1(", "Hm.<|tool_call_start|>[g("],
    "Longcat": ["<longcat_tool_call>\n"],
    "MiniMaxM2": ["<minimax:tool_call>\n", '<minimax:tool_call>\n<invoke name="f.1">\n<parameter name="'],
    "Olmo3": ["<function_calls>\n", "<function_calls>\nf.1("],
    "Phi4Mini": ["functools[", "<|tool_call|>[", "functools is"],
    "Xlam": ['[{"name": "', "```json\n[{", "Hm.<tool_call>[", "[TOOL_CALLS]["],
    "Pythonic": ["[f_1(", "[f.1(", "[", "<|python_start|>[", "[g("],
}
NAMES = ["a", "b", "name", "ü", "x-y"]
TEXTS = st.sampled_from(["", "x", "</parameter>", "\n", "null", "5", 'q"', "\\", "True", "ü✓"])
LEAVES = st.one_of(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {},
            {"type": "string", "maxLength": 3},
            {"type": "string", "minLength": 1, "maxLength": 2},
            {"$ref": "#/$defs/named"},
            {"type": "string", "pattern": "^[a-c]+$"},
            {"type": "number", "minimum": -5, "maximum": 7},
            {"type": ["integer", "string"]},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
            {"type": "string", "format": "date"},
            {"anyOf": [{"$ref": "#/$defs/named"}, {"type": "null"}]},
        ]
    ),
    st.builds(
        lambda v: {"enum": v, "type": "string"},
        st.lists(TEXTS.filter(lambda t: "</" not in t), min_size=1, max_size=3, unique=True),
    ),
    st.builds(
        lambda v: {"enum": v}, st.lists(st.one_of(st.integers(-9, 9), TEXTS, st.none()), min_size=1, max_size=3, unique_by=repr)
    ),
    st.builds(lambda v: {"const": v}, TEXTS),
)


def objects(inner):
    return st.builds(
        lambda properties, some: {
            "type": "object",
            "properties": properties,
            "required": [name for name, wanted in zip(properties, some, strict=False) if wanted],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
    )


PARAMETERS = objects(
    st.recursive(
        LEAVES, lambda v: objects(v) | st.builds(lambda i: {"type": "array", "items": i, "maxItems": 2}, v), max_leaves=3
    )
)
NAMED = st.sampled_from(
    [{"type": "string", "enum": ["red", "green"]}, {"type": "integer"}, {"type": "object", "properties": {}}]
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return make_vocabulary(byte_level().to_str().encode(), 512)


def functions_of(schema: dict, named: dict) -> list[Function]:
    return [
        Function("f.1", {**schema, "$defs": {"named": named}}, True, "tools[0].function"),
        Function("g", {"type": "object", "properties": {}}, False, "tools[1].function"),
    ]


def walk(vocabulary: Vocabulary, lark: str, begin: str, seed: int) -> tuple[str, bool]:
    """A text that the grammar admits, and whether it may end there. begin: as much of it as the grammar takes."""
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = []
    for token in vocabulary.tokenizer.greedy_tokenize(begin):
        if not matcher.validate_tokens([token]):
            break
        assert matcher.consume_token(token)
        ids.append(token)
    rng, mask = random.Random(seed), np.zeros((1, vocabulary.num_words), np.int32)
    while len(ids) < 400 and not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits((mask[0] & vocabulary.known).view(np.uint8), bitorder="little"))
        if matcher.is_accepting() and (rng.random() < 0.1 or not len(allowed)):
            break
        ids.append(rng.choices(allowed.tolist(), [weight(vocabulary, i) for i in allowed])[0])
        assert matcher.consume_token(ids[-1])
    return vocabulary.tokenizer.decode_bytes(ids).decode(errors="replace"), matcher.is_accepting()


def weight(vocabulary: Vocabulary, token: int) -> float:
    text = vocabulary.tokenizer.decode_bytes([token])
    return 5.0 if text in b'"}])<>/\n,' else 0.5 if text.isalnum() and text.isascii() else 0.02


def read(name: str, functions: list[Function], pieces) -> list:
    parser = TOOL_PARSERS[name]({f.name: f.parameters for f in functions}, new_id=lambda: "id")
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def check(name: str, use: ToolUse, text: str, is_whole: bool) -> None:
    functions = use.functions
    whole = summary(read(name, functions, [text]))
    assert summary(read(name, functions, list(text))) == whole
    if use.mode != "auto" and is_whole:
        only_one = use.mode == "named" or use.parallel is False
        assert len(whole[1]) == 1 if only_one else whole[1], text
        assert not whole[0] or not only_one, text
    schemas = {f.name: f.parameters for f in functions}
    for i, (called, arguments) in enumerate(whole[1]):
        assert called in schemas, (text, called)
        if is_whole or i + 1 < len(whole[1]):
            value = json.loads(arguments)
            assert isinstance(value, dict)
            if called == "f.1":
                jsonschema.validate(value, schemas[called])


# What a request may ask of its calls. Under "auto" the same functions are strict or not; g never is.
USES = [("auto", None), ("required", None), ("required", False), ("named", None)]
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def check_walks(vocabulary, name, asked, schema, named, seed, num_walks) -> None:
    (mode, parallel), functions = asked, functions_of(schema, named)
    use = ToolUse(mode, functions[:1] if mode == "named" else functions, parallel)
    beginnings = BEGINNINGS[TOOL_PARSERS[name].__name__]
    try:
        wanted = tool_grammar(use, TOOL_PARSERS[name])
        lark = to_lark(wanted, vocabulary.special_names)
    except (ApiError, ValueError) as error:
        assert "cannot" in str(error) or "none of" in str(error) or "can be" in str(error), error
        return
    if judge(wanted, vocabulary).error:
        return
    for i in range(num_walks):
        begin = beginnings[(seed + i) % len(beginnings)] if i % 4 else ""
        check(name, use, *walk(vocabulary, lark, begin, seed + i))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=8, derandomize=True, **COMMON)
@given(st.sampled_from(USES), PARAMETERS, NAMED, st.integers(0, 1 << 30))
def test_what_the_grammar_admits_the_parser_reads_and_is_valid(vocabulary, name, asked, schema, named, seed):
    check_walks(vocabulary, name, asked, schema, named, seed, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=300, **COMMON)
@given(st.sampled_from(USES), PARAMETERS, NAMED, st.integers(0, 1 << 30))
def test_much_of_what_the_grammars_admit(vocabulary, name, asked, schema, named, seed):
    check_walks(vocabulary, name, asked, schema, named, seed, 8)
