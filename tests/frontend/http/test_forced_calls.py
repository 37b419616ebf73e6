"""Calls that must be made, over HTTP: their grammar in the model's own format, or in JSON where no format is known."""

import asyncio
import json

import fake_client as http
import pytest
from chat_tools import CLOCK, NAMED, TOOLS, WEATHER, api_of, check_calls, params_of
from fake_client import CHAT


@pytest.mark.parametrize(
    ("output", "choice", "calls"),
    [
        ('{"city": "X"}', NAMED, [("weather", {"city": "X"})]),
        ('[{"name": "clock", "parameters": {}}]', "required", [("clock", {})]),
    ],
)
def test_calls_that_must_be_made_where_no_format_is_known(output, choice, calls):
    api = api_of(http.TEMPLATE, output)
    asyncio.run(check_calls(api, {"tool_choice": choice}, None, calls, "tool_calls"))


def tag_of(api):
    """The structural tag of the latest request: the format of the calls, and the arguments' schemas by the function's name."""
    grammar = params_of(api).structured_outputs
    assert grammar.kind == "structural_tag" and grammar.field == "tools"
    whole = json.loads(grammar.text)
    return whole["format"]["elements"][1], {name: f["json_schema"] for name, f in whole["definitions"].items()}


def test_required_and_named_become_a_tag_of_the_models_own_format():
    async def main():
        api, only_one = api_of(), {"at_least_one": True, "stop_after_first": True}
        clock = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}}
        cases = [
            ({"tool_choice": "required"}, ["weather", "clock"], {"at_least_one": True}),
            ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "clock"], only_one),
            ({"tool_choice": NAMED}, ["weather"], only_one),
            ({"tool_choice": NAMED, "parallel_tool_calls": True}, ["weather"], only_one),
            ({"tool_choice": clock}, ["clock"], {"at_least_one": True}),
        ]
        for fields, names, bounds in cases:
            await api.json("POST", CHAT, {**TOOLS, **fields})
            calls, schemas = tag_of(api)
            assert calls.items() >= {"triggers": ["<tool_call>"], **bounds}.items() and "excludes" not in calls
            assert ("stop_after_first" in calls) == (bounds is only_one)
            assert [tag["begin"] for tag in calls["tags"]] == [f'<tool_call>\n{{"name": "{n}", "arguments": ' for n in names]
            assert list(schemas) == names
        await api.json("POST", CHAT, {**TOOLS, "tool_choice": "required"})
        _, schemas = tag_of(api)
        lenient = {"x-guidance": {"lenient": True, "coerce_one_of": True}}
        place = {"$comment": "tools[0].function.parameters"}
        assert schemas["weather"] == {**place, **WEATHER["function"]["parameters"], **lenient}
        closed = {"type": "object", "properties": {}, "additionalProperties": False}
        assert schemas["clock"] == {"$comment": "tools[1].function.parameters", **closed, **lenient}
        await api.json("POST", CHAT, TOOLS)
        assert params_of(api).structured_outputs is None

    asyncio.run(main())


def test_required_and_named_become_a_schema_where_no_format_is_known():
    async def main():
        api = api_of(http.TEMPLATE, output="[]")
        for fields, most in (({}, 1), ({"parallel_tool_calls": False}, 1), ({"parallel_tool_calls": True}, None)):
            await api.json("POST", CHAT, {**TOOLS, "tool_choice": "required", **fields})
            schema = json.loads(params_of(api).structured_outputs.text)
            assert (schema["minItems"], schema.get("maxItems")) == (1, most)
        grammar = params_of(api).structured_outputs
        assert grammar.kind == "json" and grammar.field == "tools"
        assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "weather"}, {"const": "clock"}]
        assert schema["$defs"]["tool0"]["properties"]["city"] == {"$ref": "#/$defs/tool0/$defs/City"}
        closed = {"type": "object", "properties": {}, "additionalProperties": False}
        assert schema["$defs"]["tool1"] == {"$comment": "tools[1].function.parameters", **closed}
        await api.json("POST", CHAT, {**TOOLS, "tool_choice": NAMED})
        assert without_options(params_of(api).structured_outputs) == WEATHER["function"]["parameters"]
        assert params_of(api).structured_outputs.field == "tools[0].function.parameters"

    asyncio.run(main())


def without_options(grammar):
    return {key: value for key, value in json.loads(grammar.text).items() if key != "x-guidance"}


def test_what_cannot_be_followed_is_passed_over_unless_a_function_is_strict():
    """Then as with other servers: the call is made, and its arguments follow the rest of the schema."""

    async def main():
        by_tag, by_schema = api_of(), api_of(http.TEMPLATE, output="{}")
        strict = {"type": "function", "function": {**CLOCK["function"], "strict": True}}
        for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
            for tool, options in ((CLOCK, {"lenient": True, "coerce_one_of": True}), (strict, None)):
                body = {**TOOLS, "tools": [WEATHER, tool], "tool_choice": choice}
                await by_schema.json("POST", CHAT, body)
                assert json.loads(params_of(by_schema).structured_outputs.text).get("x-guidance") == options
                await by_tag.json("POST", CHAT, body)
                assert tag_of(by_tag)[1]["clock"].get("x-guidance") == options

    asyncio.run(main())


def test_a_call_that_must_be_made_goes_before_response_format():
    """instructor sends both; there will be no content that a format could be of. Other grammars are a contradiction."""

    async def main():
        person = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "object"}}}
        for api, kind in ((api_of(), "structural_tag"), (api_of(http.TEMPLATE, output="{}"), "json")):
            for fields in ({"response_format": person}, {"response_format": {"type": "json_object"}}):
                await api.json("POST", CHAT, {**TOOLS, "tool_choice": NAMED, **fields})
                grammar = params_of(api).structured_outputs
                assert grammar.kind == kind and "City" in grammar.text
            body = {**TOOLS, "tool_choice": NAMED, "structured_outputs": {"regex": "a"}}
            status, answer = await api.json("POST", CHAT, body)
            assert status == 400 and answer["error"]["param"] == "tool_choice"

    asyncio.run(main())
