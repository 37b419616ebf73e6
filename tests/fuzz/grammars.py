"""Target: grammars of structured output: schemas, regexes, choices, Lark and EBNF grammars, structural tags.

A text within the frontend's bounds is tried in a child process, as the core does it. The verdict comes in time; an error is
a text without a trace; and a grammar that passes compiles here, too, allows some token until it ends, and only tokens of
the vocabulary.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from fuzz.body_seeds import CHATS
from fuzz.case import Case, Draw, Target, must
from fuzz.mutate import json_bytes, mutated_json, mutated_text
from llguidance.numpy import fill_next_token_bitmask

from quire.enginecore.grammar.limits import PARSER_LIMITS
from quire.enginecore.grammar.trial import Trial
from quire.enginecore.grammar.vocabulary import Vocabulary, make_vocabulary
from quire.enginecore.loading.model_files import BUNDLED
from quire.frontend.http.api.bodies.body import BodyDecoder
from quire.frontend.http.api.bodies.schemas import ChatRequest
from quire.frontend.http.api.bodies.unknown_fields import UnknownFields
from quire.frontend.http.api.output_plan import take_tools
from quire.frontend.http.api.tools.harmony_grammar import harmony_grammar
from quire.frontend.http.api.tools.tool_grammar import tool_grammar
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS
from quire.ipc.structured_outputs import StructuredOutputs
from quire.ipc.structured_outputs_params import structured_message

_VOCAB_SIZE, _EOS = 2816, [2]
_STEPS = 24  # tokens that are taken of a grammar
_decoder, _unknown = BodyDecoder(ChatRequest), UnknownFields()
_TEXTS: list[tuple[str, str]] = [
    ("regex", r"(a|b){2,5}\d+[^x-z\n]?(?:é|\u2713)+"),
    ("regex", "(?x) a  # comment\n [bc]{1,3}"),
    ("regex", r"^\w+@\w+\.(com|org)$"),
    ("choice", '["yes", "no", "maybe \\u00e9"]'),
    ("grammar", 'root ::= item ("," item)*\nitem ::= [a-z]+ | "\\"" [^"\\n]* "\\"" | num\nnum ::= [0-9]{1,4}\n'),
    ("grammar", 'start: word (" " word)* END?\nword: /[a-z]+/ | "x"i\nEND: "."\n%ignore / +/\n'),
    ("grammar", 'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}\n'),
    ("json_object", ""),
]
_SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "date"}, "b": {"enum": [1, "x", None]}},
        "required": ["a"],
    },
    {
        "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}]}},
        "$ref": "#/$defs/n",
    },
    {
        "type": "array",
        "prefixItems": [{"const": 1}],
        "items": {"type": "number", "minimum": -1.5, "multipleOf": 0.5},
        "minItems": 1,
        "maxItems": 4,
    },
    {
        "allOf": [{"type": "object", "patternProperties": {"^x": {"type": "boolean"}}}, {"maxProperties": 3}],
        "unevaluatedProperties": False,
    },
    {
        "oneOf": [{"type": "string", "pattern": "^[A-Z]{2}$"}, {"type": "integer", "exclusiveMinimum": 0}],
        "x-guidance": {"coerce_one_of": True},
    },
    True,
]
_FORMATS: list[Any] = [
    {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "a"},
            {"type": "regex", "pattern": "b+"},
            {"type": "any_text", "excludes": ["z"]},
        ],
    },
    {
        "type": "or",
        "elements": [
            {"type": "grammar", "grammar": 'root ::= "q"'},
            {"type": "json_schema", "json_schema": {"type": "integer"}},
        ],
    },
    {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"type": "tag", "begin": "<f=a>", "content": {"type": "ref", "name": "d"}, "end": "</f>"}],
        "at_least_one": True,
        "stop_after_first": True,
    },
    {
        "type": "tags_with_separator",
        "separator": ", ",
        "tags": [{"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": [")", "]"]}],
    },
    {
        "type": "star",
        "content": {"type": "optional", "content": {"type": "plus", "content": {"type": "const_string", "value": "x"}}},
    },
]


def seeds() -> Sequence[Case]:
    found = [Case({"kind": kind}, text.encode()) for kind, text in _TEXTS]
    found += [Case({"kind": "json"}, json.dumps(schema).encode()) for schema in _SCHEMAS]
    for form in _FORMATS:
        tag = {
            "type": "structural_tag",
            "format": form,
            "definitions": {"d": {"type": "json_schema", "json_schema": {"type": "object"}}},
        }
        found.append(Case({"kind": "structural_tag"}, json.dumps(tag).encode()))
    for chat in CHATS:
        if chat.get("tools"):
            found += [
                Case({"kind": "tools", "parser": name}, json.dumps(chat).encode())
                for name in ("hermes", "gemma4", "qwen3_coder", "harmony")
            ]
    return found


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    kind = case.head["kind"]
    if kind not in ("json", "structural_tag", "tools"):
        words = [draw.choice(others).payload.decode(errors="replace") for _ in range(3)]
        words += [
            "|",
            "(",
            ")*",
            "{0,100}",
            "[^",
            "\\p{L}",
            "(?i)",
            "::=",
            "\n",
            "%ignore ",
            "/x/",
            '"',
            "~ 1..9",
            "\\b",
            ".*",
            "(?=a)",
        ]
        return Case(
            case.head, mutated_text(draw, case.payload.decode(errors="replace"), words)[:20000].encode(errors="replace")
        )
    head = {**case.head, "parser": draw.choice(["harmony", "", *TOOL_PARSERS])} if kind == "tools" else case.head
    try:
        value, parts = json.loads(case.payload), [json.loads(other.payload) for other in others if other.head["kind"] == kind]
    except (ValueError, RecursionError):
        return Case(head, case.payload[: draw.randrange(len(case.payload) + 1)])
    if kind == "tools" and isinstance(value, dict):  # of a chat, only its tools
        tools = mutated_json(draw, value.get("tools"), [part.get("tools") for part in parts if isinstance(part, dict)])
        return Case(head, json.dumps({**value, "tools": tools}).encode())
    return Case(head, json_bytes(draw, mutated_json(draw, value, parts))[:50000])


# --------------------------------------------------------------------------------------------------------------- a case
@functools.cache
def _tokenizer() -> bytes:
    return (BUNDLED / "tokenizer.json").read_bytes()


@functools.cache
def _trial() -> Trial:
    return Trial(_tokenizer(), _VOCAB_SIZE, _EOS)


@functools.cache
def _vocabulary() -> Vocabulary:
    return make_vocabulary(_tokenizer(), _VOCAB_SIZE, _EOS)


def check(case: Case) -> None:
    try:
        wanted = _wanted(case)
    except (ValueError, ApiError) as error:  # for the user
        must(str(error).strip(), "an error without a text")
        return
    if wanted is None:
        return
    verdict = _trial().run(wanted)
    if verdict.error:
        lowered = verdict.error.lower()
        must(
            "panicked" not in lowered and "traceback" not in lowered and "assert" not in lowered,
            "an error of ours:",
            verdict.error,
        )
        return
    _walk(verdict.lark)


def _wanted(case: Case) -> StructuredOutputs | None:
    """The grammar as a frontend would send it; None if the output is free. Raises ValueError, ApiError."""
    kind, text = case.head["kind"], case.payload.decode(errors="replace")
    if kind == "tools":
        use = take_tools(_decoder.decode(bytearray(case.payload), _unknown))
        if use is None or case.head["parser"] == "harmony":
            return harmony_grammar(use, None)
        return tool_grammar(use, TOOL_PARSERS.get(case.head["parser"]))
    if kind == "choice":
        return structured_message(choice=json.loads(text))
    return structured_message(**{kind: True if kind == "json_object" else text})


def _walk(lark: str) -> None:
    """Compile it as the core does, and take tokens that it allows."""
    vocabulary, draw = _vocabulary(), np.random.default_rng(0)
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, lark, log_level=0, limits=PARSER_LIMITS)
    must(not matcher.is_error(), "the trial took what the core does not:", matcher.get_error())
    masks = np.zeros((1, vocabulary.num_words), np.int32)
    for _ in range(_STEPS):
        fill_next_token_bitmask(matcher, masks)
        must(not matcher.is_error(), "a mask cannot be made:", matcher.get_error())
        ids = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        if matcher.is_stopped() or not len(ids):
            return
        must(ids.max() <= vocabulary.end_id, "a token that the model lacks is allowed:", ids.max())
        must(matcher.consume_token(int(draw.choice(ids))), "a token that is allowed is not taken:", matcher.get_error())


TARGET = Target("grammars", seeds, mutate, check, most_s=8.0)
