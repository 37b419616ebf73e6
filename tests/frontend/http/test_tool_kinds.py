"""Tools that are not functions: namespaces, custom tools, and those that an API's own servers run, through all three routes."""

import asyncio
import json
import logging
import typing

import fake_client as http
import pytest
from fake_client import CHAT, HELLO
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseInputItem, Tool
from responses_cases import HERMES, both, create, said, serving
from tool_cases import every_cut

from quire.frontend.http.api.responses.items import PASSED_OVER, completed_items
from quire.frontend.http.api.responses.messages import messages_of
from quire.frontend.http.api.responses.tools import chat_tools
from quire.frontend.http.api.tools import left_out
from quire.frontend.http.api.tools.left_out import is_left_out
from quire.frontend.text.custom_calls import CustomInput

MESSAGES = "/v1/messages"
SHOW = HERMES + "{% for t in tools or [] %}({{ t.function.name }}|{{ t.function.description }}){% endfor %}"
ECHO = {"type": "function", "name": "echo", "description": "Echo.", "parameters": {"type": "object"}, "strict": False}
SPACE = {"type": "namespace", "name": "mcp__box", "description": "A box.", "tools": [ECHO, {**ECHO, "name": "open"}]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in (
        ("mcp__box__echo", '{"a": 1}'),
        ("apply_patch", '{"input": "*** Begin\\n✓ \\u00e9"}'),
        ("echo", "{}"),
    )
)


def types_of(union) -> set[str]:
    """The values of `type` in a union of the openai package."""
    union = typing.get_args(union)[0] if typing.get_origin(union) is typing.Annotated else union
    kinds = set()
    for member in typing.get_args(union):
        text = str(member.model_fields["type"].annotation)
        kinds |= set(text.split("'")[1::2])
    return kinds


def test_every_kind_of_item_and_tool_of_the_openai_package_is_known():
    own = {"message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"}
    assert types_of(ResponseInputItem) <= PASSED_OVER | own | {"item_reference"} and not PASSED_OVER & own
    assert {kind for kind in types_of(Tool) if not is_left_out(kind)} == {"function", "custom", "namespace"}
    for kind in ("computer-preview", "web_search_20250305", "bash_20250124", "memory_20250818", "mcp_toolset"):
        assert is_left_out(kind)
    for kind in ("custom", "function", "computers", "robot", None, 5):
        assert not is_left_out(kind)


def test_namespaces_and_custom_tools_are_functions_to_the_model():
    async def main():
        async with serving(CALLS, SHOW) as api:
            body = {"input": "hi", "tools": [SPACE, {"type": "web_search"}, PATCH, ECHO]}
            answer, events = await both(api, body)
            shown = said(api)
            assert "(mcp__box__echo|A box.\n\nEcho.)(mcp__box__open|Echo.)(apply_patch|Patch.\n\n" in shown
            assert "Lark grammar:\nstart: /.+/)(echo|Echo.)" in shown
            first, second, third = answer["output"]
            assert (first["type"], first["namespace"], first["name"]) == ("function_call", "mcp__box", "echo")
            assert json.loads(first["arguments"]) == {"a": 1}
            assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n✓ é")
            assert (third["name"], "namespace" in third) == ("echo", False)
            assert [tool["type"] for tool in answer["tools"]] == ["namespace", "web_search", "custom", "function"]
            deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
            done = [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"]
            assert len(deltas) > 5 and done == ["".join(deltas)] == ["*** Begin\n✓ é"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "open"}, "mcp__box__open"),
        ({"type": "function", "name": "echo"}, "echo"),
        ({"type": "function", "name": "echo", "namespace": "mcp__box"}, "mcp__box__echo"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]}, "apply_patch"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__box"}]}, "mcp__box__open"),
    ],
)
def test_a_tool_of_any_kind_can_be_chosen(choice, name):
    async def main():
        async with serving(CALLS, SHOW) as api:
            answer = await create(api, {"input": "hi", "tools": [SPACE, PATCH, ECHO], "tool_choice": choice})
            assert answer["tool_choice"] == choice
            if choice["type"] == "allowed_tools":
                assert f"({name}|" in said(api) and "(echo|" not in said(api)
            forced = api.client.streams[-1].params.structured_outputs.text
            assert name in forced and ("apply_patch" in forced) == (name == "apply_patch")

    asyncio.run(main())


def test_what_they_did_is_in_the_history():
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '"a"\n'}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"}
    other = {"type": "function_call", "call_id": "c2", "namespace": "mcp__box", "name": "echo", "arguments": "{}"}
    local = [
        {"type": "local_shell_call", "call_id": "c3", "action": {}},
        {**output, "type": "function_call_output", "call_id": "c3"},
    ]
    search = {"type": "web_search_call", "id": "w", "status": "completed", "action": {}}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "content": None}
    items = completed_items([{"role": "user", "content": "hi"}, sealed, search, *local, call, output, other], {}, "resp_x")
    kinds = ["message", "reasoning", "custom_tool_call", "custom_tool_call_output", "function_call"]
    assert [item["type"] for item in items] == kinds and items[2]["id"] == "ctc_x_in5"
    _, custom, result, function = messages_of(items, None, False)
    assert custom["tool_calls"] == [{"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": '"a"\n'}}]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "Done"}
    assert function["tool_calls"][0]["function"]["name"] == "mcp__box__echo"
    shown = http.make_tokenizer(template="{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}").render_chat([custom])
    function = {"name": "apply_patch", "arguments": {"input": '"a"\n'}}
    assert json.loads(shown) == [{"id": "c1", "type": "function", "function": function}]


def test_long_names_keep_their_ends():
    space = {**SPACE, "name": "n" * 100, "tools": [{**ECHO, "name": "f" * 60}]}
    tools = chat_tools([space])
    (tool,) = tools.tools
    assert tool["function"]["name"] == "n" * 66 + "__" + "f" * 60
    assert tools.name_of(tool["function"]["name"]) == ("f" * 60, "n" * 100)


def test_types_that_are_left_out_are_said_once(caplog):
    async def main():
        async with serving(template=SHOW) as api:
            tools = [{"type": "web_search_preview_2025_03_11"}, {"type": "mcp", "server_label": "x"}]
            with caplog.at_level(logging.WARNING, "quire.http"):
                for _ in range(3):
                    await create(api, {"input": "hi", "tools": tools})
                    await create(api, {"input": "hi", "tools": [*tools, ECHO]})
            assert "(echo|Echo.)" in said(api) and "tools]" not in said(api, -2)

    before = len([kind for kind in left_out.said() if kind in ("mcp", "web_search_preview_2025_03_11")])
    asyncio.run(main())
    lines = [record.message for record in caplog.records if record.message.startswith("left out")]
    assert len(lines) == 2 - before and len(set(lines)) == len(lines)


def test_custom_tools_of_chats():
    async def main():
        client = http.FakeClient(template=SHOW)
        client.OUTPUT = CALLS
        api = http.Api(client)
        grammar = {"syntax": "regex", "definition": "a|b"}
        custom = {"name": "apply_patch", "description": "Patch.", "format": {"type": "grammar", "grammar": grammar}}
        body = {**HELLO, "tools": [{"type": "custom", "custom": custom}, {"type": "function", "function": {"name": "echo"}}]}
        status, answer = await api.json("POST", CHAT, body)
        assert status == 200, answer
        _, call, other = answer["choices"][0]["message"]["tool_calls"]
        assert call["custom"] == {"name": "apply_patch", "input": "*** Begin\n✓ é"} and call["type"] == "custom"
        assert other["function"] == {"name": "echo", "arguments": "{}"}
        events = await api.events(CHAT, body)
        parts = [c for e in events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", []) if c["index"] == 1]
        assert parts[0]["custom"] == {"name": "apply_patch", "input": ""} and parts[0]["type"] == "custom"
        assert "".join(part["custom"]["input"] for part in parts) == "*** Begin\n✓ é"
        forced = {**body, "tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}}}
        assert (await api.json("POST", CHAT, forced))[0] == 200
        grammar = client.streams[-1].params.structured_outputs
        assert grammar is not None and "^(?:a|b)$" in grammar.text
        back = [
            *HELLO["messages"],
            answer["choices"][0]["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "x"},
        ]
        assert (await api.json("POST", CHAT, {**body, "messages": back}))[0] == 200
        for wrong in (
            5,
            {"name": "a b"},
            {"name": "f", "format": {"type": "grammar", "grammar": {}}},
            {"name": "f", "description": 5},
        ):
            status, answer = await api.json("POST", CHAT, {**HELLO, "tools": [{"type": "custom", "custom": wrong}]})
            assert status == 400 and answer["error"]["param"].startswith("tools[0].custom"), answer

    asyncio.run(main())


def test_tools_and_blocks_of_anthropics_servers():
    async def main():
        api = http.Api(http.FakeClient(template=SHOW))
        tools = [{"type": kind, "name": kind} for kind in ("web_search_20250305", "bash_20250124", "computer_20250124")]
        tools += [{"type": "mcp_toolset", "mcp_server_name": "x"}, {"name": "f", "input_schema": {"type": "object"}}]
        server = [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "So."},
        ]
        body = {
            "model": "tiny",
            "max_tokens": 5,
            "tools": tools,
            "mcp_servers": [{"type": "url", "name": "x", "url": "http://x"}],
            "thinking": {"type": "enabled", "budget_tokens": 4},
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": server},
                {"role": "user", "content": "b"},
            ],
        }
        status, answer = await api.json("POST", MESSAGES, body)
        assert status == 200, answer
        assert said(api).startswith("<user>a<assistant>So.<user>b[1 tools]")
        for thinking in ({"type": "adaptive"}, {"type": "disabled"}):
            assert (await api.json("POST", MESSAGES, {**body, "thinking": thinking, "tools": tools[:4]}))[0] == 200
        assert "tools]" not in said(api)

    asyncio.run(main())


TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\/\n\t{}u'), max_size=12)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.booleans(), st.integers(1, 7))
def test_an_input_is_decoded_at_every_cut(text, ascii_only, size):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader = CustomInput()
    pieces = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
    assert "".join(pieces) + reader.finish() == text


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("*** Begin Patch\n", "*** Begin Patch\n"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        (' { "input" : "x" , "more": "y"}', "x"),
        ('{"input": "x', "x"),
        ('{"input": "x\\u00', "x"),
        ('{"input": "\\ud83d\\ude00\\ud83d\\u0041\\ude00\\/"}', "😀\ufffdA\ufffd/"),
        ('{"inp', ""),
        ("", ""),
    ],
)
def test_arguments_of_another_shape_are_the_input(arguments, given):
    for pieces in every_cut(arguments):
        reader = CustomInput()
        assert "".join([reader.feed(piece) for piece in pieces]) + reader.finish() == given, pieces
