"""What a chat template gets of a conversation in Anthropic's blocks; and blocks made of an output, however it is cut."""

import itertools
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from quire.frontend.http.api.messages.blocks import Blocks, Closed, Opened, Piece, content_of, input_of
from quire.frontend.http.api.messages.conversation import chat_messages
from quire.frontend.http.api.messages.request import chat_request
from quire.frontend.http.api.messages.schemas import MessagesRequest
from quire.frontend.text.output_parser import OutputParser
from quire.frontend.text.reasoning_parsers.qwen3 import Qwen3
from quire.frontend.text.tool_parsers.hermes import Hermes


def body_of(messages, **fields):
    return msgspec.json.decode(msgspec.json.encode({"max_tokens": 9, "messages": messages, **fields}), type=MessagesRequest)


def chat(messages, **fields):
    return chat_messages(body_of(messages, **fields))


def user(*content):
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def text(value, **more):
    return {"type": "text", "text": value, **more}


CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}, "caller": {"type": "direct"}}
CALLED = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bonn"}'}}


@pytest.mark.parametrize(
    ("messages", "fields", "expected"),
    [
        ([user("a")], {}, [user("a")]),
        ([user("a")], {"system": "S"}, [{"role": "system", "content": "S"}, user("a")]),
        ([user("a")], {"system": [text("x-anthropic-billing-header: cch=1;"), text("S", cache_control={"type": "ephemeral"}),
                                  text("T")]}, [{"role": "system", "content": "S\nT"}, user("a")]),
        ([user("a")], {"system": [text("x-anthropic-billing-header: cch=1;")]}, [user("a")]),
        ([user(text("a", citations=None))], {}, [user("a")]),
        ([user(text("a"), text("b"))], {}, [user(text("a"), text("b"))]),
        ([user("a"), user(text("b"))], {}, [user(text("a"), text("b"))]),
        ([{"role": "user", "content": []}], {}, [user("")]),
        ([user("a"), {"role": "system", "content": "now"}, {"role": "system", "content": [text("then")]}], {"system": "S"},
         [{"role": "system", "content": "S"}, user("a"), {"role": "system", "content": "now\n\nthen"}]),
        ([user("a"), {"role": "assistant", "content": [CALL]}, user({"type": "tool_result", "tool_use_id": "t1", "content": [
            {"type": "tool_reference", "tool_name": "f"}]})], {},  # Claude Code's ToolSearch
         [user("a"), {"role": "assistant", "content": "", "tool_calls": [CALLED]},
          {"role": "tool", "content": "The function f can be called now.", "tool_call_id": "t1", "name": "weather"}]),
        ([user("a"), {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "?"}, text("I "),
            text("look."), CALL]},
          user({"type": "tool_result", "tool_use_id": "t1", "content": [text("rain"), text("wind")]}, text("b"))], {},
         [user("a"), {"role": "assistant", "content": "I look.", "tool_calls": [CALLED], "reasoning_content": "hm"},
          {"role": "tool", "content": "rain\nwind", "tool_call_id": "t1", "name": "weather"}, user("b")]),
        ([user({"type": "tool_result", "tool_use_id": "t9", "content": "no", "is_error": True},
               {"type": "tool_result", "tool_use_id": "t"})], {},
         [{"role": "tool", "content": "Error: no", "tool_call_id": "t9"},
          {"role": "tool", "content": "", "tool_call_id": "t"}]),
        ([user("a"), {"role": "assistant", "content": "b"}, {"role": "assistant", "content": [text("c")]}], {},
         [user("a"), {"role": "assistant", "content": "b\n\nc"}]),
    ],
)  # fmt: skip
def test_blocks_become_messages(messages, fields, expected):
    assert chat(messages, **fields) == expected


def test_a_last_message_of_the_assistants_is_continued():
    prefill = {"role": "assistant", "content": "The answer is ("}
    assert chat_request(body_of([user("a"), prefill])).continue_final_message
    assert not chat_request(body_of([user("a"), prefill, user("b")])).continue_final_message


def test_tools_become_functions():
    tool = {"name": "f", "description": "F.", "input_schema": {"type": "object"}, "strict": True, "input_examples": [{"a": 1}],
            "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True, "allowed_callers": ["direct"]}  # fmt: skip
    request = chat_request(body_of([user("a")], tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}))
    function = {"name": "f", "description": "F.", "parameters": {"type": "object", "examples": [{"a": 1}]}, "strict": True}
    assert request.tools == [{"type": "function", "function": function}]
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)


def test_a_long_conversation_takes_linear_time():
    """Turns of one role become one: what is quadratic in them would copy gigabytes."""
    one = [{"role": "user", "content": "x" * 500}] * 16_000
    assert len(chat(one)[0]["content"]) == 16_000
    both = [{"role": "assistant", "content": [text("x" * 500)]}] * 16_000
    assert len(chat(both)[0]["content"]) == 16_000 * 502 - 2


# -------------------------------------------------------------------------------------------------------------- blocks
OUTPUTS = [
    "<think>\nhm\n</think>\n\nYes.",
    '<think>a</think>Look: <tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>\n then',
    '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"b": "unfin',
    " \n ",
    "",
    "no thought <think>",
]


def blocks_of(pieces, **options):
    blocks = Blocks(OutputParser(Qwen3(), Hermes({"f": {}, "g": {}}, new_id=lambda: "id")), **options)
    steps = [step for piece in pieces for step in blocks.feed(piece)]
    return steps + blocks.finish()


@settings(deadline=None)
@given(st.sampled_from(OUTPUTS), st.lists(st.integers(0, 100)))
def test_the_same_blocks_however_the_output_is_cut(output, cuts):
    ends = sorted({min(cut, len(output)) for cut in (0, *cuts, len(output))})
    steps = blocks_of(output[a:b] for a, b in itertools.pairwise(ends))
    assert content_of(steps) == content_of(blocks_of([output]))
    opened = None
    for step in steps:  # one block after the other, counted from 0
        match step:
            case Opened():
                assert opened is None
                opened = step.index
            case Piece():
                assert step.index == opened and step.text
            case Closed():
                assert step.index == opened
                opened = None
    assert opened is None and [s.index for s in steps if isinstance(s, Opened)] == list(range(len(content_of(steps))))


def test_calls_beyond_one_are_left_out():
    (call,) = content_of(blocks_of([OUTPUTS[2]], max_calls=1))
    assert (call.name, bytes(call.input)) == ("f", b"{}")


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.recursive(st.integers() | st.text() | st.booleans() | st.none(), st.lists)), st.data())
def test_an_input_that_breaks_off_is_what_the_client_makes_of_it(value, data):
    """Anthropic's client reads a stream's input as far as it is complete; an answer in one piece holds just that."""
    whole = json.dumps(value)
    cut = whole[: data.draw(st.integers(1, len(whole)))]
    assert json.loads(input_of(whole)) == value
    assert json.loads(input_of(cut)) == from_json(cut.encode(), partial_mode=True)


@pytest.mark.parametrize("text", ["", "[1]", "oops", '{"a": NaN}', "[" * 10_000, '"', "}{"])
def test_an_input_is_an_object_whatever_the_model_wrote(text):
    assert input_of(text) == "{}"
