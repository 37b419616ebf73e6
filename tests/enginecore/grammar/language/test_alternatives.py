"""Alternatives of a oneOf behind references: taken where they exclude each other, refused where they may not."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import byte_level

from quire.enginecore.grammar.language.alternatives import exclude_each_other, resolver
from quire.enginecore.grammar.trial import judge
from quire.enginecore.grammar.vocabulary import make_vocabulary
from quire.ipc.structured_outputs import StructuredOutputs


def tagged(tag, **more) -> dict:
    return {"type": "object", "properties": {"t": {"const": tag}, **more}, "required": ["t", *more]}


def ref(name: str) -> dict:
    return {"$ref": f"#/$defs/{name}"}


AB = [ref("a"), ref("b")]
APART = [
    {"oneOf": AB, "$defs": {"a": tagged("a"), "b": tagged("b", n={"type": "integer"})}},
    {"items": ref("ab"), "$defs": {"ab": {"oneOf": AB}, "a": tagged("a"), "b": tagged("b", more={"items": ref("ab")})}},
    {"oneOf": [ref("a"), tagged("b", more={"type": "array", "items": {"$ref": "#"}})], "$defs": {"a": tagged("a")}},
    {"oneOf": [{"type": "null"}, *AB], "$defs": {"a": {"type": "string"}, "b": {"type": ["integer", "boolean"]}}},
    {"oneOf": AB, "$defs": {"a": {"enum": ["x", 1]}, "b": {"enum": ["y", 2, None]}}},
    {"oneOf": AB, "anyOf": [{"type": "object"}], "$defs": {"a": tagged("a"), "b": tagged("b")}},
    {"oneOf": [ref("a"), {"oneOf": [ref("b"), ref("c")]}], "$defs": {name: tagged(name) for name in "abc"}},
    {"oneOf": AB, "$defs": {"a": {**tagged("a"), "additionalProperties": False}, "b": {"type": "object", "required": ["z"]}}},
    {"oneOf": AB, "$defs": {"a": tagged("a"), "b": {"allOf": [tagged("b")], "type": "object"}}},
    {"oneOf": [ref("a~1b"), ref("b%25")], "$defs": {"a/b": tagged("a"), "b%": tagged("b")}},
    {
        "type": "object",
        "required": ["k"],
        "oneOf": [{"properties": {"k": {"const": "a"}, "x": ref("a")}}, {"properties": {"k": {"const": "b"}}}],
        "$defs": {"a": tagged("a")},
    },
    {"oneOf": [ref(f"v{i}") for i in range(100)], "$defs": {f"v{i}": tagged(f"v{i}") for i in range(100)}},
]
MAY_OVERLAP = [
    {"oneOf": AB, "$defs": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    {"oneOf": AB, "$defs": {"a": tagged("a"), "b": tagged("a", n={"type": "integer"})}},
    {"oneOf": AB, "$defs": {"a": {**tagged("a"), "required": []}, "b": tagged("b")}},
    {"oneOf": AB, "$defs": {"a": tagged(1), "b": tagged(1.0)}},
    {"oneOf": AB, "$defs": {"a": {"properties": {"t": {"const": "a"}}}, "b": {"properties": {"t": {"const": "b"}}}}},
    {"oneOf": AB, "$defs": {"a": tagged("a"), "b": ref("b")}},
    {"oneOf": AB, "$defs": {"a": {"additionalProperties": False, "patternProperties": {"z": {}}}, "b": {"required": ["z"]}}},
    {"oneOf": AB, "$defs": {"a": {"$id": "x", "oneOf": [{"type": "null"}, ref("b")]}, "b": tagged("b")}},
]


@pytest.fixture(scope="module")
def error_of():
    vocabulary = make_vocabulary(byte_level().to_str().encode(), 512)
    return lambda schema: judge(StructuredOutputs("json", json.dumps(schema)), vocabulary).error


@pytest.mark.parametrize("schema", APART, ids=lambda schema: json.dumps(schema)[:60])
def test_alternatives_behind_references_are_taken_where_they_exclude_each_other(error_of, schema):
    assert error_of(schema) == ""


@pytest.mark.parametrize("schema", MAY_OVERLAP, ids=lambda schema: json.dumps(schema)[:60])
def test_alternatives_behind_references_are_refused_where_they_may_overlap(error_of, schema):
    assert error_of(schema)
    assert not exclude_each_other(schema, resolver(schema))


NAMES = st.sampled_from(["k", "m"])
VALUES = st.sampled_from(
    [None, True, 1, 1.0, "a", "b", [], {}, {"k": "a"}, {"k": 1}, {"m": 1}, {"k": "a", "m": "b"}, {"k": {}}]
)
SCHEMAS = st.recursive(
    st.one_of(
        st.builds(lambda v: {"const": v}, VALUES),
        st.builds(lambda v: {"enum": v}, st.lists(VALUES, min_size=1, max_size=3)),
        st.builds(lambda v: {"type": v}, st.sampled_from(["null", "integer", "number", "string", ["object", "null"]])),
        st.builds(ref, NAMES),
        st.booleans(),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda properties, required, rest: {"properties": properties, "required": required, **rest},
            st.dictionaries(NAMES, inner),
            st.lists(NAMES, unique=True),
            st.sampled_from([{"type": "object"}, {}, {"additionalProperties": False}]),
        ),
        st.builds(lambda key, parts: {key: parts}, st.sampled_from(["anyOf", "allOf", "oneOf"]), st.lists(inner, min_size=1)),
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(parts=st.lists(SCHEMAS, min_size=2, max_size=3), k=SCHEMAS, m=SCHEMAS, value=VALUES)
def test_no_value_matches_two_alternatives_that_are_said_to_exclude_each_other(parts, k, m, value):
    schema = {"oneOf": parts, "$defs": {"k": k, "m": m}}
    if exclude_each_other(schema, resolver(schema)):
        try:
            matching = [part for part in parts if _is_valid(value, {"allOf": [part], "$defs": schema["$defs"]})]
        except RecursionError:  # a reference to itself
            return
        assert len(matching) <= 1


def _is_valid(value, schema) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)
