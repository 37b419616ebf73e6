"""Harmony, gpt-oss's format: its parser against openai-harmony's readings, its grammars, and conversations for its template."""

import json
import time

import pytest
from harmony_cases import READINGS, cases, harmony_tokenizer, ids_of, meaning, parse, summary, text_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_cases import every_cut

from quire.frontend.text.detokenizer import OutputText
from quire.frontend.text.harmony.messages import harmony_messages
from quire.frontend.text.harmony.parser import HarmonyParser
from quire.frontend.text.harmony.tokens import MARKERS, MARKS, is_harmony, marks_of, spelled
from quire.frontend.text.output_events import Arguments, Content, Markup, Reasoning, merged, source_of
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import SamplingParams

TOKENIZER = Tokenizer(harmony_tokenizer())
MARKED = marks_of(TOKENIZER.backend)
KEPT = json.loads(READINGS.read_text())


def marked(text):
    """A text with its markers as marks."""
    for marker, mark in MARKS.items():
        text = text.replace(marker, mark)
    return text


def text_of(ids, size):
    """The text of an output in the pieces in which its tokens come."""
    output = OutputText(TOKENIZER, SamplingParams())
    output.mark(MARKED)
    pieces = [output.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, output.push((), True)]


def check(pieces, **options):
    """Whole and in pieces: the same, with every character accounted for. Returns what a client gets."""
    text = "".join(pieces)
    whole, cut = parse([text], **options), parse(pieces, **options)
    assert "".join(map(source_of, whole)) == "".join(map(source_of, cut)) == spelled(text)
    assert summary(whole) == summary(cut)
    shown = [merged([e for e in events if not isinstance(e, Markup)]) for events in (whole, cut)]
    assert [type(event) for event in shown[0]] == [type(event) for event in shown[1]]
    return summary(whole)


# ---------------------------------------------------------------------------------------------------------- the oracle
def test_outputs_mean_what_openai_harmony_reads():
    compared = 0
    for pieces, reading in zip(cases(), KEPT, strict=True):
        ids = ids_of(pieces)
        found = check(text_of(ids, 1))
        assert found == check(text_of(ids, 7)), pieces
        wanted = meaning(reading["messages"])
        if reading["problem"] is None:
            compared += 1
            wanted = {**wanted, **{kind: "\n".join(wanted[kind]) for kind in ("reasoning", "content")}}
            assert found == wanted, pieces
        else:  # what it read before it gave up; here the rest is read, too
            for kind in ("reasoning", "content"):
                assert found[kind].startswith("\n".join(wanted[kind])), pieces
            assert found["calls"][: len(wanted["calls"])] == wanted["calls"], pieces
    assert compared > 700


def test_an_end_that_the_engine_leaves_out_changes_nothing():
    """A stop token's text is not part of the output."""
    for pieces, reading in zip(cases(), KEPT, strict=True):
        if reading["problem"] is None and pieces[-1] in ("<|return|>", "<|call|>") and "<|message|>" in pieces[-3:-1]:
            assert check(text_of(ids_of(pieces), 3)) == check(text_of(ids_of(pieces[:-1]), 3)), pieces


CASES = [
    ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello!", "hm", "Hello!", []),
    ("<|channel|>final<|message|>Hel", "", "Hel", []),
    ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', "", "", [["f", '{"a": 1}']]),
    (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", "", [["f", "{}"]]),
    ("<|channel|>analysis to=functions.f code<|message|>", "", "", [["f", "{}"]]),
    ("<|channel|>commentary to=f<|message|>{}", "", "", [["f", "{}"]]),
    ("<|channel|>commentary to=user<|message|>x", "", "x", []),
    ("<|channel|>commentary to=functions.<|message|>x", "", "x", []),
    ("<|channel|>analysis to=python code<|message|>1+1<|call|>", "1+1", "", []),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}",
        "",
        "I look.",
        [["f", "{}"]],
    ),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>", "a\nb", "", []),
    (
        "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
        "",
        "a\nc",
        [],
    ),
    ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b", "a", "b", []),  # no start
    ("<|channel|>analysis<|message|>a<|end|><|start|>final<|message|>b", "a", "b", []),  # no role
    ("<|channel|>analysis<|message|>a<|end|><|message|>b", "a", "b", []),
    ("<|channel|>other<|message|>a", "", "a", []),
    ("<|message|>a", "", "a", []),
    ("Just text", "", "Just text", []),
    ("y" * 5000, "", "y" * 5000, []),
    ("<|channel|>anal", "", "", []),
    (" to=functions.f<|chan", "", "", []),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assis", "a", "", []),
    ("", "", "", []),
    (" ", "", "", []),
]


@pytest.mark.parametrize(("text", "thought", "content", "calls"), CASES)
def test_messages_at_every_cut(text, thought, content, calls):
    for pieces in every_cut(marked(text)) if len(text) < 1000 else [[text]]:
        assert check(pieces) == {"reasoning": thought, "content": content, "calls": calls}, pieces


def test_calls_without_tools_are_content():
    text = marked('<|channel|>commentary to=functions.f<|message|>{"a": 1}')
    assert check(list(text), takes_calls=False) == {"reasoning": "", "content": '{"a": 1}', "calls": []}


def test_an_answer_that_the_prompt_has_begun_goes_on():
    assert check(list("and on" + MARKS["<|return|>"]), in_final=True) == {"reasoning": "", "content": "and on", "calls": []}


def test_markers_in_ordinary_tokens_are_text():
    ids = [*ids_of(["<|channel|>", "final", "<|message|>"]), *text_ids("a <|end|> b")]
    assert check(text_of(ids, 1))["content"] == "a <|end|> b"
    with_marker = [*ids, TOKENIZER.backend.token_to_id("<|end|>"), *text_ids("c")]
    assert check(text_of(with_marker, 2))["content"] == "a <|end|> b\nc"


def test_half_a_character_before_a_marker_is_replaced():
    ids = [*ids_of(["<|channel|>", "final", "<|message|>"]), *text_ids("✓")[:2], TOKENIZER.backend.token_to_id("<|end|>")]
    for size in (1, 2, 9, 99):
        assert check(text_of(ids, size))["content"] == "\ufffd"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*MARKS.values()] * 2
            + ["analysis", "final", "commentary", " to=functions.f", "json", " ", "{}", "assistant", "user", "<|end|>", "é"]
        )
    ),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
def test_no_text_loses_a_character(parts, size, takes_calls, in_final):
    text = "".join(parts)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    check(pieces or [""], takes_calls=takes_calls, in_final=in_final)


@pytest.mark.parametrize("filling", ["a", MARKS["<|channel|>"], MARKS["<|start|>"], "<|end|>", " "])
def test_large_outputs_take_linear_time(filling):
    for head in ("", marked("<|channel|>analysis<|message|>")):
        text = head + filling * (200_000 // len(filling))
        began = time.process_time()
        events = parse([text[i : i + 4] for i in range(0, len(text), 4)])
        assert time.process_time() - began < 5
        assert "".join(map(source_of, events)) == spelled(text)


def test_texts_come_as_they_are_written():
    parser = HarmonyParser(new_id=lambda: "id")
    assert not parser.never_reasoned
    parser.feed(marked("<|channel|>analysis<|message|>"))
    assert parser.feed("hm") == [Reasoning("hm")] and not parser.never_reasoned
    assert parser.feed(marked("<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>"))[-1].name == "f"
    assert parser.feed('{"a') == [Arguments(0, '{"a', '{"a')]
    parser = HarmonyParser()
    parser.feed(marked("<|channel|>final<|message|>"))
    assert parser.feed("so") == [Content("so")] and parser.never_reasoned


# --------------------------------------------------------------------------------------------------------- conversations
def test_conversations_for_the_template():
    call = lambda id, name: {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}  # noqa: E731
    result = lambda id: {"role": "tool", "tool_call_id": id, "content": id}  # noqa: E731
    user = {"role": "user", "content": "u"}
    calls = {
        "role": "assistant",
        "content": "I look.",
        "thinking": "hm",
        "reasoning_content": "hm",
        "tool_calls": [call("1", "f"), call("2", "g")],
    }
    found = harmony_messages(
        [
            {"role": "system", "content": "S"},
            {"role": "developer", "content": "D"},
            user,
            calls,
            result("1"),
            result("2"),
            {"role": "system", "content": "later"},
            {"role": "assistant", "thinking": "cut off"},
        ]
    )
    assert found == [
        {"role": "system", "content": "S\n\nD"},
        user,
        {"role": "assistant", "thinking": "hm\nI look.", "tool_calls": [call("1", "f")]},
        result("1"),
        {"role": "assistant", "tool_calls": [call("2", "g")]},
        result("2"),
        {"role": "user", "content": "<system>\nlater\n</system>"},
        {"role": "assistant", "content": "", "thinking": "cut off"},
    ]


def test_a_template_is_known_by_its_markers():
    assert is_harmony("<|start|>assistant<|channel|>final<|message|>")
    for template in ("", "<|im_start|>", "<|start|> <|message|>", "<|channel>thought<channel|>"):
        assert not is_harmony(template)
    assert set(MARKED.values()) == set(MARKS.values()) and len(MARKED) == len(MARKERS) == 7
