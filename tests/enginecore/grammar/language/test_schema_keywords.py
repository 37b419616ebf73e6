"""Keywords that llguidance does not know: said otherwise where that is the same, refused by name where it is not."""

import itertools
import json

import jsonschema
import llguidance
import pytest
from toy_tokenizers import byte_level

from quire.enginecore.grammar.trial import judge
from quire.enginecore.grammar.vocabulary import make_vocabulary
from quire.ipc.structured_outputs import StructuredOutputs

VOCABULARY = make_vocabulary(byte_level().to_str().encode(), 512)


def verdict(schema):
    return judge(StructuredOutputs("json", json.dumps(schema)), VOCABULARY)


def accepts(lark: str, value: object) -> bool:
    """In some order of its keys."""
    orders = map(dict, itertools.permutations(value.items())) if isinstance(value, dict) else [value]
    return any(_accepts(lark, json.dumps(order)) for order in orders)


def _accepts(lark: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(VOCABULARY.tokenizer, lark, log_level=0)
    return all(map(matcher.consume_token, VOCABULARY.tokenizer.greedy_tokenize(text))) and matcher.is_accepting()


OBJECTS = [
    dict(zip(names, values, strict=True))
    for n in range(3)
    for names in itertools.combinations(["a", "b", "bc", "d"], n)
    for values in itertools.product([1, "x"], repeat=n)
]
INTEGER = {"type": "integer"}
A, B = {"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": INTEGER}}
SAID_OTHERWISE = {
    "names of an enum": {"propertyNames": {"enum": ["a", "bc", 5]}, "additionalProperties": INTEGER},
    "names of a reference": {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "string", "const": "b"}}},
    "names of several": {"propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}, "properties": {"d": {}, "b": INTEGER}},
    "names of a pattern": {"propertyNames": {"pattern": "^b", "format": "uuid"}, "additionalProperties": INTEGER},
    "names of a length": {"propertyNames": {"minLength": 2, "title": "x"}},
    "any names": {"propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
    "no names": {"propertyNames": {"type": "integer"}},
    "names of two that must be there": {"propertyNames": {"enum": ["a", "b"]}, "required": ["b", "a"], "minProperties": 2},
    "unevaluated": {**A, "unevaluatedProperties": False},
    "unevaluated, of a type": {**B, "unevaluatedProperties": INTEGER},
    "an intersection": {"allOf": [A, {"$ref": "#/$defs/b"}], "unevaluatedProperties": False, "$defs": {"b": B}},
    "what bounds nothing": {
        **A, "uniqueItems": False, "unevaluatedProperties": True, "then": {"required": ["b"]},
        "minContains": 2, "dependentRequired": {}, "not": False,
    },
    "a condition of nothing": {**A, "if": B},
    "an alternative that is none": {"anyOf": [{"not": {}}, A]},
}  # fmt: skip


@pytest.mark.parametrize("schema", SAID_OTHERWISE.values(), ids=list(SAID_OTHERWISE))
def test_what_is_said_otherwise_is_the_same(schema):
    schema = {"type": "object", **schema}
    found = verdict(schema)
    assert not found.error
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    assert [accepts(found.lark, value) for value in OBJECTS] == list(map(is_valid, OBJECTS))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"propertyNames": {"minLength": 2, "pattern": "^a"}}, "propertyNames"),
        ({"propertyNames": {"format": "date"}}, "propertyNames"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}}, "propertyNames"),
        ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": {}}}, "propertyNames"),
        ({"anyOf": [A, B], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"allOf": [{"anyOf": [A, B]}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"allOf": [A], "unevaluatedProperties": INTEGER}, "unevaluatedProperties"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"not": A}, "not"),
        ({"if": A, "then": B}, "if"),
    ],
)
def test_what_cannot_be_said_exactly_is_refused_by_its_name(schema, keyword):
    assert f'"{keyword}"' in verdict({"type": "object", **schema}).error


@pytest.mark.parametrize(
    "address",
    [
        "http://json-schema.org/schema#",
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft/2020-12/schema",
        "https://spec.openapis.org/oas/3.1/dialect/base",
    ],
)
def test_metaschemas_may_have_other_addresses(address):
    assert accepts(verdict({"$schema": address, "items": {**INTEGER, "$schema": address}, "type": "array"}).lark, [5])


TREE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"n": {}}, "additionalProperties": False}}}


@pytest.mark.parametrize(
    "beside",
    [{"x-order": 1}, {"deprecated": True}, {"nullable": True, "example": {}}, {"type": "object"}, {"type": ["object", "null"]}],
    ids=str,
)
@pytest.mark.parametrize("again", [{"$ref": "#/$defs/node"}, {"anyOf": [{"$ref": "#/$defs/node"}]}], ids=str)
def test_what_says_nothing_may_stand_beside_what_leads_back_to_itself(beside, again):
    TREE["$defs"]["node"]["properties"]["n"] = {**again, **beside}
    found = verdict(TREE)
    assert not found.error
    assert accepts(found.lark, {"n": {"n": {}}}) and not accepts(found.lark, {"n": 1})


PETS = {
    "$ref": "#/$defs/pet",
    "$defs": {
        "pet": {"discriminator": {"propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
        "cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "of": {"$ref": "#/$defs/pet"}}},
        "dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "lone": {"$ref": "#/$defs/cat"}}},
    },
}


def test_alternatives_require_what_their_discriminator_names_even_if_it_has_a_default():
    found = verdict(PETS)
    assert not found.error
    cat = {"kind": "cat"}
    values = [cat, {"kind": "wolf"}, {"kind": "cat", "of": {"kind": "cat", "of": {"kind": "dog"}}}, {"kind": "dog", "lone": {}}]
    for value in values:
        assert accepts(found.lark, value) and jsonschema.Draft202012Validator(PETS).is_valid(value), value
    for value in ({}, {"of": cat}, {"kind": "cow"}, {"kind": "cat", "of": {}}, {"kind": "dog", "lone": {"of": {}}}):
        assert not accepts(found.lark, value), value


@pytest.mark.parametrize("pattern", ["^(?!x)a$", r"^(a)\1$", r"\bfoo\b", "[^]", r"^a\Z", "("])
def test_patterns_and_types_that_are_none_are_passed_over_where_that_is_wanted(pattern):
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}, "b": {"type": ["float", "null"]}}, "required": ["a"]}
    assert verdict(schema).error.startswith(("at #/properties/a: ", "at #/properties/b: "))
    found = verdict({**schema, "type": "object", "x-guidance": {"lenient": True}})
    assert accepts(found.lark, {"a": "anything", "b": 1.5}) and not accepts(found.lark, {"a": 1})


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf", "propertyNames"])
def test_references_in_all_directions_end(keyword):
    parts = [{"$ref": f"#/$defs/{i}"} for i in range(12)]
    inner = {"anyOf": parts} if keyword == "propertyNames" else {"type": "object", keyword: parts}
    schema = {"propertyNames": parts[0]} if keyword == "propertyNames" else parts[0]
    if keyword == "allOf":
        inner["unevaluatedProperties"] = False
    assert verdict({**schema, "$defs": {str(i): inner for i in range(12)}}).error
