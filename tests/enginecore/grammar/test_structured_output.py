"""Structured output from message to tokens, by the real core, the real runner and the bundled model in float32.

Output that ends by its grammar is one of its language; cut by length or a stop id it is a beginning of one. So it is with
everything that a request may ask for besides, and whatever runs beside it.
"""

import json
import re

import jsonschema
import pytest
from core_by_hand import EPOCH
from core_with_model import CoreWithModel, Output

from quire.enginecore.grammar import steps
from quire.ipc.messages.frontend import Abort, RequestError
from quire.ipc.sampling import SamplingParams
from quire.ipc.structured_outputs import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = StructuredOutputs("json", json.dumps(SCHEMA))
YES_NO = StructuredOutputs("choice", '["yes", "no"]')


def params(wanted: StructuredOutputs | None = PERSON, **fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 0.0, "structured_outputs": wanted, **fields})


def one(result: list[Output] | RequestError) -> Output:
    assert isinstance(result, list), result
    [output] = result
    return output


def is_a_person(engine: CoreWithModel, output: Output) -> bool:
    jsonschema.validate(engine.json(output), SCHEMA)
    return output.finished is not None and output.finished.reason == "stop"


def begins_one(engine: CoreWithModel, output: Output) -> bool:
    """Whether its tokens can be gone on with."""
    [grammar] = [grammar for grammar in engine.grammars._cache.values() if _is(engine, grammar, PERSON)]
    return grammar.compiled[0].matcher.deep_copy().consume_tokens(output.ids)


def _is(engine: CoreWithModel, grammar, wanted: StructuredOutputs) -> bool:
    from quire.enginecore.grammar.language.texts import to_lark

    return grammar.lark == to_lark(wanted, engine.grammars.vocabulary().special_names)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
        {"temperature": 1.5, "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"min_tokens": 12},
        {"bad_words": ["red"], "bad_words_token_ids": [[5], [900, 901]], "seed": 1, "temperature": 1.0},
        {"logit_bias": {40: 100.0, 41: -100.0}},
        {"ignore_eos": True},
        {"n": 3, "temperature": 1.0, "seed": 9},
    ],
    ids=lambda fields: "-".join(fields) or "greedy",
)
def test_output_parses_and_validates_whatever_else_is_asked_for(engine, fields):
    for output in engine.run("Who is it?", params(**fields)):
        assert is_a_person(engine, output)
        assert not set(output.ids[:-1]) & set(engine.eos)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        (StructuredOutputs("regex", r"\d{3}-\d{2}"), r"\d{3}-\d{2}"),
        (YES_NO, "yes|no"),
        (StructuredOutputs("grammar", 'root ::= ("ab" | "c") [0-9] "!"'), r"(ab|c)\d!"),
        (StructuredOutputs("grammar", 'start: ("x" | "y"){3}'), "[xy]{3}"),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutputs) else "",
)
def test_other_kinds_end_by_themselves(engine, wanted, pattern):
    for fields in ({}, {"ignore_eos": True}, {"temperature": 1.0, "seed": 3}):
        output = one(engine.run("Say it", params(wanted, **fields)))
        assert re.fullmatch(pattern, engine.text(output)) and output.finished.reason == "stop"


def test_json_objects_parse(engine):
    output = one(engine.run("An object", params(StructuredOutputs("json_object"), temperature=0.7, seed=2, max_tokens=200)))
    assert output.finished.reason == "length" or isinstance(engine.json(output), dict)


def test_a_grammar_that_may_end_ends_with_the_models_own_end_and_goes_on_under_ignore_eos(engine):
    wanted = StructuredOutputs("regex", "[a-zA-Z .,!?']+")
    ended = one(engine.run("Hello", params(wanted)))
    assert ended.finished.reason == "stop" and ended.finished.stop_token_id in engine.eos
    longer = one(engine.run("Hello", params(wanted, ignore_eos=True, max_tokens=len(ended.ids) + 5)))
    assert longer.finished.reason == "length" and not set(longer.ids) & set(engine.eos)


def test_a_model_without_end_ids_ends_by_its_grammar():
    engine = CoreWithModel(eos=())
    try:
        assert is_a_person(engine, one(engine.run("Who?", params())))
        assert one(engine.run("Who?", params(StructuredOutputs("regex", "a+"), max_tokens=5))).finished.reason == "length"
    finally:
        engine.close()


@pytest.mark.parametrize("inline_s", [0.0, 60.0], ids=["known later", "known at once"])
def test_a_last_token_that_ends_the_grammar_is_a_stop_and_not_a_length(engine, monkeypatch, inline_s):
    monkeypatch.setattr(steps, "INLINE_S", inline_s)
    length = len(one(engine.run("Say it", params(YES_NO))).ids)
    assert one(engine.run("Say it", params(YES_NO, max_tokens=length))).finished.reason == "stop"
    assert one(engine.run("Say it", params(StructuredOutputs("regex", "a{9,}"), max_tokens=3))).finished.reason == "length"
    assert not engine.core._grammar._ambiguous


def test_an_end_of_which_a_slow_grammar_says_nothing_is_a_length_in_time(engine, monkeypatch):
    monkeypatch.setattr(steps, "INLINE_S", 0.0)
    monkeypatch.setattr(steps, "AMBIGUOUS_S", 0.0)
    grammar, take = engine.core._grammar, engine.core._grammar._apply
    monkeypatch.setattr(grammar, "_apply", lambda *of: None if grammar._ambiguous else take(*of))
    output = one(engine.run("Say it", params(StructuredOutputs("regex", "a+"), max_tokens=1)))
    assert output.finished.reason == "length"


@pytest.mark.parametrize("fields", [{"max_tokens": 5}, {"max_tokens": 1}, {"stop_token_ids": None}], ids=str)
def test_output_that_is_cut_is_a_beginning(engine, fields):
    whole = one(engine.run("Who is it?", params()))
    if "stop_token_ids" in fields:
        fields = {"stop_token_ids": [whole.ids[4]]}
    output = one(engine.run("Who is it?", params(**fields)))
    assert output.ids == whole.ids[: len(output.ids)] and len(output.ids) <= 5
    assert output.finished.reason == ("stop" if "stop_token_ids" in fields else "length")
    assert begins_one(engine, output)


def test_a_special_stop_id_ends_where_the_grammar_may_end_and_nowhere_else(engine):
    special = 2  # <|im_start|>
    wanted = StructuredOutputs("regex", "(ab){3,}")
    output = one(engine.run("ab", params(wanted, stop_token_ids=[special], logit_bias={special: 100.0}, ignore_eos=True)))
    assert output.finished.stop_token_id == special and re.fullmatch("(ab){3,}", engine.text(output))


def test_min_tokens_keeps_ends_away_as_long_as_the_grammar_goes_on(engine):
    ends = dict.fromkeys(engine.eos, 100.0)
    wanted = StructuredOutputs("regex", "[a-z]+")
    assert len(one(engine.run("Hi", params(wanted, logit_bias=ends))).ids) == 2
    assert len(one(engine.run("Hi", params(wanted, logit_bias=ends, min_tokens=9))).ids) == 10
    assert engine.text(one(engine.run("Hi", params(YES_NO, min_tokens=50)))) in ("yes", "no")  # it has nothing more to say


def test_where_bans_and_grammar_leave_nothing_that_request_ends_with_an_error(engine):
    neighbour = (("Who is it?"), params())
    for fields in (
        {"allowed_token_ids": [5, 6]},
        {"bad_words": ["y"], "bad_words_token_ids": [[i] for i in range(2, 200)], "allowed_token_ids": [*range(100)]},
    ):
        failed, person = engine.run_all([("Say it", params(YES_NO, **fields)), neighbour])
        assert isinstance(failed, RequestError) and failed.code == "invalid" and "no token" in failed.message
        assert is_a_person(engine, one(person))
    zero = [[i] for i in engine.encode("0")]
    assert isinstance(engine.run("Say it", params(StructuredOutputs("regex", "0"), bad_words_token_ids=zero)), RequestError)


def test_rows_with_and_without_grammars_do_not_touch_each_other(engine):
    plain = [("Hello there", SamplingParams(max_tokens=12, temperature=0.0)), ("Count", SamplingParams(max_tokens=9, seed=4))]
    alone = [one(engine.run(*request)).ids for request in plain]
    bounded = [("Who is it?", params()), ("Say it", params(YES_NO)), ("Who is it?", params(temperature=1.0, seed=8))]
    solo = [one(engine.run(*request)).ids for request in bounded]
    together = [one(result).ids for result in engine.run_all([*plain, *bounded, *plain, *bounded])]
    assert together == [*alone, *solo, *alone, *solo]


REQUESTS = [(f"Who is number {i}, and why?", params(temperature=1.0, seed=i, max_tokens=70)) for i in range(5)]


@pytest.fixture(scope="module")
def alone(engine) -> list[list[int]]:
    """The tokens of each of REQUESTS by itself."""
    return [one(engine.run(*request)).ids for request in REQUESTS]


@pytest.mark.parametrize(
    "sizes",
    [
        {"budget": 8, "max_num_seqs": 3},  # chunked prefill, and a queue
        {"num_blocks": 14, "block_size": 8, "max_num_seqs": 4, "look_ahead": False, "max_model_len": 100},  # preemption
        {"enable_prefix_caching": False, "depth": 1},
        {"policy": "priority", "max_num_seqs": 2},
    ],
    ids=lambda sizes: next(iter(sizes)),
)
def test_scheduling_does_not_change_what_comes_out(alone, sizes):
    other = CoreWithModel(**sizes)
    try:
        assert [one(result).ids for result in other.run_all(REQUESTS)] == alone
        assert "look_ahead" not in sizes or other.core.scheduler.counters.preemptions
    finally:
        other.close()


def test_masks_are_asked_for_before_the_scheduler_has_the_tokens(engine, monkeypatch):
    """If they depend on nothing else; a sequence that ends with such a token, by length or a stop id, ends as before."""
    update, threads, asked = engine.core.scheduler.update, engine.core._grammar._threads, []

    def spy(*args):
        asked.append(threads.num_outstanding)
        return update(*args)

    stop = engine.encode(",")
    requests = [("Who is it?", params()), ("Who?", params(max_tokens=7)), ("Say it", params(YES_NO))]
    requests += [("Who was it?", params()), ("Who will it be?", params())]  # long enough to be there together
    requests += [
        ("Who is that?", params(stop_token_ids=stop, temperature=0.9, seed=3)),
        ("And?", params(bad_words_token_ids=[[1, 2]])),
    ]
    expected = [one(engine.run(*request)) for request in requests]
    monkeypatch.setattr(engine.core.scheduler, "update", spy)
    for output, alone in zip(engine.run_all(requests), expected, strict=True):
        ends = [(o.ids, o.finished.reason, o.finished.stop_token_id) for o in (one(output), alone)]
        assert ends[0] == ends[1]
    assert max(asked[2:]) >= 3
    asked.clear()
    assert is_a_person(engine, one(engine.run(*requests[-1])))
    assert not any(asked[2:])  # what is bad depends on the tokens; the first mask on none


# ------------------------------------------------------------------------------------------------------- reasoning
END = [50]  # of reasoning: any token will do


def test_nothing_is_bounded_before_the_end_of_reasoning(engine):
    free = one(engine.run("Story", SamplingParams(max_tokens=4, temperature=0.0))).ids
    before = engine.workers.any_token_rows
    fields = {"reasoning_end_token_ids": END, "thinking_token_budget": 4, "max_tokens": 120}
    output = one(engine.run("Story", params(**fields)))
    assert output.ids[:4] == free and output.ids[4] == END[0] and engine.workers.any_token_rows > before
    answer = Output()
    answer.ids, answer.finished = output.ids[5:], output.finished
    assert is_a_person(engine, answer)


def test_without_a_budget_reasoning_may_take_all_tokens(engine):
    output = one(engine.run("Story", params(reasoning_end_token_ids=[49], max_tokens=6)))
    assert output.ids == one(engine.run("Story", SamplingParams(max_tokens=6, temperature=0.0))).ids


@pytest.mark.parametrize("closed", [True, False])
def test_reasoning_that_ended_in_the_prompts_last_turn_is_over(engine, closed):
    old_turn = [*engine.encode("hm"), *END, engine.eos[-1]]
    prompt = [*old_turn, *engine.encode("Who?"), *(END if closed else [])]
    output = one(engine.run(prompt, params(reasoning_end_token_ids=END)))
    if closed:
        assert is_a_person(engine, output)
    else:
        assert output.ids == one(engine.run(prompt, SamplingParams(max_tokens=100, temperature=0.0))).ids


@pytest.mark.parametrize(("ends", "budget"), [([50], 0), ([50], 3), ([50, 60, 50, 70], 2)], ids=str)
def test_a_budget_forces_the_end_without_a_grammar_too(engine, ends, budget):
    free = one(engine.run("Story", SamplingParams(max_tokens=budget + 1, temperature=0.0))).ids
    fields = {"reasoning_end_token_ids": ends, "thinking_token_budget": budget}
    rows = engine.workers.mask_rows
    output = one(engine.run("Story", SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, **fields)))
    assert output.ids[:budget] == free[:budget] and output.ids[budget : budget + len(ends)] == ends
    assert len(output.ids) == 20 and engine.workers.mask_rows - rows <= len(ends) + 1


def test_a_budget_counts_for_reasoning_and_is_ignored_without(engine):
    free = one(engine.run("Story", SamplingParams(max_tokens=12, temperature=0.0))).ids
    fields = {"reasoning_end_token_ids": END, "thinking_token_budget": 2, "max_tokens": 12, "temperature": 0.0}
    missing = next(i for i in range(300, 400) if i not in free)
    assert one(engine.run("Story", SamplingParams(reasoning_start_token_ids=[missing], **fields))).ids == free
    begun = one(engine.run("Story", SamplingParams(reasoning_start_token_ids=free[1:2], **fields))).ids
    at = free.index(free[1]) + 3  # two tokens after its start
    assert begun[:at] == free[:at] and begun[at] == END[0]


def test_a_grammar_waits_for_reasoning_only_if_it_begins(engine):
    fields = {"reasoning_end_token_ids": END, "reasoning_start_token_ids": [49], "thinking_token_budget": 3}
    assert is_a_person(engine, one(engine.run("Story", params(**fields))))
    reasoning = one(engine.run("Story", params(**fields, logit_bias={49: 100.0, 50: -100.0}, max_tokens=20)))
    assert reasoning.ids == [49, 49, 49, 49, *END, *reasoning.ids[5:]]
    answer = Output()
    answer.ids = reasoning.ids[5:]
    assert begins_one(engine, answer)


def test_a_start_of_several_tokens_is_no_way_around_a_grammar(engine):
    """A model that does not reason would never end its reasoning, and its answer would be free."""
    fields = {"reasoning_end_token_ids": END, "reasoning_start_token_ids": [49, 60]}
    for budget in (None, 0, 3):
        assert is_a_person(engine, one(engine.run("Who?", params(**fields, thinking_token_budget=budget))))


# ------------------------------------------------------------------------------------------------------- what goes wrong
def test_a_matcher_in_error_ends_its_own_request(engine):
    bad = engine.submit("Who is it?", params())
    good = engine.submit("Who is it?", params())
    key = bad << 8
    threads = engine.core._grammar._threads  # none of which has the matcher in hand then
    engine.until(lambda: key in engine.outputs and len(engine.outputs[key].ids) > 3 and not threads.num_outstanding)
    seq = next(s for s in engine.core.scheduler.slots.sequences if s is not None and s.request_id == bad)
    seq.constraint.matcher.consume_token(engine.encode("}")[0])  # what its grammar does not allow here
    assert seq.constraint.matcher.is_error()
    engine.until(lambda: bad in engine.errors and engine.has_ended(good))
    assert engine.errors[bad].code == "invalid" and "by its grammar" in engine.errors[bad].message
    assert is_a_person(engine, engine.outputs[good << 8])


def test_a_late_mask_delays_no_other_request_once_its_own_is_aborted(engine, monkeypatch):
    threads = engine.core._grammar._threads
    kept: list = []
    submit = threads.submit
    late = engine.submit("Who is it?", params())
    engine.until(lambda: len(engine.outputs.get(late << 8, Output()).ids) > 2)
    monkeypatch.setattr(threads, "submit", kept.extend)  # a grammar that takes for ever
    other = engine.submit("Hello", SamplingParams(max_tokens=8, temperature=0.0))
    engine.until(lambda: kept and engine.core._masks)
    engine.frontend.send(Abort(EPOCH, [late]))
    engine.until(lambda: engine.has_ended(other))
    assert late not in engine.errors and engine.outputs[other << 8].finished.reason
    monkeypatch.setattr(threads, "submit", submit)
    assert is_a_person(engine, one(engine.run("Who is it?", params())))


def test_nothing_is_left_when_all_have_ended(engine):
    engine.run_all([("Who is it?", params()), ("Say it", params(YES_NO, n=4, temperature=1.0))])
    engine.until(lambda: engine.core.scheduler.is_idle)
    grammar = engine.core._grammar
    assert not grammar._steps and not engine.core._masks and not grammar._threads.num_outstanding
    assert engine.core.scheduler.slots.num_constrained == 0 and engine.workers.controls == 1


def test_steps_without_grammars_have_no_masks(engine):
    rows = engine.workers.mask_rows
    engine.run("Hello", SamplingParams(max_tokens=8, temperature=0.0))
    assert engine.workers.mask_rows == rows
