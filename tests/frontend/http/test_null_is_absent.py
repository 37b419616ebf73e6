"""A field that is null means the same as one that is absent, in tools, messages and chosen tools; and names of tools."""

import asyncio

import fake_client as http
import pytest
from fake_client import CHAT, HELLO
from messages_cases import HERMES, PATH, SAID
from responses_cases import RESPONSES, create, refusal, said, serving

F = {"name": "f", "parameters": {"type": "object"}}
FLAT = {"type": "function", **F}
SHOW = HERMES + "{% for t in tools or [] %}{{ t.type }},{{ t.function.keys() | join }};{% endfor %}"


async def prompts(path: str, *bodies: dict) -> list[str]:
    """The prompts that the engine gets, and that it gets the same grammar each time."""
    async with serving(template=SHOW) as api:
        grammars = []
        for body in bodies:
            status, answer = await api.json("POST", path, body)
            assert status == 200, answer
            grammars.append(api.client.streams[-1].params.structured_outputs)
        assert grammars == grammars[:1] * len(grammars)
        return [said(api, i) for i in range(len(api.client.streams))]


@pytest.mark.parametrize(
    ("path", "with_null", "without"),
    [
        (CHAT, {"tools": [{"type": None, "function": F}]}, {"tools": [{"function": F}]}),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {**F, "strict": None}}]},
            {"tools": [{"type": "function", "function": F}]},
        ),
        (
            CHAT,
            {"tools": [{"type": "custom", "custom": {"name": "c", "format": None}, "function": None}]},
            {"tools": [{"type": "custom", "custom": {"name": "c"}}]},
        ),
        (
            CHAT,
            {"tools": [{"function": {"name": "f", "parameters": {"type": None}}}], "tool_choice": "required"},
            {"tools": [{"function": {"name": "f", "parameters": {}}}], "tool_choice": "required"},
        ),
        (
            CHAT,
            {
                "tools": [{"type": "function", "function": F}],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": None, "tools": [FLAT | {"function": F}]}},
            },
            {"tools": [{"type": "function", "function": F}]},
        ),
        (
            RESPONSES,
            {"input": "a", "tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": None, "tools": [FLAT]}},
            {"input": "a", "tools": [FLAT]},
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": "a"}, {"type": "reasoning", "content": [{"type": None, "text": "hm"}]}]},
            {"input": [{"role": "user", "content": "a"}, {"type": "reasoning", "content": [{"text": "hm"}]}]},
        ),
    ],
)
def test_a_null_field_is_an_absent_one(path, with_null, without):
    same = HELLO if path == CHAT else {}
    first, second = asyncio.run(prompts(path, {**same, **with_null}, {**same, **without}))
    assert first == second


def test_an_assistants_message_needs_no_content():
    async def main():
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}]
        absent = [turns[0], {"role": "assistant"}, turns[2]]
        empty = [turns[0], {"role": "assistant", "content": ""}, turns[2]]
        for path, name, more in ((RESPONSES, "input", {}), (PATH, "messages", {"max_tokens": 5}), (CHAT, "messages", {})):
            shown = await prompts(path, *({name: messages, **more} for messages in (turns, absent, empty)))
            assert shown == shown[:1] * 3, path
        async with serving() as api:
            for content in ({"content": None}, {}):
                error = await refusal(api, {"input": [{"role": "user", **content}]})
                assert error["param"] == "input[0].content"
                body = {"max_tokens": 5, **SAID, "messages": [{"role": "user", **content}]}
                status, answer = await api.json("POST", PATH, body)
                assert status == 400 and answer["error"]["message"] == "messages[0].content: this field is required."

    asyncio.run(main())


def test_names_that_are_one_towards_the_model_are_refused():
    async def main():
        async with serving(template=SHOW) as api:
            space = {"type": "namespace", "name": "ns", "description": "d", "tools": [{**FLAT, "name": "g"}]}
            for tools, place in (
                ([{**FLAT, "name": "ns__g"}, space], "tools[1].tools[0].name"),
                ([space, {**FLAT, "name": "ns__g"}], "tools[1].name"),
            ):
                error = await refusal(api, {"input": "hi", "tools": tools})
                assert error["param"] == place and "'g' of 'ns'" in error["message"] and "'ns__g'" in error["message"]
            error = await refusal(api, {"input": "hi", "tools": [FLAT, FLAT]})
            assert error["param"] == "tools[1].name" and "two functions of the name 'f'" in error["message"]
            assert await create(api, {"input": "hi", "tools": [{**FLAT, "name": "g"}, space]})

    asyncio.run(main())


def test_a_tool_that_is_allowed_twice_is_allowed_once():
    async def main():
        twice = [{"type": "function", "function": {"name": "f"}}] * 2
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": twice}}
        api = http.Api(http.FakeClient(template=SHOW))
        tools = [{"type": "function", "function": F}, {"type": "function", "function": {"name": "g"}}]
        grammars = []
        for chosen in (choice, {**choice, "allowed_tools": {"mode": "required", "tools": twice[:1]}}):
            assert (await api.json("POST", CHAT, {**HELLO, "tools": tools, "tool_choice": chosen}))[0] == 200
            grammars.append(api.client.streams[-1].params.structured_outputs)
        assert grammars[0] == grammars[1] and grammars[0].text.count('"f"') == grammars[1].text.count('"f"')

    asyncio.run(main())


def test_a_background_response_is_queued_however_soon_it_ends():
    async def main():
        async with serving("done") as api:
            body = {"input": "hi", "background": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
            status, answer = await api.json("POST", RESPONSES, body)
            assert (status, answer["status"], answer["output"]) == (200, "queued", [])
            while (await api.json("GET", f"{RESPONSES}/{answer['id']}"))[1]["status"] != "completed":
                await asyncio.sleep(0)

    asyncio.run(main())
