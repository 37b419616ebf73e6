"""Marks of prompts: where they lie in a text and in its tokens, and that each route sends them."""

import asyncio

import fake_client as http
import pytest
from msgspec.structs import replace

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.prompt_marks import places, render_marked

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
WANTS_A_USER = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + PLAIN
COUNTS = "{{ messages | length }}" + PLAIN
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
ANSWER, MARKED = {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Go on", "cache_control": True}

CONTROL = {"cache_control": {"type": "ephemeral"}}
FILE, TASK = {"type": "text", "text": "A file.", **CONTROL}, {"type": "text", "text": "Count its words."}
PARTS = {"role": "user", "content": [FILE, TASK, {**TASK, **CONTROL}]}


@pytest.mark.parametrize(
    ("messages", "has_tools", "expected"),
    [
        ([USER], False, []),
        ([USER], True, [0]),
        ([SYSTEM, USER], False, [1]),
        ([SYSTEM, USER, ANSWER, USER], False, [1, 3]),
        ([SYSTEM, MARKED, ANSWER, MARKED], False, [1, 3, 4, 2]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, USER],
            False,
            [1],
        ),
        ([SYSTEM, PARTS, ANSWER], False, [1, 2, (1, 1)]),
        ([MARKED] * 20, False, [19, 20, 18, 17, 16, 15, 14, 13]),
        ("no messages", True, []),
    ],
)
def test_places_are_few_and_known(messages, has_tools, expected):
    assert places(messages, has_tools) == expected


def marked(template, messages, at, **options):
    text, ends = render_marked(ChatTemplate(template, {}), messages, at, **options)
    assert text == ChatTemplate(template, {}).render(messages, **options)
    return [text[:end] for end in ends]


def test_a_mark_is_what_the_template_renders_for_the_messages_so_far():
    conversation = [SYSTEM, USER, ANSWER, USER]
    system = "<system>Be brief."
    assert marked(PLAIN, conversation, [1, 3]) == [system, system + "<user>Hi<assistant>Hello"]
    assert marked(PLAIN, conversation, []) == []


OF_PARTS = PLAIN.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}|{% endfor %}")


@pytest.mark.parametrize(("template", "shown"), [(PLAIN, "A file.\n"), (OF_PARTS, "A file.|")])
def test_a_mark_within_a_message_is_where_its_other_parts_begin(template, shown):
    conversation = [SYSTEM, PARTS, ANSWER, USER]
    before = marked(template, conversation, [1])[0]
    assert marked(template, conversation, [(1, 1)]) == [f"{before}<user>{shown}"]
    other = [SYSTEM, {"role": "user", "content": [FILE, {"type": "text", "text": "Sum it up."}]}]
    assert marked(template, other, [(1, 1)]) == [f"{before}<user>{shown}"]


def test_a_template_that_wants_a_user_has_the_mark_before_what_he_says():
    assert marked(WANTS_A_USER, [SYSTEM, USER], [1]) == ["<system>Be brief.<user>"]


def test_what_is_no_prefix_of_the_whole_is_no_mark():
    assert marked(COUNTS, [SYSTEM, USER, ANSWER, USER], [1, 3]) == []


def test_tokens_that_reach_beyond_a_mark_are_not_counted():
    tokenizer = http.make_tokenizer()  # a token a byte
    text = "<system>Grüße.<user>Hi"
    ids, marks = tokenizer.encode_marked(text, False, [14, len(text), 11])
    assert ids == tokenizer.encode(text, False)
    assert marks == (len(text[:14].encode()), len(ids), len(text[:11].encode()))
    long = "x" * 3000 + text  # is tokenized without the interpreter's lock
    assert tokenizer.encode_marked(long, False, [3014])[1] == (3000 + marks[0],)


CHAT = {"model": "tiny", "messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Go on"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/api/chat": {**CHAT, "stream": False},
    "/v1/responses": {"model": "tiny", "instructions": "Be brief.", "input": CHAT["messages"][1:]},
    "/v1/messages": {"model": "tiny", "max_tokens": 50, "system": "Be brief.", "messages": CHAT["messages"][1:]},
}


def sent_marks(path, body, takes_marks=True):
    async def main():
        api = http.Api()
        welcome = api.client.welcome
        api.client.welcome = replace(welcome, limits=replace(welcome.limits, takes_marks=takes_marks))
        status, answer = await api.json("POST", path, body)
        assert status == 200, answer
        [stream] = api.client.streams
        return [api.client.tokenizer.decode(stream.ids[:mark]).encode() for mark in stream.options["marks"]]

    return asyncio.run(main())


@pytest.mark.parametrize("path", BODIES)
def test_each_route_marks_the_system_prompt_and_the_turns_before_the_last(path):
    found = sent_marks(path, BODIES[path])
    assert found == [b"<system>Be brief.", b"<system>Be brief.<user>Hi<assistant>Hello"]


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_without_states_gets_none(path):
    assert sent_marks(path, BODIES[path], takes_marks=False) == []


def test_cache_control_marks_the_end_of_its_message():
    asked = [{"type": "text", "text": "Hi", **CONTROL}]
    messages = [{"role": "user", "content": asked}, ANSWER, {"role": "user", "content": "More"}, ANSWER, USER]
    found = sent_marks("/v1/messages", {"model": "tiny", "max_tokens": 50, "messages": messages})
    assert found == [b"<user>Hi", b"<user>Hi<assistant>Hello<user>More<assistant>Hello"]


def test_cache_control_within_a_message_marks_what_is_before_the_next_block():
    found = sent_marks(
        "/v1/messages", {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": [FILE, TASK]}]}
    )
    assert found == [b"<user>A file.\n"]
