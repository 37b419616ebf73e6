"""The compiler: grammars of every kind, what is refused and why, what ends the process that tries, and what is kept."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from deadlines import DEADLINE_S
from toy_tokenizers import byte_level, gemma_like, llama2_like, unigram_metaspace

from quire.enginecore.grammar import compiler as compiler_module
from quire.enginecore.grammar.compiler import GrammarCompiler
from quire.enginecore.grammar.language.lark import FORMATS
from quire.enginecore.grammar.limits import NUM_COMPILERS
from quire.enginecore.grammar.trial import TOO_LARGE, TOO_LONG, Trial, judge
from quire.enginecore.grammar.vocabulary import Vocabulary, VocabularyError, make_vocabulary
from quire.enginecore.preparation import PreparationFailed
from quire.enginecore.tasks.generate import GenerateTask
from quire.ipc.sampling import SamplingParams
from quire.ipc.structured_outputs import StructuredOutputs

VOCAB_SIZE = 512  # of the model: more than the tokenizer has
TOKENIZER = byte_level()
DATA = TOKENIZER.to_str().encode()
END = TOKENIZER.token_to_id("</s>")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return make_vocabulary(DATA, VOCAB_SIZE)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(DATA, VOCAB_SIZE, (END,), num_mask_threads=3)
    yield made
    made.close()


def request(wanted: StructuredOutputs | None, n: int = 1, prompt: list[int] | None = None, **params):
    """As much of a request and its sequences as a preparer looks at."""
    p = SamplingParams(structured_outputs=wanted, n=n, **params)
    ids, stop_ids = np.asarray(prompt or [1], np.int32), frozenset(p.stop_token_ids or ())
    task = GenerateTask(p, stop_ids)
    sequences = [SimpleNamespace(task=task, prompt=ids, known=ids, constraint=None) for _ in range(n)]
    return SimpleNamespace(task=SimpleNamespace(params=p), tenant=None), sequences


def prepare(compiler: GrammarCompiler, *args, **kwargs):
    """The sequences, when they are ready."""
    asked, sequences = request(*args, **kwargs)
    future = compiler.prepare(asked, sequences)
    if future is not None:
        assert isinstance(future, Future)
        future.result(DEADLINE_S)
    return sequences


def wanted(kind: str, value: object = "") -> StructuredOutputs:
    return StructuredOutputs(kind, value if isinstance(value, str) else json.dumps(value))


TAG = {"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f="]}


@pytest.mark.parametrize(
    ("asked", "texts", "not_these"),
    [
        (wanted("json", {"enum": ["a", 5]}), ['"a"', "5"], ["6", '"a" ', " 5"]),
        (wanted("json", "true"), ['{"a": [1, null]}', "[]", "1.5e3"], ["{", "tru"]),
        (
            wanted("json", {"properties": {"a": {}}, "type": "object"}),
            ['{"a": 1}', '{\n  "a": 1\n}'],
            ['{  "a": 1}', '{\n\n"a":1}'],
        ),
        (wanted("json", {"type": "object", "x-guidance": {"whitespace_flexible": False}}), ['{"a":1}'], ['{"a": 1}']),
        (
            wanted("json", {"properties": {"format": {"type": "string", "format": "path"}}, "required": ["format"]}),
            ['{"format": "/"}'],
            ["{}", '{"format": 1}'],
        ),
        (wanted("json", {"const": {"format": "path"}}), ['{"format": "path"}'], ["{}"]),
        (
            wanted("json", {"type": "string", "pattern": "^(?!x)a$", "not": {"const": "b"}, "x-guidance": {"lenient": True}}),
            ['"abc"'],
            ["1"],
        ),
        (wanted("json_object"), ["{}", '{"a": {"b": []}}'], ["[]", "1"]),
        (wanted("regex", r"\d+-[a-f]{2}/x"), ["12-ab/x"], ["12-zz/x", "-ab/x"]),
        (wanted("regex", "^ab+$"), ["ab", "abbb"], ["a"]),
        (wanted("regex", "a\nb"), ["a\nb"], ["anb"]),
        (wanted("choice", ["yes", "no", 'q"ü\\', "line\nend"]), ["yes", 'q"ü\\', "line\nend"], ["maybe", "ye"]),
        (wanted("grammar", 'start: "a" b\nb: /[0-9]/ "!"'), ["a5!"], ["a!", "a5"]),
        (wanted("grammar", 'root ::= x | "b"+\nx ::= [0-9]{2} # digits'), ["12", "bbb"], ["1", "12b"]),
        (wanted("structural_tag", TAG), ["hello", "x <f=a>12</f> y <f=a>3</f>"], ["<f=b>", "<f=a>x</f>"]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutputs) else "",
)
def test_grammars_of_every_kind_take_what_they_say_and_nothing_else(vocabulary, asked, texts, not_these):
    verdict = judge(asked, vocabulary)
    assert not verdict.error
    for text in [*texts, *not_these]:
        assert accepts(vocabulary, verdict.lark, text) == (text in texts), text


@pytest.mark.parametrize(
    ("schema", "texts", "not_these"),
    [
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
            ["5", "-9223372036854774784"],
            ["18446744073709551616"],
        ),
        ({"type": "number", "minimum": -3.4e38, "maximum": 1.7976931348623157e308}, ["5.5", "-5"], ["1e400"]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, ["9007199254740994"], ["9007199254740992"]),
        ({"type": "integer", "exclusiveMaximum": 2**53 + 1}, ["9007199254740991"], ["9007199254740993", "9007199254740992"]),
        ({"type": "number", "maximum": 1234567890123456789}, ["1234567890123456500"], ["1234567890123456800"]),
        ({"enum": [2**53, 10**22]}, ["9007199254740992", "10000000000000000000000"], ["9007199254740993"]),
        ({"minProperties": 2, "required": ["a"], "type": "object"}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ['"ab"'], ['"a"']),
        ({"type": "object", "properties": {"minimum": {"type": "null"}}}, ['{"minimum":null}'], ['{"minimum":1}']),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_that_llguidance_would_not_keep_are_made_so_that_it_does(vocabulary, schema, texts, not_these):
    verdict = judge(wanted("json", schema), vocabulary)
    assert not verdict.error
    for text in [*texts, *not_these]:
        assert accepts(vocabulary, verdict.lark, text) == (text in texts), text


def test_formats_that_are_followed_are_those_that_llguidance_knows(vocabulary):
    for name in FORMATS:
        assert not accepts(vocabulary, judge(wanted("json", {"type": "string", "format": name}), vocabulary).lark, '"?"'), name


def accepts(vocabulary: Vocabulary, lark: str, text: str) -> bool:
    import llguidance

    matcher = llguidance.LLMatcher(vocabulary.tokenizer, lark, log_level=0)
    return all(matcher.consume_token(i) for i in vocabulary.tokenizer.greedy_tokenize(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (wanted("json", "{"), "not JSON"),
        (wanted("json", "false"), "must be an object"),
        (wanted("json", {"type": "objekt"}), "objekt"),
        (wanted("json", {"contains": {}, "uniqueItems": True}), "uniqueItems"),
        (wanted("json", {"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (wanted("json", {"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf with alternatives that may overlap"),
        (wanted("json", {"type": "integer", "minimum": 1e20, "maximum": 2e20}), "minimum 1e+20: a bound beyond 64 bits"),
        (wanted("json", {"enum": ["a", {"b": [2**53 + 1]}]}), "9007199254740993 in const or enum is beyond 2^53"),
        (wanted("json", {"items": {"const": -(2**63)}}), "-9223372036854775808 in const or enum"),
        (wanted("json", {"const": -(10**400)}), f"-1{38 * '0'}... in const or enum is beyond 2^53"),
        (wanted("json", {"minimum": 10**400}), f"minimum 1{39 * '0'}...: a bound beyond 64 bits"),
        (
            wanted("json", {"minProperties": 2.0, "patternProperties": {"^[ab]$": {}}, "additionalProperties": False}),
            "minProperties 2",
        ),
        (wanted("regex", "ab(c"), "unclosed group"),
        (wanted("regex", ""), "empty"),
        (wanted("choice", []), "list of texts"),
        (wanted("choice", ["a", 5]), "list of texts"),
        (wanted("grammar", 'start: "a" c'), "1(8)"),
        (wanted("grammar", 'start: "a"\nb: ('), "2("),
        (wanted("grammar", 'root ::= "a" x'), "there is no rule 'x'"),
        (wanted("grammar", ""), "start"),
        (wanted("structural_tag", {"structures": [{"begin": "a"}], "triggers": ["b"]}), "structures[0]: 'a' must begin with"),
        (wanted("structural_tag", {"structures": [{"begin": "a"}], "triggers": []}), "must not be empty"),
        (
            wanted("structural_tag", {"structures": [{"begin": "a", "schema": {"items": {"type": "x"}}}], "triggers": ["a"]}),
            "structures[0].schema: at #/items: ",
        ),
        (wanted("json", {"properties": {"a": {"anyOf": [{}, {"contains": {}}]}}}), "at #/properties/a/anyOf/1: "),
        (wanted("json", {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"contains": {}}}}), "at #/$defs/x: "),
        (
            wanted("json", {"$ref": "#/$defs/x", "$defs": {"x": {"$comment": "tools[1].function.parameters", "contains": {}}}}),
            "tools[1].function.parameters: Un",
        ),
        (
            wanted("json", {"$ref": "#/$defs/x", "$defs": {"x": {"$comment": "tools[1]", "pattern": "(?=a)b"}}}),
            "tools[1]: regex parse error",
        ),
        (wanted("structural_tag", {"type": "structural_tag"}), "needs a `format`, or `structures`"),
        (wanted("json", {"$ref": "#"}), "there is no text that it allows"),
        (wanted("structural_tag", {"structures": 5, "triggers": []}), "structures"),
    ],
)
def test_a_bad_grammar_is_refused_with_what_is_wrong_and_where(vocabulary, asked, message):
    error = judge(asked, vocabulary).error
    assert message in error and "no_forcing" not in error and "<non-verbose/>" not in error


TOO_MUCH, NOT_KEPT, NO_LENGTH = {"minimum": 1e20}, {"const": 2**53 + 1}, {"type": "string", "maxLength": "x"}
TOOLS = {"$ref": "#/$defs/x", "$defs": {"x": {"$comment": "tools[1].function.parameters", "items": NOT_KEPT}}}


@pytest.mark.parametrize(
    ("schema", "beginning"),
    [
        (TOO_MUCH, "at #/minimum: minimum 1e+20: "),
        ({"properties": {"a/b~": {"anyOf": [{}, {"items": TOO_MUCH}]}}}, "at #/properties/a~1b~0/anyOf/1/items/minimum: "),
        ({"$defs": {"x": {"items": {"minProperties": 3}}}}, "at #/$defs/x/items/minProperties: "),
        ({"properties": {"minimum": {"enum": [1, 2**53 + 1]}}}, "at #/properties/minimum/enum: "),
        (TOOLS, "tools[1].function.parameters: at #/items/const: "),
        (NO_LENGTH, "at #/maxLength: Expected "),
        ({"properties": {"a": {"items": NO_LENGTH}}}, "at #/properties/a/items/maxLength: Expected "),
        ({"$ref": "#/$defs/x", "$defs": {"x": NO_LENGTH}}, "at #/$defs/x/maxLength: Expected "),
        ({"properties": {"a": {"items": {"$ref": "#/$defs/x"}}}}, "at #/properties/a/items: Pointer '/$defs/x' does not exist"),
        ({"properties": {"a": {"items": {"$ref": "#/$defs/x"}}}, "$defs": {"x": {"contains": {}}}}, "at #/$defs/x: "),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": NO_LENGTH}}, "at #/properties/b/maxLength: "),
    ],
)
def test_where_a_schema_is_wrong_is_said_by_a_pointer(vocabulary, schema, beginning):
    assert judge(wanted("json", schema), vocabulary).error.startswith(beginning)


@pytest.mark.parametrize("style", ["json", "qwen_xml", "minimax_xml", "glm_xml", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"type": "array", "items": TOO_MUCH}}}, "/properties/a/items/minimum"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "array", **TOO_MUCH}}}, "/$defs/x/minimum"),
    ],
)
def test_a_pointer_begins_in_the_schema_that_the_user_wrote(vocabulary, style, schema, pointer):
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema, "style": style}}
    error = judge(wanted("structural_tag", tag), vocabulary).error
    assert error.startswith(f"structural_tag: format.json_schema: at #{pointer}: minimum 1e+20")


def test_where_a_regex_is_wrong_is_shown(vocabulary):
    assert "    ab(c\n      ^" in judge(wanted("regex", "ab(c"), vocabulary).error


CHAIN = {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(6000)} | {"a6000": {}}, "$ref": "#/$defs/a0"}


def test_what_ends_the_process_that_tries_ends_its_request_alone():
    trial = Trial(DATA, VOCAB_SIZE)
    try:
        assert trial.run(wanted("choice", ["a"])).error == ""
        assert trial.run(wanted("json", CHAIN), 60.0).error == TOO_LARGE  # its stack
        assert trial.run(wanted("regex", "a?" * 60_000), 60.0).error == TOO_LARGE  # its memory
        assert trial.run(wanted("choice", ["b"])).error == ""
        pid = trial._child._child.pid
        slow = wanted("json", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}})
        assert trial.run(slow, timeout_s=0.02).error == TOO_LONG
        assert trial.run(wanted("choice", ["b"])).error == "" and trial._child._child.pid != pid
        os.kill(trial._child._child.pid, signal.SIGKILL)  # as the kernel does, short of memory: the next is not to blame
        assert trial._child._child.wait(DEADLINE_S) == -signal.SIGKILL
        assert trial.run(wanted("choice", ["b"])).error == ""
    finally:
        trial.close()


def wait_for_compilers(compiler):
    """Until they have done what they were given before: each takes one of these, and none leaves before the other has come."""
    together = threading.Barrier(NUM_COMPILERS)
    for arrived in [compiler._executor.submit(together.wait, 30) for _ in range(NUM_COMPILERS)]:
        arrived.result(DEADLINE_S)


def test_a_grammar_is_compiled_once_for_each_thread_that_may_use_it(compiler):
    asked = wanted("json_object")
    [first] = prepare(compiler, asked)
    grammar = next(iter(compiler._cache.values()))
    assert len(grammar.compiled) == 1 and first.constraint.matcher is not grammar.compiled[0].matcher
    request_of_two = request(asked, n=2)
    assert compiler.prepare(*request_of_two) is None  # nobody waits for what is there
    wait_for_compilers(compiler)
    four = prepare(compiler, asked, n=4)
    assert len(grammar.compiled) > 1 and {seq.constraint.lexer for seq in four} == {each.lexer for each in grammar.compiled}
    assert len({id(seq.constraint.matcher) for seq in four}) == 4 and len(compiler._cache) == 1


def test_a_grammar_that_is_used_by_one_after_the_other_keeps_its_lexer(compiler):
    asked, lexers = wanted("json_object"), set()
    for _ in range(4):
        [seq] = prepare(compiler, asked)
        lexers.add(seq.constraint.lexer)
        del seq
        wait_for_compilers(compiler)
    [grammar] = compiler._cache.values()
    assert len(lexers) == len(grammar.compiled) == 1 and not grammar.compiled[0].users


def test_children_of_a_request_have_a_matcher_each(compiler):
    a, b, c = prepare(compiler, wanted("choice", ["ab", "cd"]), n=3)
    assert len({seq.constraint.lexer for seq in (a, b, c)}) == 3
    [token] = compiler.vocabulary().tokenizer.greedy_tokenize("a")
    assert a.constraint.matcher.consume_token(token)
    assert [seq.constraint.matcher.is_error() for seq in (a, b, c)] == [False] * 3
    assert b.constraint.matcher.consume_token(compiler.vocabulary().tokenizer.greedy_tokenize("c")[0])


def test_a_bad_grammar_is_remembered(compiler):
    with pytest.raises(PreparationFailed, match=r"(?s)structured_outputs \(regex\): .*unclosed"):
        prepare(compiler, wanted("regex", "("))
    with pytest.raises(PreparationFailed, match="unclosed"):
        compiler.prepare(*request(wanted("regex", "(")))
    with pytest.raises(PreparationFailed, match=r"structured_outputs \(json\)"):  # the kind is part of its name
        prepare(compiler, wanted("json", "("))


def test_the_least_recently_used_grammars_are_forgotten(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    for text in ("a", "b", "a", "c"):
        prepare(compiler, wanted("choice", [text]))
    kept = [grammar.lark for grammar in compiler._cache.values()]
    assert ['"a"' in kept[0], '"c"' in kept[1], len(kept)] == [True, True, 2]
    assert compiler._cached_bytes == sum(grammar.num_bytes for grammar in compiler._cache.values())


def test_grammars_that_were_not_used_lately_are_kept_as_text_and_compiled_again_without_a_trial(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_COMPILED", 2)
    [early] = prepare(compiler, wanted("choice", ["a"]))
    for text in ("b", "c"):
        prepare(compiler, wanted("choice", [text]))
    assert [len(grammar.compiled) for grammar in compiler._cache.values()] == [0, 1, 1]
    assert list(compiler._compiled) == list(compiler._cache)[1:]
    for trial in compiler._trials:
        trial.close()
    [late] = prepare(compiler, wanted("choice", ["a"]))
    for seq in (early, late):
        [token] = compiler.vocabulary().tokenizer.greedy_tokenize("a")
        assert seq.constraint.matcher.consume_token(token) and seq.constraint.matcher.is_accepting()
    assert not any(trial._child.is_there for trial in compiler._trials)
    assert early.constraint.lexer != late.constraint.lexer
    assert [len(grammar.compiled) for grammar in compiler._cache.values()] == [0, 1, 1]
    assert compiler._cached_bytes == sum(grammar.held_bytes for grammar in compiler._cache.values())
    compiler._cached_bytes += 1 << 40
    prepare(compiler, wanted("choice", ["b"]))  # alone, as there is no room
    assert [len(grammar.compiled) for grammar in compiler._cache.values()] == [1] and len(compiler._compiled) == 1


def test_the_trial_measures_each_grammar_though_the_memory_of_earlier_ones_is_used_again(vocabulary):
    schema = {"properties": {f"a{i}": {"type": "string", "maxLength": i} for i in range(40)}, "type": "object"}
    sizes = [judge(wanted("json", schema), vocabulary).num_bytes for _ in range(3)]
    assert min(sizes) > 100_000 and max(sizes) < 2 * min(sizes)


def test_a_request_without_grammar_and_budget_costs_nothing(compiler):
    [seq] = prepare(compiler, None)
    assert seq.constraint is None and compiler._vocabulary is None
    [seq] = prepare(compiler, None, reasoning_end_token_ids=[5])
    assert seq.constraint is None


@pytest.mark.parametrize("make", [byte_level, llama2_like, gemma_like, unigram_metaspace], ids=lambda make: make.__name__)
def test_tokenizers_of_common_kinds_have_the_bytes_that_their_text_has(make):
    tokenizer = make()
    vocabulary = make_vocabulary(tokenizer.to_str().encode(), 700)
    for text in (" hello", " world abc", " the cat"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.tokenizer.decode_bytes(ids).decode().lstrip() == text.lstrip()
    assert vocabulary.end_id == 700 and vocabulary.tokenizer.eos_token == 700 and vocabulary.num_words == 22
    known = np.unpackbits(vocabulary.known.view(np.uint8), bitorder="little")
    assert known[: tokenizer.get_vocab_size()].all() and not known[tokenizer.get_vocab_size() :].any()
    assert tokenizer.token_to_id("<|im_end|>") in vocabulary.special
    assert tokenizer.token_to_id("<tool>") not in vocabulary.special  # is text


def test_a_tokenizer_whose_tokens_are_words_is_refused_in_words():
    words = json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}, "added_tokens": []}).encode()
    with pytest.raises(VocabularyError, match="not pieces of a text"):
        make_vocabulary(words, 10)
    compiler = GrammarCompiler(words, 10, (), 1)
    with pytest.raises(PreparationFailed, match="not available for this model's tokenizer"):
        prepare(compiler, wanted("json_object"))
    compiler.close()
