"""Parsers of reasoning: what is thought and what is content, however the text is cut, alone and before a tool parser."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_cases import every_cut, summary

from quire.frontend.text.output_events import Reasoning, merged, source_of
from quire.frontend.text.output_parser import OutputParser
from quire.frontend.text.reasoning_parsers.choice import REASONING_PARSERS, opened_by, reasoning_parser_of
from quire.frontend.text.tool_parsers.hermes import Hermes

CASES = [
    ("deepseek_r1", None, "hm\n</think>\n\nYes.", "hm\n", "\n\nYes."),
    ("deepseek_r1", None, "<think>\nhm</think>Yes", "\nhm", "Yes"),
    ("deepseek_r1", None, "never ends </thin", "never ends </thin", ""),
    ("deepseek_r1", False, "Yes <think>no", "", "Yes <think>no"),
    ("deepseek_r1", True, "a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
    ("qwen3", None, "\n<think>\nhm\n</think>\n\nYes.", "\nhm\n", "\n\nYes."),
    ("qwen3", None, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    ("qwen3", None, " <thi", "", " <thi"),
    ("qwen3", None, "", "", ""),
    ("qwen3", True, "hm</think>Yes", "hm", "Yes"),
    ("qwen3", True, "<think>hm</think>Yes", "hm", "Yes"),
    ("qwen3", False, "<think>\n</think>Yes", "", "<think>\n</think>Yes"),
    ("qwen3", None, "<think>\n\n</think>\n\nYes", "", "\n\nYes"),  # an empty thought is markup
    ("qwen3", None, "<think>\n\n", "\n\n", ""),
]


def parse(parser, pieces):
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return merged(events), "".join(map(source_of, events)), "".join(e.text for e in events if isinstance(e, Reasoning))


@pytest.mark.parametrize(("name", "opened", "text", "thought", "content"), CASES)
def test_thoughts_at_every_cut(name, opened, text, thought, content):
    for pieces in every_cut(text):
        events, sources, found = parse(REASONING_PARSERS[name](opened), pieces)
        assert (found, summary(events)[0], sources) == (thought, content, text), pieces


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "th", " ", "\n", "<tool_call>", '{"name": "f"}', "</tool_call>"])),
    st.sampled_from([None, True, False]),
    st.sampled_from(sorted(REASONING_PARSERS)),
    st.booleans(),
    st.integers(1, 5),
)  # fmt: skip
def test_no_text_loses_a_character(parts, opened, name, with_tools, size):
    text = "".join(parts)
    make = lambda: OutputParser(REASONING_PARSERS[name](opened), Hermes() if with_tools else None)  # noqa: E731
    whole, sources, thought = parse(make(), [text])
    cut, cut_sources, cut_thought = parse(make(), [text[i : i + size] for i in range(0, len(text), size)])
    assert sources == cut_sources == text
    assert thought == cut_thought and summary(whole) == summary(cut)


def test_calls_come_behind_thoughts():
    text = 'a <tool_call> b</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for pieces in every_cut(text):
        events, _, thought = parse(OutputParser(REASONING_PARSERS["deepseek_r1"](), Hermes()), pieces)
        assert thought == "a <tool_call> b" and summary(events) == ("", [("f", "{}")])


def test_the_template_chooses_the_parser():
    assert reasoning_parser_of("{{ messages }}") is None
    assert reasoning_parser_of("<|im_start|> <think></think>") is REASONING_PARSERS["qwen3"]
    assert reasoning_parser_of("<｜Assistant｜><think></think>") is REASONING_PARSERS["deepseek_r1"]


@pytest.mark.parametrize(
    ("prompt", "variables", "continued", "opened"),
    [
        ("<assistant>\n", {}, None, None),
        ("<assistant>\n<think>\n", {}, None, True),
        ("<assistant>\n<think>\n", {"enable_thinking": False}, None, True),  # a template without such a switch
        ("<assistant>\n<think>\n\n</think>\n\n", {}, None, False),
        ("<user>what does <think> do?<assistant>\n", {}, None, None),
        ("<assistant>", {"enable_thinking": False}, None, False),
        ("<assistant>", {"thinking": False}, None, False),
        ("<assistant>", {"thinking": True}, None, None),
        ("<assistant>Well", {}, "Well", False),
        ("<assistant><think>Well", {}, "<think>Well", True),
        ("<assistant><think>Well</think>So", {}, "<think>Well</think>So", False),
    ],
)
def test_what_a_prompt_says(prompt, variables, continued, opened):
    assert opened_by(prompt, variables, continued) is opened
