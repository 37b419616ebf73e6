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
    ("hunyuan_a13b", None, "<think>\nhm\n</think>\n<answer>\nYes.\n</answer>", "\nhm\n", "Yes."),
    ("hunyuan_a13b", None, "<think>\n\n</think>\n<answer>\nA\nB</answer> more", "", "A\nB more"),
    ("hunyuan_a13b", False, "<answer>\nYes.\n</answer>", "", "Yes."),
    ("hunyuan_a13b", None, "<think>hm</think>Yes.\n</answer>", "hm", "Yes.\n</answer>"),  # no frame was opened
    ("hunyuan_a13b", None, "<think>hm</think> <answ", "hm", " <answ"),
    ("hunyuan_a13b", None, "<think>hm</think><answer>Yes\n</ans", "hm", "Yes\n</ans"),
    ("ernie45", True, "hm\n</think>\n\n\n<response>\nYes.\n</response>\n", "hm\n", "Yes.\n"),
    ("ernie45", True, "hm\n</think>\n\nYes.", "hm\n", "\n\nYes."),
    ("granite", None, "Here is my thought process:\nhm\nHere's my response: Yes.", "\nhm\n", " Yes."),
    ("granite", None, "Here is my answer.", "", "Here is my answer."),
    ("granite", None, "<think>hm</think><response>Yes</response>", "hm", "Yes"),
    ("cohere_command3", None, "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", "hm", "Yes"),
    ("cohere_command4", None, "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>", "hm", "Yes"),
    ("cohere_command3", None, "<|START_RESPONSE|>Yes<|END_RESPONSE|>", "", "Yes"),
    ("gemma4", None, "<|channel>thought\nhm<channel|>Yes", "hm", "Yes"),
    ("gemma4", None, "<|channel>thoughts<channel|>Yes", "thoughts", "Yes"),  # the label is a whole line
    ("gemma4", None, "<|channel>thou", "thou", ""),
    ("gemma4", False, "Yes <|channel>", "", "Yes <|channel>"),
    ("kimi_k2", None, "<think>hm</think>Yes", "hm", "Yes"),
    ("kimi_k2", True, "hm<|tool_calls_section_begin|>x", "hm", "<|tool_calls_section_begin|>x"),
    ("kimi_k2", True, " <|tool_calls_section_begin|>x", "", "<|tool_calls_section_begin|>x"),
    ("nemotron_v3", True, "hm\n</think>\nYes", "hm\n", "\nYes"),
    ("nemotron_v3", None, "hm</think>Yes", "hm", "Yes"),
    ("nemotron_v3", False, "Yes", "", "Yes"),
    ("mistral", None, "[THINK]hm[/THINK]Yes [THINK]", "hm", "Yes [THINK]"),
    ("seed_oss", None, "<seed:think>hm</seed:think>Yes", "hm", "Yes"),
    ("minimax_m2", True, "hm\n</think>\n\nYes", "hm\n", "\n\nYes"),
    ("minimax_m2_append_think", True, "hm\n</think>\n\nYes", "", "<think>hm\n</think>\n\nYes"),
    ("minimax_m2_append_think", False, "Yes", "", "Yes"),
    ("minimax_m2_append_think", None, "", "", ""),
]


def parse(parser, pieces):
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return merged(events), "".join(map(source_of, events)), "".join(e.text for e in events if isinstance(e, Reasoning))


@pytest.mark.parametrize(("name", "opened", "text", "thought", "content"), CASES)
def test_thoughts_at_every_cut(name, opened, text, thought, content):
    for pieces in every_cut(text):
        events, sources, found = parse(REASONING_PARSERS[name](opened), pieces)
        assert (found, summary(events)[0], sources) == (thought, content, text), pieces


@st.composite
def texts(draw):
    name = draw(st.sampled_from(sorted(REASONING_PARSERS)))
    parser = REASONING_PARSERS[name]
    parts = [
        *parser.tags(),
        *([parser.label] if parser.label else ()),
        "<",
        "th",
        " ",
        "\n",
        "<tool_call>",
        '{"name": "f"}',
        "</tool_call>",
    ]
    return name, "".join(draw(st.lists(st.sampled_from(parts))))


@settings(max_examples=400, deadline=None)
@given(texts(), st.sampled_from([None, True, False]), st.booleans(), st.integers(1, 5))
def test_no_text_loses_a_character(drawn, opened, with_tools, size):
    name, text = drawn
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


def test_calls_of_what_appends_its_thoughts():
    text = 'hm</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for pieces in every_cut(text):
        events, sources, _ = parse(OutputParser(REASONING_PARSERS["minimax_m2_append_think"](True), Hermes()), pieces)
        assert sources == text and summary(events) == ("<think>hm</think>\n", [("f", "{}")])


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


def test_what_a_prompt_says_in_other_tags():
    gemma, seed = REASONING_PARSERS["gemma4"], REASONING_PARSERS["seed_oss"]
    assert opened_by("<|turn>model\n<|channel>thought\n<channel|>", {}, None, gemma) is False
    assert opened_by("<|turn>model\n<think>", {}, None, gemma) is None
    assert opened_by("<seed:think>", {}, None, seed) is True
    assert opened_by("", {}, "<seed:think>Well", seed) is True and opened_by("", {}, "Well", seed) is False
