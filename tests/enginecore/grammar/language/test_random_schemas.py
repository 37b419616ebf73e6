"""Random schemas of what llguidance claims of draft 2020-12: what comes out parses and validates, whatever the schema.

Features are those of the JSON Schema Test Suite's folders that its documentation names (docs/json_schema.md there). A schema
that cannot be compiled is refused; how many are is counted, for a compiler that refuses everything would pass.
"""

import json

import jsonschema
import pytest
from core_with_model import CoreWithModel
from hypothesis import HealthCheck, currently_in_test_context, event, given, settings
from hypothesis import strategies as st

from quire.ipc.messages.frontend import RequestError
from quire.ipc.sampling import SamplingParams
from quire.ipc.structured_outputs import StructuredOutputs

NAMES = st.sampled_from(["a", "b", "name", "x y", "ü", 'q"', "$id_"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.sampled_from(["", "a", "Ünï\n", '"', "\\", "null", 0.5, -1.25])
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(NAMES, v, max_size=2), max_leaves=3)


@st.composite
def numbers(draw) -> dict:
    schema: dict = {"type": draw(st.sampled_from(["integer", "number"]))}
    low, high = sorted(draw(st.tuples(st.integers(-50, 50), st.integers(-50, 50))))
    if draw(st.booleans()):
        schema["minimum"] = low
    elif draw(st.booleans()):
        schema["exclusiveMinimum"] = low
    if draw(st.booleans()):
        schema["maximum"] = high + 2
    elif draw(st.booleans()):
        schema["exclusiveMaximum"] = high + 2
    if schema["type"] == "integer" and draw(st.integers(0, 3)) == 0:
        schema = {"type": "integer", "multipleOf": draw(st.sampled_from([2, 5, 10]))}
    return schema


@st.composite
def texts(draw) -> dict:
    schema: dict = {"type": "string"}
    match draw(st.integers(0, 3)):
        case 0:
            schema["pattern"] = draw(st.sampled_from(["^[a-z]{1,4}$", "^\\d+-x$", "^(ab|c)+$", "[A-Z]", "^$"]))
        case 1:
            schema["format"] = draw(st.sampled_from(["date", "time", "date-time", "ipv4", "uuid", "email"]))
        case _:
            schema["minLength"] = draw(st.integers(0, 3))
            schema["maxLength"] = schema["minLength"] + draw(st.integers(0, 6))
    return schema


@st.composite
def arrays(draw, inner) -> dict:
    schema: dict = {"type": "array"}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    schema["items"] = draw(inner) if draw(st.integers(0, 3)) else False
    if schema["items"] is not False or "prefixItems" not in schema:
        schema["maxItems"] = draw(st.integers(2, 4)) if schema["items"] is not False else 0
        schema["minItems"] = draw(st.integers(0, 2)) if schema["items"] is not False else 0
    return schema


@st.composite
def objects(draw, inner) -> dict:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    schema = {"type": "object", "properties": properties, "required": required}
    match draw(st.integers(0, 5)):
        case 0:
            schema |= {"patternProperties": {"^p[0-9]$": draw(inner)}, "additionalProperties": False}
        case 4:
            schema |= {"propertyNames": {"enum": [*required, draw(NAMES)]}, "additionalProperties": draw(inner)}
        case 5:
            schema = {"allOf": [schema, {"type": "object"}], "unevaluatedProperties": False, "x-order": 1, "uniqueItems": False}
        case 1 if not properties:
            schema |= {"additionalProperties": draw(inner), "maxProperties": 1}
        case _:
            schema["additionalProperties"] = False
    return schema


@st.composite
def one_of(draw) -> dict:
    """Alternatives that exclude each other, as far as is claimed."""
    return {
        "oneOf": [{"type": "string", "const": draw(st.text("ab"))}, {"type": "integer", "minimum": draw(st.integers(0, 9))}]
    }


LEAVES = st.one_of(
    numbers(),
    texts(),
    st.builds(lambda v: {"const": v}, VALUES),
    st.builds(lambda v: {"enum": v}, st.lists(VALUES, min_size=1, max_size=4, unique_by=lambda v: json.dumps(v))),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]}, {"$ref": "#/$defs/named"}]),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        arrays(inner),
        objects(inner),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        one_of(),
        st.builds(lambda a: {"allOf": [a, {}]}, inner),
    ),
    max_leaves=5,
)


def check(engine: CoreWithModel, schema: dict, named: dict, seed: int) -> None:
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": {"named": named}}
    wanted = StructuredOutputs("json", json.dumps(whole))
    result = engine.run(
        "Some JSON:", SamplingParams(n=2, seed=seed, max_tokens=120, temperature=1.0, structured_outputs=wanted)
    )
    if isinstance(result, RequestError):
        assert result.code == "invalid" and result.message.startswith("structured_outputs (json): "), result
        return note("refused")
    for output in result:
        assert output.finished is not None
        note(f"ended by {output.finished.reason}")
        if output.finished.reason == "stop":
            jsonschema.Draft202012Validator(whole).validate(engine.json(output))
    return None


def note(what: str) -> None:
    if currently_in_test_context():
        event(what)


def _property(examples: int):
    def test(engine, schema, named, seed):
        check(engine, schema, named, seed)

    many = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=examples < 100)
    return many(given(schema=SCHEMAS, named=LEAVES.filter(lambda s: "$ref" not in s), seed=st.integers(0, 99))(test))


test_a_few_random_schemas_hold = _property(8)
test_random_schemas_hold = pytest.mark.slow(_property(400))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#"}, "b": {"type": "integer"}}, "required": ["b"], "additionalProperties": False},
        {"type": "string", "minLength": 3, "maxLength": 5},
        {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
        {"anyOf": [{"type": "integer", "minimum": 3}, {"const": {"ü": ["\\"]}}]},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_schemas_that_are_not_drawn_hold_too(engine, schema):
    check(engine, schema, {}, 1)
