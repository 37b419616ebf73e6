"""What /v1/responses makes of its input: items to messages, fields that are refused, any JSON at all."""

import asyncio
import json

import fake_client as http
import openai
import pytest
from fake_client import FakeClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from responses_cases import HERMES, RESPONSES, create, refusal, said, serving
from responses_fields import FIELDS

from quire.frontend.http.api.responses.items import completed_items, item_id, response_of_item, sealed, unsealed
from quire.frontend.http.api.responses.messages import is_unfinished, messages_of
from quire.frontend.http.api.responses.request import ResponsesRequest
from quire.frontend.http.protocol.errors import ApiError

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
DEEP = json.loads("[" * 100 + "]" * 100)
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def messages(items, instructions=None, knows_developer=False):
    return messages_of(completed_items(items, {}, "resp_x"), instructions, knows_developer)


# --------------------------------------------------------------------------------------------------------- to messages
def test_messages_of_every_kind():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages("hi", "be brief") == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    developer = {"type": "message", "role": "developer", "content": "x"}
    assert messages([developer]) == [{"role": "system", "content": "x"}]
    assert messages([developer], knows_developer=True) == [{"role": "developer", "content": "x"}]
    said = [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}]
    refused = [{"type": "refusal", "refusal": "no"}]
    assert messages([{"role": "assistant", "content": said}, {"role": "assistant", "content": refused}]) == [
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "no"},
    ]


def test_what_a_model_says_in_one_turn_is_one_message():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    other = {**call, "id": "c2"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    text = {"role": "assistant", "content": "I look."}
    assert messages([USER, THOUGHT, text, CALL, {**CALL, "call_id": "c2"}, OUTPUT, THOUGHT, text]) == [
        USER,
        {"role": "assistant", "reasoning_content": "hm", "content": "I look.", "tool_calls": [call, other]},
        result,
        {"role": "assistant", "reasoning_content": "hm", "content": "I look."},
    ]
    assert messages([THOUGHT, CALL]) == [
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call], "content": None}
    ]  # fmt: skip
    assert messages([THOUGHT, USER]) == [{"role": "assistant", "reasoning_content": "hm", "content": ""}, USER]
    summary = {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert messages([summary, text])[0]["reasoning_content"] == "in short"


def test_items_are_completed_and_named():
    items = completed_items([USER, {**CALL, "id": "fc_7", "status": "incomplete"}], {}, "resp_abc_d")
    assert items[0] == {
        "id": "msg_abc_d_in0", "type": "message", "status": "completed", "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    }  # fmt: skip
    assert (items[1]["id"], items[1]["status"]) == ("fc_7", "incomplete")
    for number in (0, "in3"):
        assert response_of_item(item_id("resp_abc_d", "message", number)) == "resp_abc_d"
    assert response_of_item("nonsense") == "resp_"


def test_an_unfinished_message_is_gone_on_with():
    async def main():
        async with serving() as api:
            half = {"role": "assistant", "content": "Once upon", "status": "incomplete"}
            assert is_unfinished(completed_items([USER, half], {}, "resp_x"))
            await create(api, {"input": [USER, half]})
            assert said(api) == "<user>hi<assistant>Once upon"
            await create(api, {"input": [USER, {**half, "status": "completed"}]})
            assert said(api).endswith("<assistant>Once upon<assistant>")

    asyncio.run(main())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_thoughts_are_sealed_and_unsealed(thought):
    assert unsealed(sealed(thought), "x") == thought


def test_tools_and_calls_are_shown_to_the_model():
    async def main():
        async with serving(template=HERMES) as api:
            tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
            await create(api, {"input": [USER, CALL, OUTPUT], "tools": [tool]})
            assert said(api) == "<user>hi<assistant><tool>42[1 tools]<assistant>"

    asyncio.run(main())


def test_verbosity_and_effort_reach_the_template():
    async def main():
        async with serving(template=http.TEMPLATE + "{{ verbosity }}-{{ reasoning_effort }}") as api:
            body = {"input": "hi", "text": {"verbosity": "low"}, "reasoning": {"effort": "high"}}
            answer = await create(api, body)
            assert said(api).endswith("low-high") and answer["reasoning"] == {"effort": "high", "summary": None}

    asyncio.run(main())


def test_truncation_leaves_out_the_oldest_turns():
    async def main():
        async with serving() as api:
            turns = [{"role": role, "content": f"{i}" * 20} for i in range(8) for role in ("user", "assistant")]
            body = {"input": [{"role": "system", "content": "S"}, *turns[:-1]], "max_output_tokens": 50}
            assert (await refusal(api, body))["code"] == "context_length_exceeded"
            await create(api, {**body, "truncation": "auto"})
            prompt = said(api)
            assert prompt.startswith("<system>S<user>") and prompt.endswith("<user>" + "7" * 20 + "<assistant>")
            assert len(prompt) <= 150 and len(prompt) + 57 > 150  # one turn more would not have fitted
            fits = {"input": "hi", "truncation": "auto"}
            assert (await create(api, fits))["truncation"] == "auto" and said(api) == "<user>hi<assistant>"
            assert (await refusal(api, {"input": "x" * 300, "truncation": "auto"}))["code"] == "context_length_exceeded"

    asyncio.run(main())


def test_the_prompts_tokens_are_counted():
    async def main():
        async with serving() as api:
            answer = await create(api, {"input": "hi", "instructions": "S"})
            counted = await api.json("POST", f"{RESPONSES}/input_tokens", {"input": "hi", "instructions": "S"})
            assert counted == (200, {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]})
            assert len(api.client.streams) == 1

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ([{}], "input[0].type"),
        ([{"type": ["message"]}], "input[0].type"),
        ([{"type": "nonsense_call", "id": "x"}], "input[0].type"),
        ([{"type": "web_search_call", "id": "x"}], "input"),
        ([USER, {"role": "robot", "content": "x"}], "input[1].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text", "text": 5}]}], "input[0].content[0].text"),
        ([{**CALL, "arguments": {}}], "input[0].arguments"),
        ([{"type": "function_call", "call_id": "c"}], "input[0].name"),
        ([OUTPUT], "input"),
        ([CALL, {**OUTPUT, "output": 5}], "input[1].output"),
        ([{**THOUGHT, "content": "hm"}], "input[0].content"),
        ([{**THOUGHT, "content": [{"type": "summary_text", "text": ""}]}], "input[0].content[0]"),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}], "input"),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "quire1.é"}], "input[0].encrypted_content"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
        ([{"id": 5}], "input[0].id"),
        ([{"id": "x" * 300, **USER}], "input[0].id"),
        ([{"status": "done", **USER}], "input[0].status"),
        ([{"type": "item_reference", "id": f"msg_{i}"} for i in range(65)], "input"),
        ([5], "input[0]"),
        (5, "input"),
        (None, "input"),
    ],
)
def test_items_that_are_wrong_are_named(items, param):
    async def main():
        async with serving() as api:
            assert (await refusal(api, {"input": items}))["param"] == param
            assert not api.client.streams

    asyncio.run(main())


def test_refused_fields_get_a_400_that_names_them():
    async def main():
        async with serving() as api:
            for field in FIELDS:
                if field.treatment == "refused":
                    error = await refusal(api, {"input": "hi", field.name: {"some": ["value"]}})
                    assert error["param"] == field.name and field.name in error["message"], error
                    await create(api, {"input": "hi", field.name: None})
            assert all(stream.ids == api.client.streams[0].ids for stream in api.client.streams)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "robot"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}, {"type": "custom", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [
            {"type": "function", "name": "f"}, {"type": "function", "name": "g", "parameters": []}]}]},
         "tools[1].tools[1].parameters"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"x": DEEP}}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "image_generation"}],
          "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "image_generation"}]}},
         "tool_choice.tools[0]"),
        ({"tools": [{"type": "function", "name": "f"}],
          "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "n"}]}},
         "tool_choice.tools[0]"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [{"type": "function", "name": "None"}], "tool_choice": {"type": "allowed_tools", "tools": [5]}},
         "tool_choice.tools[0]"),
        ({"tools": [{"type": "function", "name": "f"}],
          "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
         "tool_choice.tools[0]"),
        ({"include": ["everything"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1000}, "input"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"truncation": "middle"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"previous_response_id": "resp_no"}, "previous_response_id"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"request_id": "a b"}, "request_id"),
        ({"model": 5}, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_granted_is_named(body, param):
    async def main():
        async with serving(template=HERMES) as api:
            assert (await refusal(api, {"input": "hi", **body}))["param"] == param
            assert not api.client.streams

    asyncio.run(main())


def test_an_empty_text_is_a_message_as_in_chats():
    async def main():
        async with serving() as api:
            status, answer = await api.json("POST", RESPONSES, {"input": ""})
            assert status == 200, answer
            _, shown = await api.json("GET", f"{RESPONSES}/{answer['id']}/input_items", None)
            assert [item["content"][0]["text"] for item in shown["data"]] == [""]

    asyncio.run(main())


def test_another_model_is_not_there():
    async def main():
        async with serving() as api:
            assert (await api.ask("POST", RESPONSES, {"input": "hi", "model": "gpt-4"})).status == 404

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------- the table
def test_the_table_holds_every_field():
    names = [field.name for field in FIELDS]
    assert len(names) == len(set(names)) and set(names) == set(ResponsesRequest.__struct_fields__)
    sent = set(openai.types.responses.response_create_params.ResponseCreateParamsBase.__annotations__)
    assert len(sent) > 20 and sent - set(names) == set()


# ------------------------------------------------------------------------------------------------------- any JSON at all
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "c1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role", "id", "x"]), inner),
    max_leaves=6,
)
kinds = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "item_reference", "input_text", "output_text", "refusal"]
)
fields = st.sampled_from(
    ["role", "content", "text", "id", "status", "call_id", "name", "arguments", "output", "summary", "encrypted_content"]
)
some_items = st.dictionaries(fields, values | st.lists(st.fixed_dictionaries({"type": kinds, "text": values})), max_size=5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.builds(lambda item, kind: {**item, "type": kind}, some_items, kinds | values), max_size=4))
def test_any_items_are_taken_or_refused(items):
    try:
        messages_of(completed_items(items, {}, "resp_x"), None, False)
    except ApiError as error:
        assert error.status == 400 and error.param
        json.loads(error.body())


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(ResponsesRequest.__struct_fields__), values, max_size=4))
def test_any_fields_are_taken_or_refused(body):
    async def main():
        async with serving() as api:
            given = {"input": "hi", "store": False, **body}
            answer = await api.ask("POST", RESPONSES, json.dumps(given, allow_nan=True).encode())
            assert answer.status in (200, 400, 404), answer
            if answer.status == 200 and not given["input"]:
                assert FakeClient.OUTPUT in answer.body.decode()

    asyncio.run(main())
