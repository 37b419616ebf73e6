"""StructuredOutputsParams, and the fields of a body that mean the same."""

import copy
import dataclasses
import json
import pickle

import msgspec
import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.frontend.http.api.bodies.schemas import CompletionRequest
from quire.frontend.http.api.bodies.structured import structured_outputs
from quire.frontend.http.protocol.errors import ApiError
from quire.ipc.sampling import check_against
from quire.ipc.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputs, check_grammar, nesting_depth

DEEP = json.loads('{"a":' * 65 + "1" + "}" * 65)
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"properties": {"b": {}}}}}}


def of(**fields) -> StructuredOutputs | None:
    """Without the name of the field."""
    wanted = structured_outputs(msgspec.convert({"prompt": "x", **fields}, CompletionRequest))
    return None if wanted is None else msgspec.structs.replace(wanted, field="")


def message(**arguments) -> StructuredOutputs:
    return StructuredOutputsParams(**arguments).to_message()


def test_each_kind_is_made_of_its_argument():
    assert message(json=SCHEMA) == StructuredOutputs("json", msgspec.json.encode(SCHEMA).decode())
    assert message(json=json.dumps(SCHEMA)).text == json.dumps(SCHEMA)
    assert message(choice=["a", "ü"]) == StructuredOutputs("choice", '["a","ü"]')
    assert message(regex="a+") == StructuredOutputs("regex", "a+")
    assert message(grammar="start: A") == StructuredOutputs("grammar", "start: A")
    assert message(json_object=True) == StructuredOutputs("json_object")
    assert message(structural_tag={"triggers": []}).kind == "structural_tag"
    assert SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")).grammar == StructuredOutputs("regex", "a")


KINDS = {
    "json": SCHEMA, "regex": "a+", "choice": ["a", "b"], "grammar": "start: A", "json_object": True,
    "structural_tag": '{"triggers": []}',
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_class_whose_attributes_are_what_was_given(kind):
    wanted: StructuredOutputsParams | None = StructuredOutputsParams(**{kind: KINDS[kind]})
    assert isinstance(wanted, StructuredOutputsParams) and dataclasses.is_dataclass(StructuredOutputsParams)
    assert {name: getattr(wanted, name) for name in KINDS} == {**dict.fromkeys(KINDS), kind: KINDS[kind]}
    assert (wanted.disable_any_whitespace, wanted.disable_additional_properties, wanted.whitespace_pattern) == (False,) * 2 + (
        None,
    )
    params = SamplingParams(structured_outputs=wanted)
    assert params.structured_outputs is wanted and params.clone().structured_outputs == wanted
    assert copy.deepcopy(wanted) == pickle.loads(pickle.dumps(wanted)) == wanted
    assert repr(wanted).startswith("StructuredOutputsParams(json=") and wanted != StructuredOutputsParams(regex="other")


def test_a_field_may_be_set_later_and_is_checked_when_it_is_sent():
    wanted = StructuredOutputsParams(choice=["a"])
    params = SamplingParams(structured_outputs=wanted)
    wanted.choice = ["b"]
    assert params.grammar == StructuredOutputs("choice", '["b"]')
    wanted.regex = "c"
    with pytest.raises(ValueError, match=r"exactly one of .*; got regex, choice"):
        check_against(params, vocab_size=10, max_logprobs=1)


def test_options_of_json_are_put_into_the_schema():
    tight = json.loads(message(json=SCHEMA, disable_any_whitespace=True).text)
    assert tight == {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    spaced = message(json_object=True, whitespace_pattern=" ?")
    assert json.loads(spaced.text) == {"type": "object", "x-guidance": {"whitespace_pattern": " ?"}}
    closed = json.loads(message(json=json.dumps(SCHEMA), disable_additional_properties=True).text)
    assert closed["additionalProperties"] is False and "additionalProperties" not in SCHEMA
    assert (
        closed["properties"]["a"]["items"]["additionalProperties"] is False
        and "additionalProperties" not in closed["properties"]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"json": {}, "regex": "a"}, {"json_object": False}, {"json": "{"}, {"structural_tag": "["},
        {"regex": "a", "disable_any_whitespace": True}, {"choice": ["a"], "whitespace_pattern": " "},
        {"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, {"json": "[" * 65 + "]" * 65}, {"regex": "(" * 65},
        {"json": {"default": float}},
    ],
    ids=lambda arguments: "-".join(arguments) or "none",
)  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments):
    with pytest.raises(ValueError, match="structured_outputs"):
        StructuredOutputsParams(**arguments)


def test_depth_counts_brackets_that_are_open_at_once():
    assert nesting_depth(StructuredOutputs("json", '{"a": ["[[[[", "\\"[", {}]}')) == 3
    assert nesting_depth(StructuredOutputs("regex", r"((a)\((b))")) == 2
    assert nesting_depth(StructuredOutputs("grammar", 'start: "((" (a | [b])')) == 2
    assert nesting_depth(StructuredOutputs("choice", "")) == 0
    for text in ('root ::= [^"(] | [\\](] ' + '"f(" a | ' * 70 + "([(])", 'start: /[^"]/ ' + '| "f(" a ' * 70 + "(/(/)"):
        assert nesting_depth(StructuredOutputs("grammar", text)) == 1  # a quotation mark in a class or a regex begins no text
    check_grammar(StructuredOutputs("grammar", "root ::= " + "[" * 200_000))  # and time is linear
    nested = SamplingParams(structured_outputs=StructuredOutputs("json", "[" * 65))
    with pytest.raises(ValueError, match=r"structured_outputs \(json\): brackets"):  # the core's own look at it
        check_against(nested, vocab_size=10, max_logprobs=1)


def test_a_budget_needs_to_know_where_thinking_ends():
    with pytest.raises(ValueError, match="thinking_token_budget needs"):
        check_against(SamplingParams(thinking_token_budget=5), vocab_size=10, max_logprobs=1)
    check_against(SamplingParams(thinking_token_budget=5, reasoning_end_token_ids=[1]), vocab_size=10, max_logprobs=1)


def test_fields_of_a_body():
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, "description": "y"}}
    assert of() is of(response_format={"type": "text"}) is None
    assert of(response_format=schema) == of(guided_json=SCHEMA) == of(structured_outputs={"json": SCHEMA})
    assert of(response_format={"type": "json_object"}) == StructuredOutputs("json_object")
    assert of(guided_regex="a") == of(structured_outputs={"regex": "a"}) == StructuredOutputs("regex", "a")
    assert of(guided_choice=["a"]).kind == "choice" and of(guided_grammar="start: A").kind == "grammar"
    tag = of(response_format={"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<a"]})
    assert json.loads(tag.text)["triggers"] == ["<a"]
    assert of(response_format={"type": "text"}, guided_regex="a").text == "a"
    # the same by both of vLLM's names, as guidance sends it, and by OpenAI's and vLLM's
    assert of(guided_grammar="start: A", structured_outputs={"grammar": "start: A"}) == StructuredOutputs("grammar", "start: A")
    assert of(response_format=schema, structured_outputs={"json": SCHEMA}) == of(guided_json=SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": DEEP},
                }
            },
            "response_format",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        of(**fields)
    assert (caught.value.status, caught.value.param) == (400, param) and param in str(caught.value.message)


def test_what_was_asked_for_knows_its_field():
    def field(**fields):
        return structured_outputs(msgspec.convert({"prompt": "x", **fields}, CompletionRequest)).name

    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert field(response_format=schema) == "response_format.json_schema.schema"
    assert field(response_format={"type": "structural_tag", "format": {"type": "any_text"}}) == "response_format"
    assert field(guided_regex="a") == "guided_regex"
    assert field(structured_outputs={"grammar": "a"}) == "structured_outputs.grammar"
    assert message(regex="a").name == "structured_outputs (regex)"
