"""Grammars of whole outputs in Harmony: what they admit is read as the answer or the call that was asked for.

Outputs are random walks through the grammar that like to end things, as of a model that knows nothing.
"""

import json
import random

import jsonschema
import llguidance
import msgspec
import numpy as np
import pytest
from harmony_cases import harmony_tokenizer, ids_of, parse, summary
from llguidance.numpy import fill_next_token_bitmask

from quire.enginecore.grammar.language.texts import to_lark
from quire.enginecore.grammar.trial import judge
from quire.enginecore.grammar.vocabulary import make_vocabulary
from quire.frontend.http.api.tools.harmony_grammar import harmony_grammar
from quire.frontend.http.api.tools.tool_use import Function, ToolUse
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.detokenizer import OutputText
from quire.frontend.text.harmony.tokens import marks_of
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import SamplingParams
from quire.ipc.structured_outputs import StructuredOutputs

TOKENIZER = Tokenizer(harmony_tokenizer())
MARKED = marks_of(TOKENIZER.backend)
CLOSING = ids_of(['\x00"}'])
ENDS = [TOKENIZER.backend.token_to_id(text) for text in ("<|return|>", "<|call|>", "<|endoftext|>")]
VOCABULARY = make_vocabulary(harmony_tokenizer().to_str().encode(), 264, ENDS)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome ✓"]}},
    "required": ["city"],
    "additionalProperties": False,
}
F, G = Function("f", CITY, True, "tools[0].function"), Function("g.h", {}, False, "tools[1].function")
ANSWER = StructuredOutputs("json", json.dumps(CITY), "response_format.json_schema.schema")
THOUGHT = ["<|channel|>", "analysis", "<|message|>", "hm <|end|>", "<|end|>", "<|start|>", "assistant"]
PREAMBLE = ["<|channel|>", "commentary", "<|message|>", "I look.", "<|end|>", "<|start|>", "assistant"]
FINAL = ["<|channel|>", "final", "<|message|>"]
CALL = ["<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"city": "Bonn"}']
CALL_OF_TEMPLATE = [" to=functions.f", "<|channel|>", "commentary json", "<|message|>", '{"city": "Bonn"}']


def matcher_of(wanted):
    assert not judge(wanted, VOCABULARY).error, judge(wanted, VOCABULARY).error
    return llguidance.LLMatcher(VOCABULARY.tokenizer, to_lark(wanted, VOCABULARY.special_names), log_level=0)


def admits(wanted, pieces):
    """Whether an output may be these pieces, and end there."""
    matcher, ids = matcher_of(wanted), ids_of(pieces)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def read(ids):
    output = OutputText(TOKENIZER, SamplingParams())
    output.mark(MARKED)
    return summary(parse([output.push(ids, True)]))


def walk(wanted, seed):
    """Ids that the grammar admits, and whether they are a whole output."""
    matcher, rng, ids = matcher_of(wanted), random.Random(seed), []
    mask = np.zeros((1, VOCABULARY.num_words), np.int32)
    while len(ids) < 300 and not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits((mask[0] & VOCABULARY.known).view(np.uint8), bitorder="little"))
        if matcher.is_accepting() and (rng.random() < 0.1 or not len(allowed)):
            break
        ids.append(rng.choices(allowed.tolist(), [40.0 if i >= 256 else 8.0 if i in CLOSING else 1.0 for i in allowed])[0])
        assert matcher.consume_token(ids[-1])
    return ids, matcher.is_accepting()


def test_the_forms_that_the_model_writes_are_admitted():
    forced, named = ToolUse("required", [F, G]), ToolUse("named", [F])
    for tools in (forced, named, ToolUse("auto", [F, G])):
        wanted = harmony_grammar(tools, None)
        for call in (CALL, CALL_OF_TEMPLATE):
            for before in ([], THOUGHT, THOUGHT + PREAMBLE, PREAMBLE + THOUGHT):
                assert admits(wanted, before + call)
        assert admits(wanted, [*FINAL, "Hi"]) == (tools.mode == "auto")
        assert not admits(wanted, [*CALL[:-1], '{"city": "Paris"}'])
        assert not admits(wanted, THOUGHT) and not admits(wanted, ["Hi"])
        assert admits(wanted, ["<|channel|>", "commentary to=functions.g.h json", "<|message|>", "{}"]) == (tools is not named)
    spelled = ["<|channel|>" + "commentary to=functions.f <|constrain|>json<|message|>" + '{"city": "Bonn"}']
    assert not admits(harmony_grammar(named, None), ["\x00" + spelled[0]])  # markers as text are none


@pytest.mark.parametrize(
    ("own", "good", "bad"),
    [
        (ANSWER, '{"city": "Bonn"}', '{"city": 5}'),
        (StructuredOutputs("json_object", "", "response_format"), '{"a": [1]}', "[]"),
        (StructuredOutputs("regex", "a+|b", "guided_regex"), "aaa", "ab"),
        (StructuredOutputs("choice", '["red", "✓"]', "guided_choice"), "✓", "green"),
        (StructuredOutputs("grammar", 'start: "x" | "y"', "guided_grammar"), "y", "z"),
        (StructuredOutputs("grammar", 'root ::= "x" | "y"', "guided_grammar"), "y", "z"),
        (
            StructuredOutputs(
                "structural_tag",
                msgspec.json.encode(
                    {
                        "type": "structural_tag",
                        "format": {"type": "sequence", "elements": [{"type": "ref", "name": "n"}, {"type": "any_text"}]},
                        "definitions": {"n": {"type": "const_string", "value": "n"}},
                    }
                ).decode(),
                "structured_outputs",
            ),
            "no",
            "on",
        ),
        (
            StructuredOutputs(
                "structural_tag",
                msgspec.json.encode(
                    {"structures": [{"begin": "<f>", "schema": CITY, "end": "</f>"}], "triggers": ["<f>"]}
                ).decode(),
                "guided_json",
            ),
            'so <f>{"city": "Bonn"}</f>',
            "<f>{}</f>",
        ),
    ],
)
def test_formats_apply_to_the_answer(own, good, bad):
    for tools in (None, ToolUse("auto", [F])):
        wanted = harmony_grammar(tools, own)
        assert wanted.field == own.field
        for before in ([], THOUGHT):
            assert admits(wanted, [*before, *FINAL, "\x00" + good])
            assert not admits(wanted, [*before, *FINAL, "\x00" + bad])
        assert admits(wanted, CALL) == (tools is not None)
        assert not admits(wanted, [*PREAMBLE, *FINAL, "\x00" + good])  # the content would not be what was asked for


@pytest.mark.parametrize("mode", ["required", "named", "auto"])
@pytest.mark.parametrize("own", [None, ANSWER])
def test_what_the_grammar_admits_is_what_was_asked_for(mode, own):
    tools, whole = ToolUse(mode, [F] if mode == "named" else [F, G]), 0
    wanted = harmony_grammar(tools, own)
    for seed in range(30):
        ids, is_whole = walk(wanted, seed)
        found = read(ids)
        assert len(found["calls"]) <= 1 and (mode == "auto" or not is_whole or found["calls"])
        whole += is_whole
        if not is_whole:
            continue
        for name, arguments in found["calls"]:
            assert isinstance(json.loads(arguments), dict)
            if name == "f":
                jsonschema.validate(json.loads(arguments), CITY)
        if own is not None and not found["calls"]:
            jsonschema.validate(json.loads(found["content"]), CITY)
    assert whole > 3


def test_what_excludes_each_other_and_what_asks_for_nothing():
    assert harmony_grammar(None, None) is None and harmony_grammar(ToolUse("auto", [G]), None) is None
    with pytest.raises(ApiError):
        harmony_grammar(ToolUse("required", [F]), StructuredOutputs("regex", "a", "guided_regex"))
